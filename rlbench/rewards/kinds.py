"""What may be a reward, what it gives a completion, and where a rule finds what it compares."""

from __future__ import annotations

import inspect
import math
import threading
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from rlbench.data.base.ordered import in_order
from rlbench.errors import DataError, RLBenchError, Stopped, nearest
from rlbench.traces import UserLine, user_line
from rlbench.user_code import user_code

if TYPE_CHECKING:
    from rlbench.data.rollouts.rollout import Rollout

WANTED = "wanted one number, a mapping with 'reward' in it, or an rb.rewards.Reward"
By = str | Callable[["Rollout"], Any] | None
"""None: the prompt's label. A text: that key of the prompt's `meta`. A function: what it returns of the rollout."""


@dataclass(frozen=True)
class Reward:
    """What a completion is worth, and the numbers it was made of; a reward function may return one.

    `components` become `rollouts.components`; those with a `/` in their name are details that no advantage gets.
    """

    value: float
    components: Mapping[str, float] = field(default_factory=dict)

    def __float__(self) -> float:
        return self.value


@dataclass(frozen=True)
class Failure:
    """Why a completion has no reward: `said`, to be followed by "on completion 4"; `hint`: what was wanted.

    `line` of the user's code; `trace`: all frames; `cause`: the exception, where it was raised in this process.
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
    def from_plain(cls, plain: Mapping[str, Any]) -> Failure:
        """What `plain` gave in another process."""
        line = plain.get("line")
        return cls(plain["said"], plain["hint"], UserLine(*line) if line else None, plain["trace"])


Outcome = Reward | Failure


class Board:
    """Outcomes by position, and the seconds each took, written as they come; `close` ends that.

    `stop` asks whoever scores to stop, `check` raises there; a stop of the `whole` scoring is one of its parts.
    """

    def __init__(self, whole: Board | None = None) -> None:
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


class Scorer(ABC):
    """A reward that says itself how completions are scored; calling it with one `Rollout` gives its `Reward`."""

    @abstractmethod
    def score_all(self, rollouts: Sequence[Rollout], board: Board) -> None:
        """Write one outcome, a failure too, for each completion, by its position, as they come.

        Call `board.check()` between completions: where somebody asked to stop it raises a KeyboardInterrupt, after
        which no helper process or thread may be left.
        """

    def __call__(self, rollout: Rollout) -> Reward:
        """The reward of one completion."""
        board = Board()
        self.score_all([rollout], board)
        outcome = board.known(0)
        if isinstance(outcome, Reward):
            return outcome
        failure = outcome or Failure("the reward gave nothing")
        raise DataError("; ".join(filter(None, [failure.said, failure.hint]))) from failure.cause


def as_reward(value: Any) -> Outcome:
    """What a reward function returned, as a `Reward`; a `Failure` where it is no finite number."""
    if isinstance(value, Reward):
        return _checked(value.value, value.components, value)
    if isinstance(value, Mapping):
        if "reward" not in value:
            return Failure(f"the reward gave a mapping without 'reward'{nearest('reward', map(str, value))}", WANTED)
        return _checked(value["reward"], {k: v for k, v in value.items() if k != "reward"}, value)
    return _checked(value, {}, value)


def attempted(fn: Callable[..., Any], rollouts: Sequence[Rollout], batched: bool) -> list[Outcome]:
    """Call a plain function for one completion, or for a batch; one outcome for each."""
    try:
        with user_code():
            value = fn(list(rollouts)) if batched else fn(rollouts[0])
    except Exception as error:
        return [Failure.of(error)] * len(rollouts)
    return outcomes(value, len(rollouts), batched)


def outcomes(value: Any, count: int, batched: bool) -> list[Outcome]:
    """One outcome per completion of what a call returned."""
    if inspect.isawaitable(value):
        if inspect.iscoroutine(value):
            value.close()  # else Python warns that nobody awaited it
        return [Failure(f"the reward gave an awaitable ({type(value).__name__})", "define it with `async def`")] * count
    if not batched:
        return [as_reward(value)]
    try:
        values = in_order(value, count, "the batched reward gave")
    except DataError as error:
        said, _, hint = str(error).partition("; ")
        return [Failure(said, hint)] * count
    return [as_reward(v) for v in values]


def is_async(fn: Any) -> bool:
    """Whether calling `fn` gives a coroutine."""
    return inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(getattr(fn, "__call__", None))  # noqa: B004


def _checked(value: Any, components: Any, returned: Any) -> Outcome:
    number = _number(value)
    if number is None:
        return Failure(f"the reward gave {_shown(returned)}", WANTED)
    if not isinstance(components, Mapping):
        return Failure(f"the reward gave components that are {_shown(components)}", "wanted {name: number}")
    numbers: dict[str, float] = {}
    for name, component in components.items():
        number_of_it = _number(component)
        if number_of_it is None:
            return Failure(f"the reward gave the component {name!r} as {_shown(component)}", "wanted a finite number")
        numbers[str(name)] = number_of_it
    return Reward(number, numbers)


def _number(value: Any) -> float | None:
    """A finite float; None for anything else. Text is none, though Python would read some."""
    if isinstance(value, str | bytes | bytearray):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # a tensor of several raises RuntimeError
        return None
    return number if math.isfinite(number) else None


def _shown(value: Any) -> str:
    return f"{type(value).__name__} {str(value)[:40]!r}"


def read(rollout: Rollout, by: By) -> Any:
    """What `by` says of a completion's prompt."""
    if callable(by):
        return by(rollout)
    if by is not None:
        meta = rollout.source.meta
        if by not in meta:
            raise DataError(f"the prompt's meta has no {by!r}{nearest(by, map(str, meta))}; there are {list(meta)}")
        return meta[by]
    if rollout.label is None:
        raise DataError("the prompt has no label to compare with: rb.Prompt(text, label=…), or label='a key of meta'")
    return rollout.label


def part(text: str, inside: str | None) -> str | None:
    """The text inside the last `<inside>…</inside>`; None where there is none. All of it where `inside` is None."""
    if inside is None:
        return text
    end = text.rfind(f"</{inside}>")
    start = text.rfind(f"<{inside}>", 0, max(end, 0))
    return None if end < 0 or start < 0 else text[start + len(inside) + 2 : end]


def shown(name: str, *args: Any, **options: Any) -> str:
    """`name('a', group=1)`: how a reward was made; what is None or False is left out."""
    changed = [f"{key}={value!r}" for key, value in options.items() if value is not None and value is not False]
    return f"{name}({', '.join([*map(repr, args), *changed])})"
