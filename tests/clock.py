"""The one wait of all tests, for what other threads and processes bring about, and a clock that they move by hand."""

from __future__ import annotations

import inspect
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import TypeVar

Value = TypeVar("Value")
LIMIT_S = 120.0  # far above what a loaded machine needs: only a failure pays for it
SHORTEST_S, LONGEST_S = 0.01, 0.1  # between two looks, which may be questions to a busy process


def until(
    condition: Callable[[], Value],
    seconds: float = LIMIT_S,
    what: str | Callable[[], object] = "",
    sleep: Callable[[float], object] = time.sleep,
) -> Value:
    """Ask `condition` until it is true, and return its value.

    `what` names in the failure what was waited for: a text, or a function that returns what there is instead. `sleep`
    passes the seconds between two looks.
    """
    deadline, pause = time.monotonic() + seconds, SHORTEST_S
    while not (value := condition()):
        if time.monotonic() >= deadline:
            awaited = what() if callable(what) else what or _source(condition)
            raise AssertionError(f"not within {seconds:g} s: {awaited}")
        sleep(pause)
        pause = min(2 * pause, LONGEST_S)
    return value


def interrupt_once(condition: Callable[[], object]) -> None:
    """Press Ctrl-C in this process as soon as `condition` holds and the main thread has left this function; it may wait
    for something meanwhile."""

    def press() -> None:
        until(condition)
        until(lambda: not main_thread_runs("interrupt_once"))
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=press, daemon=True).start()


def main_thread_runs(name: str) -> bool:
    """Whether the main thread is in a function of this name."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and frame.f_code.co_name != name:
        frame = frame.f_back
    return frame is not None


class HandClock:
    """Stands in for `time.monotonic` or `time.perf_counter`: seconds pass by `pass_by` alone."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def pass_by(self, seconds: float) -> None:
        """Move it on."""
        self.now += seconds


def _source(condition: Callable[[], object]) -> str:
    """Return the line of a lambda, the name of another function."""
    if getattr(condition, "__name__", "") == "<lambda>":
        return inspect.getsource(condition).strip()
    return repr(condition)
