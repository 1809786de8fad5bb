"""Rewards side by side on the same completions: how far they agree, and where they do not.

lab = rollouts.compare(old=exact_match, new=rb.rewards.math())
lab                           # the view: one row per reward, distributions, disagreements first
lab.disagreements(20)
rollouts = lab.rollouts("new")
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from rlbench.data.base.column import Column
from rlbench.data.base.optional import needed
from rlbench.data.rollouts.scoring import RewardErrors, with_rewards
from rlbench.errors import DataError, Stopped, Suggesting, nearest
from rlbench.units import format_number

if TYPE_CHECKING:
    from rlbench.data.rollouts.rollouts import Rollouts

SAME = 1e-9
"""Rewards, or a reward and its group's mean, are equal when this close, relative to the largest reward."""
DISTINCT = 8
"""A reward of at most so many values is counted by value; others by range."""


@dataclass(frozen=True)
class Agreement:
    """One reward against the baseline, over the completions that both scored (`compared`).

    `mean`, `std`, `errors` are of this reward alone. Shares: `spread` of prompts whose completions do not all have the
    same reward (the others teach nothing); `changed` of rewards that differ; `order_changed` of pairs of one prompt's
    completions that the two order differently, a tie in one alone too; `flipped` of advantages against the group's mean
    with the opposite sign. `correlation` is Pearson's, `rank_correlation` Spearman's, NaN where one is constant.
    """

    compared: int
    mean: float
    std: float
    errors: int
    spread: float
    correlation: float
    rank_correlation: float
    changed: float
    order_changed: float
    flipped: float
    seconds: float


@dataclass(frozen=True)
class Disagreement:
    """A completion whose rewards differ; `diff` is new − old, NaN where one of them failed."""

    index: int
    prompt_index: int
    prompt: str
    response: str
    label: Any
    old: float
    new: float
    diff: float


@dataclass(frozen=True)
class Timing:
    """What scoring one completion took."""

    name: str
    index: int
    seconds: float
    prompt: str
    response: str


