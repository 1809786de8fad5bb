"""The cells that this kernel ran, in order: what a session's record keeps of a notebook."""

from __future__ import annotations

import secrets
import sys
import time
import traceback
import weakref
from dataclasses import dataclass, field, replace
from types import FrameType, TracebackType
from typing import Any

from rlbench.errors import Stopped
from rlbench.traces import ipython

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

    def running_so_far(self) -> Cell | None:
        """Return the running cell, as one that ends before the statement that is being executed."""
        frame = self._frame()
        if self.running is None:
            return None
        return replace(self.running, outcome="running", line=0 if frame is None else frame.f_lineno)

    def holder_of(self, core: Any) -> str | None:
        """Return the variable of the notebook that holds the session of this core."""
        holders = [name for name, one in self.shell.user_ns.items() if getattr(one, "__dict__", {}).get("core") is core]
        return min((name for name in holders if not name.startswith("_")), key=len, default=None)

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
            cell.outcome, cell.said = outcome_of(error)
            cell.line = self._line_in(error.__traceback__) if result.error_before_exec is None else 0
        self.cells.append(cell)
        for listener in list(self.listeners):
            listener.cell_ended()

    def _frame(self) -> FrameType | None:
        """The outermost frame of the notebook's own code on this thread's stack."""
        stack = traceback.walk_stack(sys._getframe())
        own = [frame for frame, _ in stack if frame.f_globals is self.shell.user_ns]
        return own[-1] if own else None

    def _line_in(self, trace: TracebackType | None) -> int:
        lines = (line for frame, line in traceback.walk_tb(trace) if frame.f_globals is self.shell.user_ns)
        return next(lines, 0)


_kernel: Kernel | None = None


def kernel() -> Kernel | None:
    """Return this process's notebook kernel; None in a plain script."""
    global _kernel
    shell = ipython()
    if shell is None or getattr(shell, "history_manager", None) is None:
        return None
    if _kernel is None or _kernel.shell is not shell:
        _kernel = Kernel(shell)
    return _kernel


def outcome_of(error: BaseException) -> tuple[str, str]:
    """Return how what raised this ended, and what it said in one line."""
    outcome = "stopped" if isinstance(error, Stopped | KeyboardInterrupt) else "failed"
    return outcome, f"{type(error).__name__}: {error}".splitlines()[0][:300]
