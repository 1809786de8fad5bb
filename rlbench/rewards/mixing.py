"""Rewards made of rewards: a weighted sum, and a choice by what the prompt is of."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any

from rlbench.errors import DataError, nearest
from rlbench.rewards.kinds import Board, By, Failure, Outcome, Reward, Scorer, read
from rlbench.rewards.running import as_scorer
from rlbench.user_code import name_of, user_code

if TYPE_CHECKING:
    from rlbench.data.rollouts.rollout import Rollout


@dataclass(frozen=True, repr=False)
class weighted(Scorer):
    """A sum of rewards, each with its weight: `weighted({"format": (tags("answer"), 0.2), "answer": (math(), 0.8)})`.

    `parts` is {name: (reward, weight)}; a reward is anything `rollouts.score` takes as a function, one that needs
    options goes in as `rb.rewards.function(fn, timeout_s=…)`. Components: each part's reward, unweighted, under its
    name; a part's own components as `name/…`. A completion of which one part fails has an error.
    """

    parts: Mapping[str, tuple[Any, float]] = field(hash=False)

    def __post_init__(self) -> None:
        _check_parts("weighted", self.parts)
        for name, part in self.parts.items():
            if not isinstance(part, tuple | list) or len(part) != 2:
                raise DataError(f"weighted: {name!r} is {str(part)[:60]!r}; wanted (reward, weight)")
            fn, weight = part
            if not isinstance(weight, int | float) or isinstance(weight, bool) or not math.isfinite(weight):
                raise DataError(f"weighted: the weight of {name!r} is {weight!r}; wanted a finite number")
            as_scorer(fn)
        parts = {str(name): (fn, float(weight)) for name, (fn, weight) in self.parts.items()}
        object.__setattr__(self, "parts", parts)  # the caller's mapping may change

    def score_all(self, rollouts: Sequence[Rollout], board: Board) -> None:
        """Run one part after the other over all of them."""
        boards: dict[str, Board] = {}
        try:
            for name, (fn, _) in self.parts.items():
                boards[name] = Board(board)
                as_scorer(fn).score_all(rollouts, boards[name])
        finally:  # also what an interrupt leaves: completions of which all parts are known
            for i in range(len(rollouts)):
                known = {name: part.known(i) for name, part in boards.items()}
                seconds = sum(part.seconds.get(i, 0.0) for part in boards.values())
                if any(isinstance(outcome, Failure) for outcome in known.values()) or (
                    len(known) == len(self.parts) and None not in known.values()
                ):
                    board.put(i, self._sum(known), seconds)

    def _sum(self, known: Mapping[str, Outcome | None]) -> Outcome:
        total = 0.0
        components: dict[str, float] = {}
        for name, (_, weight) in self.parts.items():
            outcome = known.get(name)
            if isinstance(outcome, Failure):
                return outcome.within(name)
            if outcome is not None:
                total += weight * outcome.value
                components |= _components(name, outcome)
        return Reward(total, components)

    def __repr__(self) -> str:
        return f"weighted({{{', '.join(f'{n!r}: ({name_of(fn)}, {w:g})' for n, (fn, w) in self.parts.items())}}})"


@dataclass(frozen=True, repr=False)
class mixture(Scorer):
    """One reward for each kind of prompt: `mixture({"gsm8k": math(), "code": run_tests}, by="source")`.

    `by` is a key of the prompt's `meta`, a function of the rollout, or None for its label; `default` scores other
    kinds. Components: each part's reward under its key, NaN for completions of another kind; a part's own as `key/…`.
    """

    parts: Mapping[Any, Any] = field(hash=False)
    by: By = None
    _: KW_ONLY
    default: Any = None

    def __post_init__(self) -> None:
        _check_parts("mixture", self.parts)
        for fn in [*self.parts.values(), *([] if self.default is None else [self.default])]:
            as_scorer(fn)
        object.__setattr__(self, "parts", dict(self.parts))

    def score_all(self, rollouts: Sequence[Rollout], board: Board) -> None:
        """Run each part over its own completions."""
        rows: dict[Any, list[int]] = {key: [] for key in self.parts}
        others: list[int] = []
        for i, rollout in enumerate(rollouts):
            try:
                with user_code():
                    key = read(rollout, self.by)
                own = rows.get(key, others)
            except Exception as error:  # a user's own function, a key that cannot be hashed
                board.put(i, Failure.of(error), 0.0)
                continue
            if own is others and self.default is None:
                said = f"mixture: the prompt is of {str(key)[:40]!r}{nearest(str(key), map(str, rows))}"
                board.put(i, Failure(said, f"wanted one of {', '.join(map(repr, rows))}, or mixture(default=…)"), 0.0)
            else:
                own.append(i)
        for key, fn in self.parts.items():
            _score_rows(str(key), fn, rows[key], rollouts, board)
        _score_rows("default", self.default, others, rollouts, board)

    def __repr__(self) -> str:
        other = "" if self.default is None else f", default={name_of(self.default)}"
        by = "" if self.by is None else f", by={self.by if isinstance(self.by, str) else name_of(self.by)!r}"
        return f"mixture({{{', '.join(f'{key!r}: {name_of(fn)}' for key, fn in self.parts.items())}}}{by}{other})"


def _check_parts(what: str, parts: Any) -> None:
    if not isinstance(parts, Mapping) or not parts:
        raise DataError(f"{what}: wanted {{name: reward}} with at least one, got {type(parts).__name__}")


def _score_rows(name: str, fn: Any, rows: Sequence[int], rollouts: Sequence[Rollout], board: Board) -> None:
    """Score some of the completions by one part of a mixture."""
    if not rows:
        return
    inner = Board(board)
    try:
        as_scorer(fn).score_all([rollouts[i] for i in rows], inner)
    finally:  # also what an interrupt leaves
        for k, i in enumerate(rows):
            outcome = inner.known(k)
            if isinstance(outcome, Reward):
                board.put(i, Reward(outcome.value, _components(name, outcome)), inner.seconds[k])
            elif outcome is not None:
                board.put(i, outcome.within(name), inner.seconds[k])


def _components(name: str, reward: Reward) -> dict[str, float]:
    return {name: reward.value} | {f"{name}/{key}": value for key, value in reward.components.items()}