@dataclass(frozen=True, eq=False)
class RewardComparison(Suggesting):
    """Several rewards of the same completions. `scored`: the rollouts by name, the first is the baseline."""

    scored: Mapping[str, Rollouts]

    @property
    def names(self) -> list[str]:
        """All of them, the baseline first."""
        return list(self.scored)

    @property
    def baseline(self) -> str:
        """What the others are compared with."""
        return self.names[0]

    def rollouts(self, name: str) -> Rollouts:
        """The completions with that reward, its components, times and errors. Raises DataError for another name."""
        if name not in self.scored:
            raise DataError(f"no reward {name!r}{nearest(name, self.names)}; there are {', '.join(self.names)}")
        return self.scored[name]

    def rewards(self, name: str) -> Column:
        """One reward, (N,) float64, NaN where it failed."""
        return Column.of(self.rollouts(name).rewards, name)

    def errors(self, name: str) -> RewardErrors:
        """What that reward failed on, by completion."""
        return self.rollouts(name).reward_errors

    @cached_property
    def agreements(self) -> dict[str, Agreement]:
        """Each reward against the baseline, the baseline's own row first."""
        return {name: self._agreement(name) for name in self.names}

    def table(self) -> Any:
        """The agreements as a pandas DataFrame, one row per reward. Raises DataError where pandas is not installed."""
        pandas = needed("pandas", "comparison.table()")
        return pandas.DataFrame([vars(a) for a in self.agreements.values()], index=self.names)

    def counts(self, name: str | None = None) -> tuple[list[str], list[str], np.ndarray]:
        """Count how often which value of the baseline meets which value of another reward, the second where none is
        named.

        Returns the baseline's values, the other's (ranges of them where there are many), and (old, new) int64 counts.
        Failed completions have a value of their own.
        """
        other = self._other(name)
        rows, row = _binned(np.asarray(self.rewards(self.baseline)))
        columns, column = _binned(np.asarray(self.rewards(other)))
        found = np.zeros((len(rows), len(columns)), np.int64)
        np.add.at(found, (row, column), 1)
        return rows, columns, found

    def disagreements(self, n: int | None = 10, name: str | None = None) -> list[Disagreement]:
        """The completions whose rewards differ, first where one failed and the other did not, then by how much.

        Args:
            n: at most; None for all.
            name: of the reward compared with the baseline; the second one where not given.
        """
        other = self._other(name)
        old, new = np.asarray(self.rewards(self.baseline)), np.asarray(self.rewards(other))
        apart = np.nan_to_num(np.abs(new - old)) > _tolerance(old, new)
        rows = np.flatnonzero(apart | (np.isnan(old) != np.isnan(new)))
        order = rows[np.argsort(-np.nan_to_num(np.abs(new - old)[rows], nan=np.inf), kind="stable")]
        base = self.scored[self.baseline]
        rows, places = order[:n].tolist(), base.group.tolist()
        labels = [base.prompts[places[i]].label for i in rows]
        return [
            Disagreement(i, places[i], *self._texts(i), label, float(old[i]), float(new[i]), float(new[i] - old[i]))
            for i, label in zip(rows, labels, strict=True)
        ]

    def slowest(self, n: int = 10) -> list[Timing]:
        """The completions whose scoring took longest, over all rewards that were run here."""
        timed = {k: r.reward_seconds for k, r in self.scored.items() if r.reward_seconds is not None}
        found = [(float(s), name, i) for name, seconds in timed.items() for i, s in enumerate(seconds)]
        found.sort(key=lambda item: (-item[0], item[2]))
        return [Timing(name, i, seconds, *self._texts(i)) for seconds, name, i in found[:n]]

    def plot(self, bins: int | None = None) -> Any:
        """The distributions of all rewards on one axis, as a `Chart`."""
        first, *others = self.names
        compared = {name: np.asarray(self._known(name)) for name in others}
        return Column.of(self._known(first), "rewards").plot(compared, bins=bins, name=first)

    def __repr__(self) -> str:
        parts = [f"{name} {format_number(self.agreements[name].mean)}" for name in self.names]
        return f"RewardComparison({len(self.rewards(self.baseline))} completions: {', '.join(parts)})"

    def _known(self, name: str) -> np.ndarray:
        values = np.asarray(self.rewards(name))
        return values[~np.isnan(values)]

    def _other(self, name: str | None) -> str:
        chosen = self.names[1] if name is None else name
        self.rollouts(chosen)
        return chosen

    def _agreement(self, name: str) -> Agreement:
        scored, known = self.scored[name], self._known(name)
        old, new = np.asarray(self.rewards(self.baseline)), np.asarray(self.rewards(name))
        both = np.flatnonzero(~np.isnan(old) & ~np.isnan(new))
        a, b, group = old[both], new[both], scored.group[both]
        near = _tolerance(a, b)
        signs = [np.sign(_rounded(x - _group_mean(x, group), near)) for x in (a, b)]
        seconds = scored.reward_seconds
        return Agreement(
            compared=len(both),
            mean=float(known.mean()) if len(known) else np.nan,
            std=float(known.std()) if len(known) else np.nan,
            errors=scored.samples - len(known),
            spread=_spread(new, scored.group),
            correlation=_correlation(a, b),
            rank_correlation=_correlation(_ranks(a), _ranks(b)),
            changed=_share(np.abs(b - a) > near),
            order_changed=_order_changed(a, b, group, near),
            flipped=_share(signs[0] * signs[1] < 0),
            seconds=float(np.nansum(seconds)) if seconds is not None else np.nan,
        )

    def _texts(self, i: int) -> tuple[str, str]:
        base = self.scored[self.baseline]
        return base.prompts[base.group[i]].text, base.texts[i]


def compare(rollouts: Rollouts, rewards: Mapping[str, Any], options: Mapping[str, Any]) -> RewardComparison:
    """See `Rollouts.compare`."""
    given = dict(rewards)
    if not given:
        raise DataError("compare: nothing to compare: rollouts.compare(old=one_reward, new=another)")
    if len(given) == 1:
        if rollouts.rewards is None:
            raise DataError(
                f"compare: {next(iter(given))!r} alone, and these rollouts have no rewards to compare with: "
                "rollouts.compare(old=one_reward, new=another)"
            )
        given = {"old" if "old" not in given else "before": "rewards", **given}
    if not rollouts.samples:
        raise DataError("compare: these rollouts have no completions")
    scored: dict[str, Rollouts] = {}
    for name, reward in given.items():
        try:
            scored[name] = _scored(rollouts, name, reward, options)
        except Stopped as stopped:
            done = RewardComparison(scored) if len(scored) > 1 else None
            raise Stopped(f"{name!r}: {stopped}; {len(scored)} of {len(given)} rewards are whole", done) from None
    return RewardComparison(scored)


