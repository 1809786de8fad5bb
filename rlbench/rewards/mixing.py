"""Rewards made of rewards: a weighted sum, and a choice by what the prompt is of."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlbench.errors import DataError, nearest
from rlbench.rewards.board import Board, Failure, Outcome, Reward
from rlbench.rewards.fields import By, read
from rlbench.rewards.kinds import Scorer, name_of
from rlbench.rewards.running import as_scorer
from rlbench.user_code import user_code

if TYPE_CHECKING:
    from rlbench.data.rollouts.rollout import Rollout


@dataclass(frozen=True, repr=False)
class Weighted(Scorer):
    """See `weighted`."""

    parts: tuple[tuple[str, Any, float], ...]

    def score_all(self, rollouts: Sequence[Rollout], board: Board) -> None:
        """Run one part after the other over all of them."""
        boards: dict[str, Board] = {}
        try:
            for name, fn, _ in self.parts:
                boards[name] = Board(board)
                as_scorer(fn).score_all(rollouts, boards[name])
        finally:  # also what an interrupt leaves: completions of which all parts are known
            for i in range(len(rollouts)):
                found = {name: b.known(i) for name, b in boards.items()}
                seconds = sum(b.seconds.get(i, 0.0) for b in boards.values())
                if any(isinstance(outcome, Failure) for outcome in found.values()) or (
                    len(found) == len(self.parts) and None not in found.values()
                ):
                    board.put(i, self._sum(found), seconds)

    def _sum(self, found: Mapping[str, Outcome | None]) -> Outcome:
        total = 0.0
        components: dict[str, float] = {}
        for name, _, weight in self.parts:
            outcome = found.get(name)
            if isinstance(outcome, Failure):
                return outcome.within(name)
            if outcome is not None:
                total += weight * outcome.value
                components |= {name: outcome.value} | _details(name, outcome)
        return Reward(total, components)

    def __repr__(self) -> str:
        return f"weighted({{{', '.join(f'{n!r}: ({name_of(fn)}, {w:g})' for n, fn, w in self.parts)}}})"


@dataclass(frozen=True, repr=False)
class Mixture(Scorer):
    """See `mixture`."""

    parts: tuple[tuple[Any, Any], ...]
    by: By
    default: Any = None

    def score_all(self, rollouts: Sequence[Rollout], board: Board) -> None:
        """Run each part over its own completions."""
        kinds: dict[Any, list[int]] = {key: [] for key, _ in self.parts}
        for i, rollout in enumerate(rollouts):
            try:
                with user_code():
                    key = read(rollout, self.by)
                chosen = key if key in kinds else _OTHER
            except Exception as error:  # a user's own function, a key that cannot be hashed
                board.put(i, Failure.of(error), 0.0)
                continue
            if chosen is _OTHER and self.default is None:
                known = [key for key, _ in self.parts]
                said = f"mixture: the prompt is of {str(key)[:40]!r}{nearest(str(key), map(str, known))}"
                board.put(i, Failure(said, f"wanted one of {', '.join(map(repr, known))}, or mixture(default=…)"), 0.0)
            else:
                kinds.setdefault(chosen, []).append(i)
        for key, fn in (*self.parts, (_OTHER, self.default)):
            if chosen_rows := kinds.get(key):
                self._score_kind(str(key), fn, chosen_rows, rollouts, board)

    def _score_kind(self, name: str, fn: Any, rows: Sequence[int], rollouts: Sequence[Rollout], board: Board) -> None:
        inner = Board(board)
        try:
            as_scorer(fn).score_all([rollouts[i] for i in rows], inner)
        finally:  # also what an interrupt leaves
            for k, i in enumerate(rows):
                outcome = inner.known(k)
                if isinstance(outcome, Reward):
                    outcome = Reward(outcome.value, {name: outcome.value} | _details(name, outcome))
                if outcome is not None:
                    board.put(i, outcome if isinstance(outcome, Reward) else outcome.within(name), inner.seconds[k])

    def __repr__(self) -> str:
        other = "" if self.default is None else f", default={name_of(self.default)}"
        by = "" if self.by is None else f", by={self.by if isinstance(self.by, str) else name_of(self.by)!r}"
        return f"mixture({{{', '.join(f'{key!r}: {name_of(fn)}' for key, fn in self.parts)}}}{by}{other})"


class _Other:
    """The kind of prompts that the default scores."""

    def __str__(self) -> str:
        return "default"


_OTHER = _Other()


def weighted(parts: Mapping[str, tuple[Any, float]]) -> Weighted:
    """A sum of rewards, each with its weight: `weighted({"format": (tags("answer"), 0.2), "answer": (math(), 0.8)})`.

    Components: each part's reward, unweighted, under its name; a part's own components as `name/…`.

    Args:
        parts: {name: (reward, weight)}; a reward is anything `rollouts.score` takes as a function. A function that
            needs options goes in as `rb.rewards.function(fn, timeout_s=…)`.

    A completion of which one part fails has an error.
    """
    found = []
    for name, part in _items("weighted", parts):
        if not isinstance(part, tuple | list) or len(part) != 2:
            raise DataError(f"weighted: {name!r} is {str(part)[:60]!r}; wanted (reward, weight)")
        fn, weight = part
        if not isinstance(weight, int | float) or isinstance(weight, bool) or not math.isfinite(weight):
            raise DataError(f"weighted: the weight of {name!r} is {weight!r}; wanted a finite number")
        as_scorer(fn)
        found.append((str(name), fn, float(weight)))
    return Weighted(tuple(found))


def mixture(parts: Mapping[Any, Any], by: By = None, *, default: Any = None) -> Mixture:
    """One reward for each kind of prompt: `mixture({"gsm8k": math(), "code": run_tests}, by="source")`.

    Components: each part's reward under its key, NaN for completions of another kind; a part's own as `key/…`.

    Args:
        parts: {kind: reward}; a reward as in `weighted`.
        by: what says a prompt's kind: the name of a key of its `meta`, a function of the rollout, or None for its
            label.
        default: the reward of all other kinds; without one such completions have an error.
    """
    found = [(key, fn) for key, fn in _items("mixture", parts)]
    for fn in [fn for _, fn in found] + ([] if default is None else [default]):
        as_scorer(fn)
    return Mixture(tuple(found), by, default)


def _items(what: str, parts: Any) -> Iterable[tuple[Any, Any]]:
    if not isinstance(parts, Mapping) or not parts:
        raise DataError(f"{what}: wanted {{name: reward}} with at least one, got {type(parts).__name__}")
    return parts.items()


def _details(name: str, reward: Reward) -> dict[str, float]:
    return {f"{name}/{key}": value for key, value in reward.components.items()}
