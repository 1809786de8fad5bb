"""A verb that has begun: a result to come, that can be stopped and awaited; and one that is made of several calls."""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from typing import Any, Protocol

from rlbench.errors import Stopped

STOP_WAIT_S = 1.7
Outcome = tuple[Any, BaseException | None]
Ended = Callable[[Any, "BaseException | None"], None]
"""Told the value or the error of a verb that is over."""


class Waiting(ABC):
    """Base of `Pending` (one call) and `Chain` (several): `.result()`, `.stop()`, `.done`, and awaitable."""

    def __init__(self, what: str) -> None:
        self.what = what
        self._outcome: Outcome | None = None
        self._then: list[Ended] = []
        self._telling = threading.Lock()
        self._stop_wanted = False

    @property
    def stopping(self) -> bool:
        """True once it was asked to stop."""
        return self._stop_wanted

    @property
    @abstractmethod
    def done(self) -> bool:
        """True once it is over: every worker has answered, or died."""

    @abstractmethod
    def stop(self) -> None:
        """Ask it to stop; returns at once. `result()` then raises `Stopped` with what there is."""

    def result(self, timeout: float | None = None) -> Any:
        """Wait and return the result.

        Raises:
            TimeoutError: not done after `timeout` seconds; it goes on.
            Stopped: it was stopped; `.partial` holds what there is.
            RemoteError, EngineError: the user's code, or ours, raised on a worker.
            WorkerDied: a worker process ended.
        """
        outcome = self._wait(timeout)
        if outcome is None:
            raise TimeoutError(f"{self.what} is still running after {timeout:g} s")
        value, error = outcome
        if error is not None:
            raise error
        return value

    def then(self, ended: Ended) -> None:
        """Call `ended(value, error)` when `result()` has it; at once where it is known already."""
        with self._telling:
            if self._outcome is None:
                self._then.append(ended)
                return
        ended(*self._outcome)

    def blocking_result(self) -> Any:
        """Return `result()`; Ctrl-C stops the verb, and the prompt is back within two seconds. An interrupt always
        raises `Stopped`, so that a loop ends too; what was just done is in its `.partial`."""
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
            # somebody must see to its end: a rank that failed is waited for by its peers until then
            threading.Thread(target=self._wait, name=f"rlbench {self.what}, stopping", daemon=True).start()
            raise Stopped(
                f"{self.what} is still stopping: its current step cannot be cut; the next call waits for it"
            ) from None
        raise Stopped(f"{self.what} was done as it was stopped; .partial holds its result", value)

    @abstractmethod
    def _wait(self, timeout: float | None = None) -> Outcome | None:
        """See it to its end; None after `timeout` seconds."""

    def _tell(self, outcome: Outcome) -> None:
        with self._telling:
            self._outcome, listeners = outcome, self._then
        for ended in listeners:
            ended(*outcome)

    def __await__(self) -> Generator[Any, None, Any]:
        return asyncio.get_running_loop().run_in_executor(None, self.result).__await__()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.what}, {'done' if self.done else 'running'})"


class ChainStep(Protocol):
    """What a chain waits for: a `Pending`, or something that waits like one (several at a time)."""

    def stop(self) -> None: ...

    def result(self) -> Any: ...


Steps = Generator[ChainStep, Any, Any]
"""Yields each call and gets its result back."""


def run(steps: Steps, begins: Callable[[ChainStep], None] = lambda step: None) -> Any:
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
    """Runs `steps` on a thread of its own; their return value is the result. Ctrl-C reaches the call in flight."""

    def __init__(self, what: str, steps: Steps) -> None:
        super().__init__(what)
        self._steps = steps
        self._current: ChainStep | None = None
        self._finished = threading.Event()
        threading.Thread(target=self._drive, name=f"rlbench {what}", daemon=True).start()

    @property
    def done(self) -> bool:
        return self._finished.is_set()

    def stop(self) -> None:
        self._stop_wanted = True
        if self._current is not None:
            self._current.stop()

    def _wait(self, timeout: float | None = None) -> Outcome | None:
        return self._outcome if self._finished.wait(timeout) else None

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

    def _begins(self, step: ChainStep) -> None:
        """Keep the step in flight; a stop that came between two steps stops it."""
        self._current = step
        if self._stop_wanted:
            step.stop()
