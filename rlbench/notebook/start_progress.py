"""The line of a start: what goes on, for how long, and how long it usually takes; it ends in what it took."""

from __future__ import annotations

from rlbench.notebook.progress_line import Line
from rlbench.runtime.starting import Part, Start
from rlbench.units import format_age, format_seconds


class StartProgress:
    """One line in a cell or a terminal; in a cell the parts below it."""

    def __init__(self) -> None:
        self._line = Line("start")

    def show(self, start: Start) -> None:
        """Draw where it is."""
        usual = start.usual()
        known = "" if usual is None else f", usually {format_age(usual)}"
        going = [f"{name}: {part.doing}" for name, part in list(start.parts.items()) if part.seconds is None]
        text = " · ".join([f"starting {start.what} · {format_age(start.seconds)}{known}", *going])
        below = [_part_line(start, name, part) for name, part in list(start.parts.items())]
        self._line.show(text, None if not usual else min(0.99, start.seconds / usual), below)

    def end(self, start: Start, done: bool) -> None:
        """Leave one line: what it took, by part; where it failed, what it was at."""
        seconds = start.seconds
        if done:
            took = [f"{name} {format_seconds(part.seconds)}" for name, part in start.parts.items() if part.seconds]
            lead = f"{start.what} ready"
        else:
            took = [f"{name}: {part.doing}" for name, part in start.parts.items() if part.seconds is None]
            lead = f"{start.what} did not start"
        self._line.end(" · ".join([lead, format_seconds(seconds), *took]), seconds)


def _part_line(start: Start, name: str, part: Part) -> str:
    usual = start.usual(name)
    known = "" if usual is None else f", usually {format_age(usual)}"
    if part.seconds is not None:
        return f"✓ {name}  {format_seconds(part.seconds)}{known}"
    return f"… {name}  {part.doing}{known}"
