"""Drives a notebook in a real JupyterLab (`Lab`), in a real Chromium, as a person does.

    with Notebook(lab, browser, ["1 + 1"]) as notebook:
        notebook.run(0)
        assert notebook.output(0) == "2"

Chromium is the system's: playwright downloads none. What a page throws and what it logs as an error is collected, and
fails the test when the notebook is closed.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar

import nbformat
from playwright.sync_api import Browser, ConsoleMessage, Locator, Page, Request, Response

from tests.browser.server import Lab
from tests.clock import LIMIT_S, Value, until

CHROMIUM = os.environ.get("RLB_CHROMIUM") or next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
CHROMIUM_ARGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",  # in a container it may be small, and Ray uses it
)
OF_A_LOST_KERNEL = "Canceled future for kernel_info_request"
"""What JupyterLab itself throws where a kernel is killed or restarted just as Lab asks it who it is."""
LOOK_MS = 50
"""Between two looks at a page that loads: playwright's own come with each frame, which keeps the page drawing."""
THEMES = {"light": "JupyterLab Light", "dark": "JupyterLab Dark"}

# The page's notebook (the one in front) as `panel`, its cells as `cells`: what all snippets below start with.
PANEL = """
const shown = window.jupyterapp?.shell;
const panel = [shown?.currentWidget, ...shown?.widgets('main') ?? []]
    .find(widget => widget?.content?.widgets && widget.sessionContext);
const cells = panel?.content.widgets ?? [];
"""
# not awaited: the promise ends with the cell
RUN = """
const cell = cells[index];
panel.content.deselectAll();
panel.content.activeCellIndex = index;
panel.content.mode = 'command';
cell.rlbRun = 'running';
window.jupyterapp.commands.execute('notebook:run-cell').then(
    () => { cell.rlbRun = 'done'; }, error => { cell.rlbRun = 'done'; console.error(`run-cell: ${error}`); });
"""


