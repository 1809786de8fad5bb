"""One line that is redrawn in place: an output that is updated in a notebook, carriage returns in a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlbench.notebook.base.markup import escape
from rlbench.units import format_seconds

REDRAW_S = 0.25


@dataclass
class _InCell:
    """What the ended lines of one kind take in a cell: one output, however often a loop runs the verb."""

    cell: int
    handle: Any
    ended: int = 0
    seconds: float = 0.0


_in_cells: dict[str, _InCell] = {}


class Line:
    """One line of text, with a bar and a few lines below it while it is live.

    Args:
        kind: lines of one kind that end in the same cell share an output: a loop of a thousand steps leaves one line.
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._last = 0.0
        self._width = 0
        self._place: _InCell | None = None

    def show(self, text: str, fraction: float | None = None, below: Sequence[str] = ()) -> None:
        """Draw `text`, at most four times a second.

        Args:
            fraction: 0 to 1, for a bar.
            below: more lines, where there is room for them: not in a terminal.
        """
        now = time.monotonic()
        if now - self._last < REDRAW_S:
            return
        self._last = now
        if in_notebook():
            self._notebook(text, fraction, below)
        elif sys.stderr.isatty():
            self._terminal(f"{'' if fraction is None else _text_bar(fraction) + ' '}{text}", "")

    def end(self, text: str, seconds: float) -> None:
        """Draw `text` as what stays; `seconds`: what the verb took."""
        if in_notebook():
            place = self._in_cell()
            place.ended, place.seconds = place.ended + 1, place.seconds + seconds
            several = f" · {place.ended} in this cell, {format_seconds(place.seconds)}" if place.ended > 1 else ""
            self._notebook(text + several, None, ())
        elif sys.stderr.isatty():
            self._terminal(text, "\n")

    def _terminal(self, line: str, end: str) -> None:
        sys.stderr.write("\r" + line.ljust(self._width) + end)
        sys.stderr.flush()
        self._width = len(line)

    def _notebook(self, text: str, fraction: float | None, below: Sequence[str]) -> None:
        data = {"text/plain": "\n".join([text, *below]), "text/html": _html(text, fraction, below)}
        place = self._in_cell()
        if place.handle is None:
            from IPython.display import DisplayHandle

            place.handle = DisplayHandle()
            place.handle.display(data, raw=True)
        else:
            place.handle.update(data, raw=True)

    def _in_cell(self) -> _InCell:
        """Where lines of this kind go in the cell that runs; this line stays where it began."""
        if self._place is None:
            cell, known = _cell(), _in_cells.get(self._kind)
            if known is None or known.cell != cell:
                known = _in_cells[self._kind] = _InCell(cell, None)
            self._place = known
        return self._place


def in_notebook() -> bool:
    """True in an IPython kernel, where outputs can be redrawn."""
    from rlbench.dispatch.link import driver_mode

    return driver_mode() == "notebook"


def _cell() -> int:
    """Number of the cell that runs."""
    module = sys.modules.get("IPython")
    shell = module.get_ipython() if module is not None else None
    return 0 if shell is None else int(shell.execution_count)


def _html(text: str, fraction: float | None, below: Sequence[str]) -> str:
    bar = (
        ""
        if fraction is None
        else f'<progress max="1" value="{fraction:.3f}" style="width:12em;height:8px" aria-label="progress">'
        "</progress> "
    )
    more = "".join(
        '\n<div style="font-family:var(--jp-code-font-family,monospace);white-space:pre;overflow:hidden;'
        f'text-overflow:ellipsis;unicode-bidi:isolate">{escape(line)}</div>'
        for line in below
    )
    return (
        '<div style="font-size:12px;color:var(--jp-ui-font-color2,gray);font-variant-numeric:tabular-nums">'
        f"{bar}{escape(text)}{more}</div>"
    )


def _text_bar(fraction: float, width: int = 16) -> str:
    full = round(fraction * width)
    return "▓" * full + "░" * (width - full)
