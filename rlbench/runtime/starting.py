"""What goes on while a cluster, a session or an engine starts, and how long it usually takes on this machine.

    with starting("session tiny"):                  # shown from here on; inside of another start a part of that
        with phase("cluster", "starting Ray"):
            ...

What starts took is kept in the state folder, `starts.json`: by what was started, in all and by part. Who draws it
registers with `draw_with`.
"""

from __future__ import annotations

import contextlib
import importlib
import statistics
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from rlbench.runtime import registry

CLUSTER, MODEL, ATTACH = "cluster", "model", "attach"
"""Parts that are not in every start of one thing: Ray is started, the model is made, it runs already."""
KEPT = 5
"""Times kept of each kind of start; what it usually takes is their median."""
KINDS = 100
REDRAW_S = 0.5


@dataclass
class Part:
    """One part of a start: what it does now, and how long it took once it is over."""

    doing: str
    begin: float
    seconds: float | None = None


@dataclass
class Start:
    """A start that goes on: `what` starts, its parts by name, and the times of earlier starts."""

    what: str
    begin: float = field(default_factory=time.monotonic)
    parts: dict[str, Part] = field(default_factory=dict)
    earlier: dict[str, Any] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """Under what its times are kept."""
        return " + ".join([self.what, *(part for part in (CLUSTER, MODEL, ATTACH) if part in self.parts)])

    @property
    def seconds(self) -> float:
        """Since it began."""
        return time.monotonic() - self.begin

    def usual(self, part: str = "") -> float | None:
        """Seconds that it, or a part of it, usually takes; None where none is known."""
        found = self.earlier.get(self.kind, {}).get(part, [])
        return statistics.median(found) if found else None


class Drawing(Protocol):
    """Draws one start."""

    def show(self, start: Start) -> None:
        """It goes on."""

    def end(self, start: Start, done: bool) -> None:
        """It is over; `done`: without an error."""


_drawing: str | None = None
_current: Start | None = None
_lock = threading.Lock()


def draw_with(factory: str) -> None:
    """Let `factory` (`module:Class`, imported on first use) draw starts."""
    global _drawing
    _drawing = factory


@contextlib.contextmanager
def starting(what: str) -> Iterator[None]:
    """Show what goes on until the end of the block; inside of another start it shows there."""
    global _current
    with _lock:
        inside = _current is not None
        if not inside:
            _current = start = Start(what, earlier=registry.read_json(_file()) or {})
    if inside:
        yield
        return
    drawing = _drawn()
    ended = threading.Event()
    redrawing = threading.Thread(target=_redraw, args=(start, drawing, ended), name="rlbench start", daemon=True)
    done = False
    try:
        if drawing is not None:
            drawing.show(start)  # at once, and from the thread whose cell this is
            redrawing.start()
        yield
        done = True
    finally:
        with _lock:
            _current = None
        ended.set()
        if drawing is not None:
            redrawing.join()
            drawing.end(start, done)
        if done:
            _remember(start)


@contextlib.contextmanager
def phase(part: str, doing: str) -> Iterator[None]:
    """A part of the start that goes on, if one does."""
    say(part, doing)
    try:
        yield
    finally:
        start = _current
        if start is not None and part in start.parts:
            start.parts[part].seconds = time.monotonic() - start.parts[part].begin


def say(part: str, doing: str) -> None:
    """What a part of the start does now."""
    start = _current
    if start is None:
        return
    with _lock:
        begun = start.parts.setdefault(part, Part(doing, time.monotonic()))
        begun.doing, begun.seconds = doing, None


def _drawn() -> Drawing | None:
    if _drawing is None:
        return None
    module, _, name = _drawing.partition(":")
    drawing: Drawing = getattr(importlib.import_module(module), name)()
    return drawing


def _redraw(start: Start, drawing: Drawing, ended: threading.Event) -> None:
    while not ended.wait(REDRAW_S):
        drawing.show(start)


def _file() -> Any:
    return registry.state_dir() / "starts.json"


def _remember(start: Start) -> None:
    """Keep what it took beside what earlier starts of its kind took; the kinds that were not used longest give way."""
    known = registry.read_json(_file()) or {}
    took = {"": start.seconds} | {name: part.seconds for name, part in start.parts.items()}
    kept = known.pop(start.kind, {})
    times = {name: [*kept.get(name, []), round(s, 3)][-KEPT:] for name, s in took.items() if s is not None}
    registry.write_json(_file(), dict([*known.items(), (start.kind, times)][-KINDS:]))
