"""What may be a reward, and what all of them have in common.

A function of one `Rollout`, plain or async; a function of many (`batched`); or a `Scorer`, which knows by itself how it
is best run: those of this room, and a class of your own.
"""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rlbench.errors import DataError, nearest
from rlbench.rewards.board import Board, Failure, Outcome, Reward
from rlbench.user_code import user_code

if TYPE_CHECKING:
    from rlbench.data.rollouts.rollout import Rollout

WANTED = "wanted one number, a mapping with 'reward' in it, or an rb.rewards.Reward"


class Scorer(ABC):
    """A reward that says itself how completions are scored.

    To be given to `rollouts.score`, `rb.rewards.weighted` and `rb.rewards.mixture`. Calling it with one `Rollout` gives
    its `Reward`.
    """

    @abstractmethod
    def score_all(self, rollouts: Sequence[Rollout], board: Board) -> None:
        """Write one outcome for each completion, by its position, as they come.

        A failure is written, too, and the others go on. Call `board.check()` between completions, so that a stop from
        elsewhere is felt: it raises a KeyboardInterrupt, after which no helper process or thread may be left.
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
        said = f"the reward gave an awaitable ({type(value).__name__})"
        return [Failure(said, "define it with `async def`, so that it is run as an async function")] * count
    if not batched:
        return [as_reward(value)]
    try:
        values = list(value)
    except TypeError:
        said = f"the batched reward gave {_shown(value)}"
        return [Failure(said, f"wanted a list of {count} numbers")] * count
    if len(values) != count:
        said = f"the batched reward gave {len(values)} values for {count} completions"
        return [Failure(said, "wanted one per completion, in their order")] * count
    return [as_reward(v) for v in values]


def is_async(fn: Any) -> bool:
    """Whether calling `fn` gives a coroutine."""
    return inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(getattr(fn, "__call__", None))  # noqa: B004


def name_of(fn: Any) -> str:
    """What a reader calls a reward: the function's name, or the value's own text."""
    return getattr(fn, "__name__", None) or repr(fn)


def _checked(value: Any, components: Any, given: Any) -> Outcome:
    number = _number(value)
    if number is None:
        return Failure(f"the reward gave {_shown(given)}", WANTED)
    if not isinstance(components, Mapping):
        return Failure(f"the reward gave components that are {_shown(components)}", "wanted {name: number}")
    found = {str(name): _number(v) for name, v in components.items()}
    bad = [name for name, v in found.items() if v is None]
    if bad:
        return Failure(
            f"the reward gave the component {bad[0]!r} as {_shown(components[bad[0]])}", "wanted a finite number"
        )
    return Reward(number, {name: v for name, v in found.items() if v is not None})


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
