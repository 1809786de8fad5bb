"""The cells that this kernel ran, in order: what a session's record keeps of a notebook."""

from __future__ import annotations

import secrets
import sys
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType, TracebackType
from typing import Any

from rlbench.errors import Stopped
from rlbench.traces import calling_line, place

OPERATOR_PLACE = "the side panel"


@dataclass
class Cell:
    """One run of a cell. `line`: of the top-level statement that raised; 0 where it is not known or nothing ran."""

    id: str
    number: int
    text: str
    time: float = field(default_factory=time.time)
    outcome: str = "done"
    said: str = ""
    line: int = 0


class Kernel:
    """The cells of one IPython shell: those it ran before, and each that it runs from here on."""

    def __init__(self, shell: Any) -> None:
        self.shell = shell
        self.running: Cell | None = None
        self.listeners: weakref.WeakSet[Any] = weakref.WeakSet()
        self._id = secrets.token_hex(3)
        history = shell.history_manager
        errors = getattr(history, "exceptions", {})
        self.cells = [self._cell(number, text) for number, text in enumerate(history.input_hist_raw) if number]
        for cell in self.cells:
            if cell.number in errors:
                cell.outcome, cell.said = "failed", str(errors[cell.number].get("ename", ""))
        if self.cells and self._frame() is not None:  # the cell that asks for this
            self.running = self.cells.pop()
        shell.events.register("pre_run_cell", self._begin)
        shell.events.register("post_run_cell", self._end)

    def current_line(self) -> int:
        """Return the line of the running cell that is being executed."""
        frame = self._frame()
        return frame.f_lineno if frame is not None else 0

    def holder_of(self, core: Any) -> str | None:
        """Return the variable of the notebook that holds the session of this core."""
        found = [name for name, one in self.shell.user_ns.items() if getattr(one, "__dict__", {}).get("core") is core]
        return min((name for name in found if not name.startswith("_")), key=len, default=None)

    def _cell(self, number: int, text: str) -> Cell:
        while text.lstrip(" \t").startswith("\n"):  # IPython's line numbers begin behind empty lines
            text = text.partition("\n")[2]
        return Cell(f"{self._id}-{number}", number, text)

    def _begin(self, info: Any) -> None:
        if info.store_history:
            self.running = self._cell(len(self.shell.history_manager.input_hist_raw), info.raw_cell)

    def _end(self, result: Any) -> None:
        cell, self.running = self.running, None
        if cell is None:
            return
        error = result.error_before_exec or result.error_in_exec
        if error is not None:
            cell.outcome = "stopped" if isinstance(error, Stopped | KeyboardInterrupt) else "failed"
            cell.said = f"{type(error).__name__}: {error}".splitlines()[0][:300]
            cell.line = self._line_in(error.__traceback__) if result.error_before_exec is None else 0
        self.cells.append(cell)
        for listener in list(self.listeners):
            listener.cell_ended()

    def _frame(self) -> FrameType | None:
        """The outermost frame of the notebook's own code on this thread's stack."""
        found, frame = None, sys._getframe()
        names = self.shell.user_ns
        while frame is not None:
            found = frame if frame.f_globals is names else found
            frame = frame.f_back  # type: ignore[assignment]
        return found

    def _line_in(self, trace: TracebackType | None) -> int:
        while trace is not None and trace.tb_frame.f_globals is not self.shell.user_ns:
            trace = trace.tb_next
        return trace.tb_lineno if trace is not None else 0


_kernel: Kernel | None = None


def kernel() -> Kernel | None:
    """Return this process's notebook kernel; None in a plain script."""
    global _kernel
    module = sys.modules.get("IPython")
    shell: Any = module.get_ipython() if module is not None else None
    if shell is None or getattr(shell, "history_manager", None) is None:
        return None
    if _kernel is None or _kernel.shell is not shell:
        _kernel = Kernel(shell)
    return _kernel


def caller(find: Callable[[], Any] = calling_line) -> str:
    """Say where the running call stands: `cell 7, line 2`, or `run.py, line 12`."""
    line = find()
    return "" if line is None else f"{place(line.file)}, line {line.line}"
