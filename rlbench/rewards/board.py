"""What is known so far of a scoring: one outcome per completion, written as they come, read also after a Ctrl-C."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rlbench.errors import RLBenchError, Stopped
from rlbench.traces import UserLine, user_line


@dataclass(frozen=True)
class Reward:
    """What a completion is worth, and the numbers it was made of.

    A reward function may return one in the place of a number. `components` become `rollouts.components`; those whose
    name has a `/` are details: they are shown, and not handed to an advantage that asks for components.
    """

    value: float
    components: Mapping[str, float] = field(default_factory=dict)

    def __float__(self) -> float:
        return self.value


@dataclass(frozen=True)
class Failure:
    """Why a completion has no reward: `said`, to be followed by "on completion 4"; `hint`: what was wanted, or what to
    do.

    `line`: the line of the user's code; `trace`: all frames; `cause`: the exception itself, where it was raised in this
    process.
    """

    said: str
    hint: str = ""
    line: UserLine | None = None
    trace: str = ""
    cause: BaseException | None = None

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """That the reward raised; where it is an error of ours, what that says."""
        trace = "".join(traceback.format_exception(error))
        if isinstance(error, RLBenchError):
            return cls("the reward failed", str(error), user_line(error), trace, error)
        return cls(f"the reward raised {type(error).__name__}: {error}", "", user_line(error), trace, error)

    def within(self, name: str) -> Failure:
        """The same, of one part of a reward made of several."""
        return replace(self, said=f"{name!r}: {self.said}")

    def plain(self) -> dict[str, Any]:
        """As JSON takes it; the exception itself stays behind."""
        line = self.line and [self.line.file, self.line.line, self.line.function, self.line.source]
        return {"said": self.said, "hint": self.hint, "line": line, "trace": self.trace}

    @classmethod
    def from_plain(cls, given: Mapping[str, Any]) -> Failure:
        """What `plain` gave in another process."""
        line = given.get("line")
        return cls(given["said"], given["hint"], UserLine(*line) if line else None, given["trace"])


Outcome = Reward | Failure


class Board:
    """Outcomes by position, and the seconds each took. `close` ends it: what comes later is not written.

    It also carries a stop from another thread to whoever scores: `stop` asks, `check` raises.
    """

    def __init__(self, whole: Board | None = None) -> None:
        """`whole`: the board of the scoring that this one is a part of; a stop of that is one of this."""
        self.rewards: dict[int, Reward] = {}
        self.failures: dict[int, Failure] = {}
        self.seconds: dict[int, float] = {}
        self._open, self._writing = True, threading.Lock()
        self._stop: threading.Event = threading.Event() if whole is None else whole._stop

    def put(self, index: int, outcome: Outcome, seconds: float) -> None:
        """Write the outcome of one completion; `seconds` of wall clock."""
        with self._writing:
            if not self._open:
                return
            self.seconds[index] = seconds
            if isinstance(outcome, Reward):
                self.rewards[index] = outcome
            else:
                self.failures[index] = outcome

    def put_all(self, indices: Sequence[int], outcomes: Sequence[Outcome], seconds: float) -> None:
        """Write what one call gave for several completions: each took its share of the time."""
        for index, outcome in zip(indices, outcomes, strict=True):
            self.put(index, outcome, seconds / len(indices))

    def known(self, index: int) -> Outcome | None:
        """The outcome of one completion; None while there is none."""
        return self.rewards.get(index) or self.failures.get(index)

    def close(self) -> None:
        """Take no more: helpers that outlive an interrupt change nothing."""
        with self._writing:
            self._open = False

    def stop(self) -> None:
        """Ask whoever scores to stop, from any thread; returns at once."""
        self._stop.set()

    def check(self) -> None:
        """Raise Stopped if somebody asked for it; called between completions, and at times while waiting."""
        if self._stop.is_set():
            raise Stopped("scoring stopped")
