"""How long the running cell has taken, or the last one took."""

from __future__ import annotations

import sys
import time
from typing import Any

from rlbench.units import format_age, format_seconds


class CellClock:
    """Follows IPython's cells from the one it is made in; outside IPython it has nothing to say."""

    def __init__(self) -> None:
        self._begin: float | None = None
        self._total: float | None = None
        module = sys.modules.get("IPython")
        self._shell: Any = module.get_ipython() if module is not None else None
        if self._shell is not None:
            self._begin = time.monotonic()
            self._shell.events.register("pre_run_cell", self._before)
            self._shell.events.register("post_run_cell", self._after)

    def text(self) -> str:
        """`cell 12 s` while it runs, `cell total 41 s` after it; empty where no cell is known."""
        if self._begin is not None:
            return f"cell {format_age(time.monotonic() - self._begin)}"
        return "" if self._total is None else f"cell total {format_seconds(self._total)}"

    def close(self) -> None:
        """Follow the cells no more."""
        if self._shell is not None:
            self._shell.events.unregister("pre_run_cell", self._before)
            self._shell.events.unregister("post_run_cell", self._after)
            self._shell = None

    def _before(self, *_: Any) -> None:
        self._begin = time.monotonic()

    def _after(self, *_: Any) -> None:
        if self._begin is not None:
            self._total = time.monotonic() - self._begin
            self._begin = None
