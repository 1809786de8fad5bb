"""A verb made of several calls: waits like one, stops like one, can be awaited like one.

The steps are a generator that yields each call and gets its result back. It runs on a thread of its own, so that the
kernel's main thread only waits: Ctrl-C is felt at once and reaches the call in flight.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator
from typing import Any, Protocol

from rlbench.dispatch.waiting import Outcome, Waiting


class Step(Protocol):
    """What a chain waits for: a `Pending`, or something that waits like one (several at a time)."""

    def stop(self) -> None:
        """Ask it to stop; returns at once."""

    def result(self) -> Any:
        """Wait and return the result."""


Steps = Generator[Step, Any, Any]


def run(steps: Steps, begins: Callable[[Step], None] = lambda step: None) -> Any:
    """Take steps to their end in this thread; return what they return. Each is told to `begins` first."""
    try:
        step = next(steps)
        while True:
            begins(step)
            try:
                value = step.result()
            except BaseException as error:
                step = steps.throw(error)
            else:
                step = steps.send(value)
    except StopIteration as end:
        return end.value


class Chain(Waiting):
    """Runs `steps` on a thread of its own; their return value is the result."""

    def __init__(self, what: str, steps: Steps) -> None:
        super().__init__(what)
        self._steps = steps
        self._current: Step | None = None
        self._stop_wanted = False
        self._finished = threading.Event()
        threading.Thread(target=self._drive, name=f"rlbench {what}", daemon=True).start()

    @property
    def done(self) -> bool:
        return self._finished.is_set()

    def stop(self) -> None:
        self._stop_wanted = True
        if self._current is not None:
            self._current.stop()

    def result(self, timeout: float | None = None) -> Any:
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._finished.wait(0.1 if deadline is None else max(0.0, min(0.1, deadline - time.monotonic()))):
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"{self.what} is still running after {timeout:g} s")
        assert self._outcome is not None
        value, error = self._outcome
        if error is not None:
            raise error
        return value

    def _wait(self) -> None:
        self._finished.wait()

    def _drive(self) -> None:
        """Run the steps to their end; what fails of those that are told is the chain's own failure."""
        outcome: Outcome
        try:
            outcome = run(self._steps, self._begins), None
        except BaseException as error:
            outcome = None, error
        try:
            self._tell(outcome)
        except Exception as error:
            self._outcome = None, outcome[1] or error
        finally:
            self._finished.set()

    def _begins(self, step: Step) -> None:
        """Keep the step in flight; a stop that came between two steps stops it."""
        self._current = step
        if self._stop_wanted:
            step.stop()
