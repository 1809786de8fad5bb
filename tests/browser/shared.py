"""One notebook that tests take in turns: a page takes five seconds to open, its kernel two more."""

from __future__ import annotations

from collections.abc import Sequence

from playwright.sync_api import Browser

from tests.browser.lab import Notebook
from tests.browser.server import Lab


class Shared:
    """A notebook whose first cells stay as they were made; what a test adds behind them goes when it is given back.

    After a test that failed, or in whose page something went wrong, the next one gets another notebook.
    """

    def __init__(self, lab: Lab, browser: Browser, cells: Sequence[str]) -> None:
        """Take the first cells, run once the notebook is opened, for the first test that asks for it."""
        self._lab, self._browser, self._cells = lab, browser, cells
        self._notebook: Notebook | None = None

    def take(self) -> Notebook:
        """Return the notebook, made where there is none."""
        if self._notebook is None:
            self._notebook = Notebook(self._lab, self._browser, self._cells)
            for index in range(len(self._cells)):
                self._notebook.run(index)
        return self._notebook

    def give_back(self, failed: bool) -> None:
        """Interrupt what still runs, check the page for errors and remove what a test added; `failed`: close it."""
        notebook = self._notebook
        if failed or notebook is None:
            self.close()
            return
        try:
            notebook.leave_cells(len(self._cells))
            notebook.check()
        except BaseException:
            self.close()
            raise

    def close(self, check: bool = False) -> None:
        """Close the notebook where it is open; `check`: fail if its page threw since it was given back."""
        made, self._notebook = self._notebook, None
        if made is not None:
            made.close(check)
