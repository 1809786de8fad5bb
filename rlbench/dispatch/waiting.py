"""What a verb that has begun is to whoever waits for it: a result to come, that can be stopped, and awaited."""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from typing import Any

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

    @property
    @abstractmethod
    def done(self) -> bool:
        """True once it is over."""

    @abstractmethod
    def stop(self) -> None:
        """Ask it to stop; returns at once. `result()` then raises `Stopped` with what there is."""

    @abstractmethod
    def result(self, timeout: float | None = None) -> Any:
        """Wait and return the result; raises what it ended with, TimeoutError after `timeout` seconds."""

    def then(self, ended: Ended) -> None:
        """Call `ended(value, error)` when `result()` has it; at once where it is known already."""
        with self._telling:
            if self._outcome is None:
                self._then.append(ended)
                return
        ended(*self._outcome)

    def blocking_result(self) -> Any:
        """Return `result()`; Ctrl-C stops the verb, and the prompt is back within two seconds.

        An interrupt always raises `Stopped`, so that a loop ends too: what could not be cut, or was just done, leaves
        its whole result in `.partial`.
        """
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
    def _wait(self) -> Any:
        """See it to its end."""

    def _tell(self, outcome: Outcome) -> None:
        """Keep how it ended, and say so to those that asked."""
        with self._telling:
            self._outcome, told = outcome, self._then
        for ended in told:
            ended(*outcome)

    def __await__(self) -> Generator[Any, None, Any]:
        return asyncio.get_running_loop().run_in_executor(None, self.result).__await__()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.what}, {'done' if self.done else 'running'})"