class Notebook:
    """A notebook open in a page of its own (a browser context of its own: nothing is shared with other pages).

    Cells are counted from 0. `page` is playwright's, for what this class does not offer. `errors` is what went wrong
    in the page so far; a test that provokes an error on purpose removes it from there.
    """

    opened: ClassVar[list[Notebook]] = []
    """Those open now, for a picture of each where a test fails."""

    def __init__(
        self,
        lab: Lab,
        browser: Browser,
        cells: Sequence[str] = (),
        *,
        kernel: str = "python3",
        theme: str = "light",
        name: str | None = None,
        notebook: nbformat.NotebookNode | None = None,
        start_kernel: bool = True,
    ) -> None:
        """Write a notebook of code `cells` into the lab's root and open it.

        Args:
            kernel: name of its kernelspec (`python3`, or one of `Lab.add_kernel`).
            theme: "light" or "dark".
            name: of the file, without suffix; made up unless given.
            notebook: a whole notebook to open instead of `cells`, for instance one saved earlier, with its outputs.
            start_kernel: False opens it without a kernel, as a reader of a saved notebook sees it.
        """
        self.lab, self.name, self.errors = lab, name or f"nb-{secrets.token_hex(3)}", list[str]()
        self.path = lab.root / f"{self.name}.ipynb"
        made = notebook or nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c.strip("\n")) for c in cells])
        _write(made, self.path, kernel if start_kernel else None)
        self._context = browser.new_context(viewport={"width": 1280, "height": 900})
        self.page: Page = self._context.new_page()
        self.page.set_default_timeout(1000 * LIMIT_S)
        self._lost_kernel = False
        self.page.on("pageerror", self._thrown)
        self.page.on("console", self._heard)
        self.refused: list[str] = []
        self.page.on("response", self._answered)
        self.page.on("requestfailed", self._unanswered)
        self.page.on("dialog", lambda dialog: dialog.accept())  # "leave page?" on a reload
        self._with_kernel = start_kernel
        Notebook.opened.append(self)
        try:
            self._go(f"reset&token={lab.token}")
            self.theme(theme)
        except BaseException:
            self.close(check=False)
            raise

    def __enter__(self) -> Notebook:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close(check=kind is None)

    # -- cells

    def add(self, source: str) -> int:
        """Append a code cell; returns its index."""
        return int(
            self._js(
                "const shared = panel.content.model.sharedModel;"
                "shared.insertCell(cells.length, {cell_type: 'code', source, metadata: {trusted: true}});"
                "return panel.content.widgets.length - 1;",
                source=source.strip("\n"),
            )
        )

    def leave_cells(self, count: int) -> None:
        """Interrupt a last cell that still runs, and delete all cells but the first `count`."""
        last = int(self._js("return cells.length - 1;"))
        if last >= 0 and self.runs(last):
            self.interrupt()
            self.wait(last)
        self._js("const s = panel.content.model.sharedModel; s.deleteCellRange(count, s.cells.length);", count=count)

    def run(self, index: int, wait: bool = True, timeout: float = LIMIT_S) -> None:
        """Run a cell; with `wait` until it ended, well or not. `timeout` in seconds."""
        self._js(RUN, index=index)
        if wait:
            self.wait(index, timeout)

    def do(self, source: str, wait: bool = True, timeout: float = LIMIT_S) -> int:
        """`add` and `run`; returns the cell's index."""
        index = self.add(source)
        self.run(index, wait, timeout)
        return index

    def wait(self, index: int, timeout: float = LIMIT_S) -> None:
        """Wait until a cell that runs has ended; AssertionError with its output if it has not in time."""
        self.until(lambda: not self.runs(index), timeout, lambda: f"cell {index} still runs:\n{self.output(index)}")

    def runs(self, index: int) -> bool:
        """True while a cell runs or waits for its turn. (The kernel's status says "idle" during some busy cells.)

        A cell that the page has not drawn yet, after it was loaded anew, was not run in it.
        """
        return bool(
            self._js(
                "const cell = cells[index]; return cell.rlbRun ? cell.rlbRun === 'running' "
                ": cell.node.querySelector('.jp-InputPrompt')?.textContent === '[*]:';",
                index=index,
            )
        )

    def prompt(self, index: int) -> str:
        """What stands left of a cell: `[*]:` while it runs, `[3]:` after it, `[ ]:` before."""
        return str(self._js("return cells[index].node.querySelector('.jp-InputPrompt').textContent;", index=index))

    def output(self, index: int) -> str:
        """The text of a cell's outputs, as rendered, without the prompts."""
        return str(
            self._js(
                "cells[index].node.scrollIntoView({block: 'nearest'});"  # else what is out of sight has no text
                "return [...cells[index].node.querySelectorAll('.jp-OutputArea-output')]"
                ".map(node => node.innerText).join('\\n').trim();",
                index=index,
            )
        )

    def error(self, index: int) -> str:
        """Name and message of the error that a cell ended with; empty where it ended well."""
        return str(
            self._js(
                "const error = cells[index].model.sharedModel.getOutputs().find(o => o.output_type === 'error');"
                "return error ? `${error.ename}: ${error.evalue}` : '';",
                index=index,
            )
        )

    def cell(self, index: int) -> Locator:
        """A cell's output area, to look for elements in it: `notebook.cell(2).get_by_role("button")`."""
        self._js("cells[index].node.scrollIntoView({block: 'nearest'});", index=index)
        in_front = ".jp-NotebookPanel:not(.lm-mod-hidden)"
        return self.page.locator(f"{in_front} .jp-Cell[data-windowed-list-index='{index}'] .jp-Cell-outputWrapper")

    def wait_text(self, index: int, text: str | re.Pattern[str], timeout: float = LIMIT_S) -> str:
        """Wait until a cell's output holds `text` (or a match of it); returns the whole output.

        AssertionError with what it showed instead if it does not in `timeout` seconds.
        """
        wanted = text if isinstance(text, re.Pattern) else re.compile(re.escape(text))

        def shown() -> str:
            output = self.output(index)
            return output if wanted.search(output) else ""

        return self.until(shown, timeout, lambda: f"cell {index} shows no {wanted.pattern!r}:\n{self.output(index)}")

    def until(
        self, condition: Callable[[], Value], timeout: float = LIMIT_S, what: str | Callable[[], object] = ""
    ) -> Value:
        """Wait until `condition` is true, while the page goes on; returns its value."""
        return until(condition, timeout, what, lambda seconds: self.page.wait_for_timeout(1000 * seconds))

    # -- the kernel

    def interrupt(self) -> None:
        """JupyterLab's own Interrupt Kernel."""
        self._command("notebook:interrupt-kernel")

    def restart_kernel(self, timeout: float = LIMIT_S) -> None:
        """JupyterLab's own Restart Kernel, confirmed in its dialog; returns when the new process answers."""
        before = self.kernel_pid()
        self._lost_kernel = True
        self._command("notebook:restart-kernel")
        self.accept_dialog("Restart")
        self.wait_for_kernel(not_pid=before, timeout=timeout)

    def kill_kernel(self) -> int:
        """As when its memory ran out; its process id. JupyterLab says so in a dialog, and starts another by itself."""
        pid = self.kernel_pid()
        assert pid is not None
        self._lost_kernel = True
        os.kill(pid, signal.SIGKILL)
        return pid

    def kernel_pid(self) -> int | None:
        """Process id of the kernel, also while it is busy; None while there is none."""
        kernel_id = self._js("return panel.sessionContext.session?.kernel?.id ?? '';")
        process = self.lab.kernel_process(kernel_id) if kernel_id else None
        return None if process is None else process.pid

    def wait_for_kernel(self, not_pid: int | None = None, timeout: float = LIMIT_S) -> None:
        """Wait until the kernel (another process than `not_pid`) is connected and idle."""

        def status() -> str:
            kernel = "panel.sessionContext.session?.kernel"
            return str(self._js(f"const k = {kernel}; return `${{k?.connectionStatus}} ${{k?.status}}`;"))

        self.until(
            lambda: self.kernel_pid() not in (None, not_pid) and status() == "connected idle",
            timeout,
            lambda: f"no kernel: {status()}, pid {self.kernel_pid()} (before: {not_pid})",
        )

    # -- the page

    def accept_dialog(self, text: str, timeout: float = LIMIT_S) -> str:
        """Press the default button of JupyterLab's dialog that says `text`; returns all it said."""
        dialog = self.page.locator(".jp-Dialog", has_text=text)
        dialog.wait_for(timeout=timeout * 1000)
        said = dialog.inner_text()
        dialog.locator("button.jp-mod-accept").click()
        dialog.wait_for(state="detached")
        return said

    def save(self) -> nbformat.NotebookNode:
        """Save the notebook; returns what is in the file."""
        self._js("return panel.context.save();")
        return nbformat.read(self.path, as_version=4)

    def reload(self) -> None:
        """Save, and load the page anew; returns when the notebook is there again (its kernel may be busy)."""
        self.save()
        self._go("")

    @contextmanager
    def reading(self, saved: nbformat.NotebookNode) -> Iterator[None]:
        """Have a saved notebook in front, in this page and without a kernel, as its reader sees it: cells are its."""
        path = self.lab.root / f"saved-{secrets.token_hex(3)}.ipynb"
        _write(saved, path, None)
        self._js("window.jupyterapp.commands.execute('docmanager:open', {path});", path=path.name)
        self.page.locator(".jp-Dialog button", has_text="No Kernel").click()
        shown = f"() => {{ {PANEL} return panel.context.path === {path.name!r} && cells.length > 0; }}"
        self.page.wait_for_function(shown, polling=LOOK_MS)
        try:
            yield
        finally:
            self._js("panel.dispose();")

    def theme(self, name: str) -> None:
        """Switch to the "light" or "dark" theme; the server keeps it, also for pages opened later."""
        wanted = THEMES[name]
        if self.page.evaluate("document.body.dataset.jpThemeName") == wanted:
            return
        self._js("return window.jupyterapp.commands.execute('apputils:change-theme', {theme});", theme=wanted)
        self.page.wait_for_function(f"document.body.dataset.jpThemeName === {wanted!r}", polling=LOOK_MS)
        self.page.locator("#jupyterlab-splash").wait_for(state="detached")

    def screenshot(self, path: Path | str, index: int | None = None) -> None:
        """Write a PNG of the page, or of one cell with its output."""
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        if index is None:
            self.page.screenshot(path=path)
        else:
            self._js("cells[index].node.scrollIntoView({block: 'nearest'});", index=index)
            self.page.locator(f".jp-Notebook .jp-Cell[data-windowed-list-index='{index}']").screenshot(path=path)

    def check(self) -> None:
        """Fail if the page threw, or logged an error to its console, since the last time; names the requests of it."""
        errors, refused = self.errors[:], self.refused[:]
        self.errors.clear()
        self.refused.clear()
        requests = "\nrequests that were refused or cut:\n" + "\n".join(refused) if refused else ""
        assert not errors, "in the page:\n" + "\n".join(errors) + requests

    def close(self, check: bool = True) -> None:
        """End the kernel and close the page; then `check()`."""
        Notebook.opened.remove(self)
        for session in self.lab.ask("api/sessions"):
            if session["path"] == self.path.name:
                self.lab.ask(f"api/sessions/{session['id']}", method="DELETE")
        self._context.close()
        if check:
            self.check()

    def _go(self, query: str) -> None:
        """Load the page, in a workspace of this notebook's own, until the notebook shows (and its kernel answers)."""
        self.page.goto(f"{self.lab.url}lab/workspaces/{self.name}/tree/{self.path.name}?{query}")
        self.page.wait_for_function(
            f"() => {{ {PANEL} return (cells.length > 0 || panel?.context?.isReady)"
            " && panel === window.jupyterapp.shell.currentWidget; }",
            polling=LOOK_MS,
        )
        if self._with_kernel:
            self.page.wait_for_function(
                f"() => {{ {PANEL} return panel.sessionContext.session?.kernel?.connectionStatus === 'connected'; }}",
                polling=LOOK_MS,
            )
        else:
            self.page.locator(".jp-Dialog button", has_text="No Kernel").click()
        self.page.evaluate("window.jupyterapp.shell.collapseLeft()")
        self.page.locator("#jupyterlab-splash").wait_for(state="detached")

    def _js(self, body: str, **arguments: Any) -> Any:
        """Run the body of a function in the page; `panel`, `cells` and the arguments are its names."""
        names = ", ".join(arguments)
        return self.page.evaluate(f"({{ {names} }}) => {{ {PANEL} {body} }}", arguments)

    def _command(self, name: str) -> None:
        """Begin a command of JupyterLab; not awaited, since some end only when a dialog is answered."""
        self._js("panel.activate(); window.jupyterapp.commands.execute(name);", name=name)

    def _thrown(self, error: Any) -> None:
        if not (self._lost_kernel and OF_A_LOST_KERNEL in str(error)):
            self.errors.append(f"thrown: {error}")

    def _answered(self, response: Response) -> None:
        if response.status >= 400:
            self.refused.append(f"{response.request.method} {response.url}: {response.status} {response.status_text}")

    def _unanswered(self, request: Request) -> None:
        self.refused.append(f"{request.method} {request.url}: {request.failure}")

    def _heard(self, message: ConsoleMessage) -> None:
        if message.type == "error":
            where = message.location
            self.errors.append(f"console: {message.text} ({where.get('url')}:{where.get('lineNumber')})")


def _write(notebook: nbformat.NotebookNode, path: Path, kernel: str | None) -> None:
    """Write a notebook of a kernel; of None JupyterLab asks, where none fits by name or language, which to start."""
    name = kernel or "not-installed"
    if kernel is None:
        notebook.metadata.pop("language_info", None)
    notebook.metadata["kernelspec"] = {"name": name, "display_name": name, "language": "python"}
    nbformat.write(notebook, path)
