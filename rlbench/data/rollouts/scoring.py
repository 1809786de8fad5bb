"""What scoring makes of rollouts: rewards, the numbers they are made of, the time each took, and what failed.

How a reward function is run (side by side, in processes of its own, by a service) is asked of `rlbench.rewards`, by
name, as that room lies above this one.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from rlbench.data.base.drawing import needed
from rlbench.data.base.ordered import in_order
from rlbench.data.rollouts.advantage_call import wanted_names
from rlbench.errors import DataError, Stopped, nearest
from rlbench.traces import remember
from rlbench.units import format_number

if TYPE_CHECKING:
    from rlbench.data.rollouts.rollout import Rollout
    from rlbench.data.rollouts.rollouts import Rollouts

RewardFn = Callable[["Rollout"], Any]
ON_ERROR = ("raise", "keep")


class ScoringError(DataError):
    """Completions have no reward: `.partial` holds the rollouts of those that have one (None without any)."""

    partial: Rollouts | None = None


@dataclass(frozen=True)
class RewardError:
    """Why completion `index` (in `.flat` order) has no reward; `line` is the line of the reward's code, if any."""

    index: int
    prompt: str
    error: str
    line: str = ""


@dataclass(frozen=True, repr=False)
class RewardErrors(Sequence[RewardError]):
    """What failed when rollouts were scored with `on_error="keep"`, by completion."""

    items: tuple[RewardError, ...] = ()

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: Any) -> Any:
        return self.items[index]

    def __repr__(self) -> str:
        first = f"; the first, on completion {self[0].index}: {self[0].error[:80]!r}" if self else ""
        return f"RewardErrors({len(self)} failed{first})"

    def table(self) -> Any:
        """A pandas DataFrame: `index`, `prompt`, `error`, `line`."""
        columns = [field.name for field in fields(RewardError)]
        return needed("pandas", "reward_errors.table()").DataFrame(list(map(vars, self)), columns=columns)

    def taken(self, rows: np.ndarray) -> RewardErrors:
        """Those of the completions `rows`, by their new positions."""
        by_index = {error.index: error for error in self}
        places = enumerate(rows.tolist() if self else ())
        return RewardErrors(tuple(replace(by_index[i], index=k) for k, i in places if i in by_index))


def score(rollouts: Rollouts, fn: Any, on_error: str = "raise", board: Any = None, **options: Any) -> Rollouts:
    """See `Rollouts.score`. `board`: where outcomes are written, by which another thread can stop it."""
    if on_error not in ON_ERROR:
        raise DataError(f"on_error={on_error!r}: wanted 'raise' or 'keep'{nearest(str(on_error), ON_ERROR)}")
    if not callable(fn):
        useless = [name for name, value in options.items() if value] + ([] if on_error == "raise" else ["on_error"])
        if useless:
            raise DataError(f"score: {', '.join(useless)} would have no effect on rewards that are numbers already")
        return with_rewards(rollouts, _as_numbers(rollouts, fn))
    running = importlib.import_module("rlbench.rewards.running")
    board = running.Board() if board is None else board
    try:
        running.as_scorer(fn, **options).score_all(list(rollouts.flat), board)
    except KeyboardInterrupt:
        raise stopped(rollouts, board) from None
    for i in range(rollouts.samples):
        if board.known(i) is None:  # a scorer of a user's own may forget some, a coroutine may cancel itself
            board.put(i, running.Failure("the reward ended without an outcome"), 0.0)
    board.close()
    if not board.failures or on_error == "keep":
        return _scored(rollouts, board, range(rollouts.samples))
    raise error_of(rollouts, board)


def stopped(rollouts: Rollouts, board: Any, why: str = "") -> Stopped:
    """What to raise for a scoring that was stopped: `.partial` holds the completions that have a reward, if any."""
    board.close()
    said = f"scoring stopped: {len(board.rewards)} of {rollouts.samples} completions have a reward{why}"
    return Stopped(said, _with_reward(rollouts, board))


def check_known(rollouts: Rollouts, rows: np.ndarray) -> None:
    """Refuse to train on completions without a reward."""
    if rollouts.rewards is None:
        raise DataError("these rollouts have no rewards yet: rollouts.score(reward_fn).batch(advantage=…)")
    unknown = np.isnan(rollouts.rewards[rows])
    if unknown.any():
        raise DataError(
            f"{int(unknown.sum())} of {len(rows)} completions have no reward, as scoring them failed "
            "(rollouts.reward_errors): leave them out by rollouts.select(~np.isnan(rollouts.rewards))"
        )


