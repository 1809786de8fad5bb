"""What goes on while a cluster, a session or an engine starts, and how long that usually takes on this machine."""

from __future__ import annotations

import contextlib
import pkgutil
import statistics
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlbench.runtime import registry

REDRAW_S = 0.5
OPTIONAL = ("cluster", "model", "attach")  # parts: the times of starts with and without them are kept apart
KEPT, KINDS = 5, 100


@dataclass
class StartPart:
    """One part of a start: what it does now, and how long it took once it is over."""

    doing: str
    begin: float
    seconds: float | None = None


@dataclass
class Start:
    """A start that goes on: `what` starts, its parts by name, and the times of earlier starts."""

    what: str
    begin: float = field(default_factory=lambda: time.monotonic())
    parts: dict[str, StartPart] = field(default_factory=dict)
    earlier: dict[str, dict[str, list[float]]] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """Since it began."""
        return time.monotonic() - self.begin

    def kind(self) -> str:
        """Return under what its times are kept."""
        return " + ".join([self.what, *(part for part in OPTIONAL if part in self.parts)])

    def usual(self, part: str = "") -> float | None:
        """Return the median seconds that it, or a part of it, took earlier; None where none is known."""
        times = self.earlier.get(self.kind(), {}).get(part)
        return statistics.median(times) if times else None

    def remember(self) -> None:
        """Keep what it took; the kinds that were not started for longest give way."""
        kinds = registry.read_json(times_file()) or {}
        known = kinds.pop(self.kind(), {})
        took = {"": self.seconds} | {name: part.seconds for name, part in self.parts.items()}
        times = {name: [*known.get(name, []), round(s, 3)][-KEPT:] for name, s in took.items() if s is not None}
        registry.write_json(times_file(), dict([*kinds.items(), (self.kind(), times)][-KINDS:]))


def times_file() -> Path:
    """Return the file of the times that starts took, by what was started, in all ("") and by part."""
    return registry.state_dir() / "starts.json"


_drawing = ""
_current: Start | None = None
_lock = threading.Lock()


def draw_with(factory: str) -> None:
    """Let `factory` (`module:Class`, imported on first use) draw starts: `show(start)` and `end(start, done)`."""
    global _drawing
    _drawing = factory


@contextlib.contextmanager
def starting(what: str) -> Iterator[None]:
    """Show what goes on until the end of the block; inside of another start it shows there."""
    global _current
    with _lock:
        inside = _current is not None
        if not inside:
            _current = start = Start(what, earlier=registry.read_json(times_file()) or {})
    if inside:
        yield
        return
    done, ended = False, threading.Event()
    drawing: Any = pkgutil.resolve_name(_drawing)() if _drawing else None

    def redraw() -> None:
        while not ended.wait(REDRAW_S):
            drawing.show(start)

    redrawing = threading.Thread(target=redraw, name="rlbench start", daemon=True)
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
            start.remember()


@contextlib.contextmanager
def phase(part: str, doing: str) -> Iterator[None]:
    """Show a part of the start that goes on, if one does."""
    say(part, doing)
    try:
        yield
    finally:
        start = _current
        if start is not None and part in start.parts:
            start.parts[part].seconds = time.monotonic() - start.parts[part].begin


def say(part: str, doing: str) -> None:
    """Tell what a part of the start does now."""
    start = _current
    if start is None:
        return
    with _lock:
        begun = start.parts.setdefault(part, StartPart(doing, time.monotonic()))
        begun.doing, begun.seconds = doing, None
