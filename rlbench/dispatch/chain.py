"""A verb made of several calls: waits like one, stops like one, can be awaited like one.

The steps are a generator that yields each call and gets its result back. It runs on a thread of its own, so that the
kernel's main thread only waits: Ctrl-C is felt at once and reaches the call in flight.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Generator
from typing import Any, Protocol

from rlbench.dispatch.pending import STOP_WAIT_S
from rlbench.errors import Stopped


class Step(Protocol):
    """What a chain waits for: a `Pending`, or something that waits like one (several at a time)."""

    def stop(self) -> None:
        """Ask it to stop; returns at once."""

    def result(self) -> Any:
        """Wait and return the result."""


Steps = Generator[Step, Any, Any]
Ended = Callable[[Any, "BaseException | None"], None]
"""Told the value or the error of a call that is over."""


def run(steps: Steps) -> Any:
    """Take steps to their end in this thread; return what they return."""
    try:
        step = next(steps)
        while True:
            try:
                value = step.result()
            except BaseException as error:
                step = steps.throw(error)
            else:
                step = steps.send(value)
    except StopIteration as end:
        return end.value


class Chain:
    """Runs `steps`; its return value is the result. `.result()`, `.stop()`, `.done`, and awaitable."""

    def __init__(self, what: str, steps: Steps) -> None:
        self.what = what
        self._steps = steps
        self._current: Step | None = None
        self._stop_wanted = False
        self._value: Any = None
        self._error: BaseException | None = None
        self._finished = threading.Event()
        self._then: list[Ended] = []
        self._ending = threading.Lock()
        threading.Thread(target=self._drive, name=f"rlbench {what}", daemon=True).start()

    @property
    def done(self) -> bool:
        """True once the last step ended."""
        return self._finished.is_set()

    def stop(self) -> None:
        """Ask the step in flight to stop; returns at once."""
        self._stop_wanted = True
        if self._current is not None:
            self._current.stop()

    def then(self, ended: Ended) -> None:
        """Call `ended(value, error)` when it is over, before `result()` returns; at once where it is over already."""
        with self._ending:
            if not self._finished.is_set():
                self._then.append(ended)
                return
        ended(self._value, self._error)

    def result(self, timeout: float | None = None) -> Any:
        """Wait and return the result; raises what the steps raised, TimeoutError after `timeout` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._finished.wait(0.1 if deadline is None else max(0.0, min(0.1, deadline - time.monotonic()))):
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"{self.what} is still running after {timeout:g} s")
        if self._error is not None:
            raise self._error
        return self._value

    def blocking_result(self) -> Any:
        """`result()` where Ctrl-C stops the verb: the prompt is back within two seconds."""
        try:
            return self.result()
        except Stopped:
            raise
        except KeyboardInterrupt:
            self.stop()
        try:
            value = self.result(timeout=STOP_WAIT_S)
        except Stopped:
            raise
        except (TimeoutError, KeyboardInterrupt):
            raise Stopped(f"{self.what} is still stopping: its current step cannot be cut") from None
        raise Stopped(f"{self.what} was done as it was stopped; .partial holds its result", value)

    def __await__(self) -> Generator[Any, None, Any]:
        return asyncio.get_running_loop().run_in_executor(None, self.result).__await__()

    def __repr__(self) -> str:
        return f"Pending({self.what}, {'done' if self.done else 'running'})"

    def _drive(self) -> None:
        """Run the steps to their end; a stop that comes between two steps stops the next."""
        try:
            step = next(self._steps)
            while True:
                self._current = step
                if self._stop_wanted:
                    step.stop()
                try:
                    value = step.result()
                except BaseException as error:
                    step = self._steps.throw(error)
                else:
                    step = self._steps.send(value)
        except StopIteration as end:
            self._value = end.value
        except BaseException as error:
            self._error = error
        finally:
            self._end()

    def _end(self) -> None:
        with self._ending:
            try:
                for ended in self._then:
                    ended(self._value, self._error)
            except Exception as error:
                self._error = self._error or error
            finally:
                self._finished.set()