def with_components(
    rollouts: Rollouts, advantage: Callable[..., Any], given: Mapping[str, Any], rows: np.ndarray
) -> dict[str, Any]:
    """What a user gave for an advantage, and the rewards' components where it takes them and none were given.

    Components whose name has a `/` are details, and stay behind.
    """
    components = {name: values for name, values in rollouts.components.items() if "/" not in name}
    if not components or "components" in given or "components" not in wanted_names(advantage):
        return dict(given)
    for name, values in components.items():
        if holes := int(np.isnan(values[rows]).sum()):
            raise DataError(
                f"the reward component {name!r} is not known for {holes} of {len(rows)} completions, and the "
                "advantage takes components: batch(advantage=…, components={name: values}) says what to use"
            )
    return {**given, "components": components}


def with_rewards(rollouts: Rollouts, rewards: np.ndarray) -> Rollouts:
    """These rewards, of which nothing else is known."""
    return replace(rollouts, rewards=rewards, components={}, reward_seconds=None, reward_errors=RewardErrors())


def known(rewards: Any) -> np.ndarray:
    """The rewards that are known, float64: without the NaN of those whose scoring failed."""
    values = np.asarray(rewards, np.float64)
    return values[~np.isnan(values)]


def described(rewards: Any) -> str:
    """`reward 0.42 ± 0.49`, and how many are not known; "" of none at all."""
    values = known(rewards)
    missing = len(rewards) - len(values)
    parts = [f"{missing} without a reward"] if missing else []
    if len(values):
        parts.insert(0, f"reward {format_number(float(values.mean()))} ± {format_number(float(values.std()))}")
    return " · ".join(parts)


def _as_numbers(rollouts: Rollouts, given: Iterable[Any]) -> np.ndarray:
    count = rollouts.samples
    try:
        rewards = np.asarray(in_order(given, count, f"score: wanted {count} rewards that are numbers, got"), np.float64)
    except (TypeError, ValueError) as error:
        raise DataError(f"score: wanted {count} rewards that are numbers: {error}") from None
    if rewards.shape != (count,):
        raise DataError(f"score: wanted {count} rewards, one per completion, got shape {rewards.shape}")
    if not np.isfinite(rewards).all():
        raise DataError(f"score: reward {int(np.flatnonzero(~np.isfinite(rewards))[0])} is not finite")
    return rewards


def _with_reward(rollouts: Rollouts, board: Any) -> Rollouts | None:
    """Those that have a reward, with it."""
    rows = sorted(board.rewards)
    if not rows:
        return None
    return _scored(rollouts.select(np.isin(np.arange(rollouts.samples), rows)), board, rows)


def _scored(rollouts: Rollouts, board: Any, indices: Sequence[int]) -> Rollouts:
    """Rollouts with what the board says; `indices`: where it has the outcome of each."""
    rewards, seconds = np.full(len(indices), np.nan), np.full(len(indices), np.nan)
    components: dict[str, np.ndarray] = {}
    errors = []
    for k, i in enumerate(indices):
        seconds[k] = board.seconds[i]
        if i in board.failures:
            prompt = rollouts.prompts[rollouts.group[k]].text
            failure = board.failures[i]
            errors.append(RewardError(k, prompt, "; ".join(_reasons(failure)), str(failure.line or "")))
            continue
        reward = board.rewards[i]
        rewards[k] = reward.value
        for name, value in reward.components.items():
            components.setdefault(name, np.full(len(indices), np.nan))[k] = value
    return replace(
        rollouts,
        rewards=rewards,
        components=components,
        reward_seconds=seconds,
        reward_errors=RewardErrors(tuple(errors)),
    )


def _reasons(failure: Any) -> list[str]:
    return [text for text in (failure.said, failure.hint) if text]


def error_of(rollouts: Rollouts, board: Any) -> ScoringError:
    """The first failure, how many there are, and what there is all the same."""
    index = min(board.failures)
    failure = board.failures[index]
    prompt, answer = rollouts.prompts[rollouts.group[index]].text[:60], rollouts.texts[index][:60]
    what, *hints = _reasons(failure)
    where = f"(prompt {rollouts.group[index]}: {prompt!r}, answer {answer!r})"
    lines = ["; ".join([f"{what} on completion {index}", *hints]) + f" {where}", str(failure.line or "")]
    more, good = len(board.failures) - 1, len(board.rewards)
    lines.append(f"{more} more of {rollouts.samples} failed" if more else "")
    if good:
        lines.append(f"{good} have a reward: .partial of this error; score(…, on_error='keep') leaves the others out")
    error = ScoringError("\n  ".join(filter(None, lines)))
    error.partial = _with_reward(rollouts, board)
    error.user_line = lines[1]
    error.full_traceback = remember(failure.trace) if failure.trace else ""
    error.__cause__ = failure.cause
    return error