def _scored(rollouts: Rollouts, name: str, reward: Any, options: Mapping[str, Any]) -> Rollouts:
    if isinstance(reward, str):
        return _column(rollouts, name, reward)
    if callable(reward):
        return rollouts.score(reward, on_error="keep", **{key: value for key, value in options.items() if value})
    return rollouts.score(reward)


def _column(rollouts: Rollouts, name: str, column: str) -> Rollouts:
    """The rollouts with rewards they have, or one of their components as the reward."""
    if column == "rewards" and rollouts.rewards is not None:
        return rollouts
    if column in rollouts.components:
        return with_rewards(rollouts, rollouts.components[column])
    known = [*(["rewards"] if rollouts.rewards is not None else []), *rollouts.components]
    there = f"there are {', '.join(known)}" if known else "they are not scored yet"
    raise DataError(f"compare: {name!r} asks for {column!r} of these rollouts{nearest(column, known)}; {there}")


# -- numbers


def _tolerance(a: np.ndarray, b: np.ndarray) -> float:
    largest = max((float(np.nanmax(np.abs(x))) for x in (a, b) if len(x) and not np.isnan(x).all()), default=0.0)
    return SAME * max(1.0, largest)


def _rounded(values: np.ndarray, near: float) -> np.ndarray:
    return np.where(np.abs(values) <= near, 0.0, values)


def _group_mean(values: np.ndarray, group: np.ndarray) -> np.ndarray:
    """(N,) each completion's group mean."""
    if not len(values):
        return values
    counts = np.maximum(np.bincount(group), 1)
    return np.asarray((np.bincount(group, values) / counts)[group])


def _spread(values: np.ndarray, group: np.ndarray) -> float:
    """Share of groups with a known reward in which not all of them are equal."""
    there = ~np.isnan(values)
    values, group = values[there], group[there]
    if not len(values):
        return float("nan")
    off = np.abs(values - _group_mean(values, group)) > _tolerance(values, values)
    return len(np.unique(group[off])) / len(np.unique(group))


def _order_changed(a: np.ndarray, b: np.ndarray, group: np.ndarray, near: float) -> float:
    """Share of pairs within groups on whose order the two do not agree; NaN without a pair."""
    pairs = wrong = 0
    for g in np.unique(group):
        own = np.flatnonzero(group == g)
        i, j = np.triu_indices(len(own), 1)
        signs = [np.sign(_rounded(x[own][i] - x[own][j], near)) for x in (a, b)]
        pairs += len(i)
        wrong += int((signs[0] != signs[1]).sum())
    return wrong / pairs if pairs else float("nan")


def _correlation(a: np.ndarray, b: np.ndarray) -> float:
    """Pearson's; NaN for fewer than two, or where one is constant."""
    if len(a) < 2 or np.ptp(a) <= SAME or np.ptp(b) <= SAME:
        return float("nan")
    return float(np.corrcoef(a, b)[0, 1])


def _ranks(values: np.ndarray) -> np.ndarray:
    """Ranks from 0, equal values sharing their mean rank."""
    _, index, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return np.asarray((ends - (counts + 1) / 2)[index])


def _share(mask: np.ndarray) -> float:
    return float(mask.mean()) if len(mask) else float("nan")


def _binned(values: np.ndarray) -> tuple[list[str], np.ndarray]:
    """Names of the values, or of four ranges with equally many, and which of them each is; failures last."""
    there = ~np.isnan(values)
    distinct = np.unique(values[there])
    if len(distinct) <= DISTINCT:
        names, which = [format_number(float(v)) for v in distinct], np.searchsorted(distinct, values)
    else:
        edges = np.unique(np.quantile(values[there], [0, 0.25, 0.5, 0.75, 1]))
        names = [f"{format_number(low)} to {format_number(high)}" for low, high in itertools.pairwise(edges)]
        which = np.clip(np.searchsorted(edges, values, side="right") - 1, 0, len(names) - 1)
    if there.all():
        return names, which
    return [*names, "failed"], np.where(there, which, len(names))
