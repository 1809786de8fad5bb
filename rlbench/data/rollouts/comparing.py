"""Rewards side by side on the same completions: how far they agree, and where they do not."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from rlbench.data.base.column import Column
from rlbench.data.base.drawing import needed
from rlbench.data.rollouts.scoring import RewardErrors, known, with_rewards
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
    with the opposite sign. `correlation` is Pearson's, NaN where one is constant.
    """

    compared: int
    mean: float
    std: float
    errors: int
    spread: float
    correlation: float
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

    def rollouts(self, name: str | None = None) -> Rollouts:
        """The completions with that reward (the second one), its components, times and errors."""
        name = self.names[1] if name is None else name
        if name not in self.scored:
            raise DataError(f"no reward {name!r}{nearest(name, self.names)}; there are {', '.join(self.names)}")
        return self.scored[name]

    def rewards(self, name: str | None = None) -> Column:
        """One reward (the second), (N,) float64, NaN where it failed."""
        return Column.of(self.rollouts(name).rewards, self.names[1] if name is None else name)

    def errors(self, name: str) -> RewardErrors:
        """What that reward failed on, by completion."""
        return self.rollouts(name).reward_errors

    @cached_property
    def agreements(self) -> dict[str, Agreement]:
        """Each reward against the baseline, the baseline's own row first."""
        return {name: self._agreement(name) for name in self.names}

    def table(self) -> Any:
        """The agreements as a pandas DataFrame, one row per reward."""
        pandas = needed("pandas", "comparison.table()")
        return pandas.DataFrame([vars(a) for a in self.agreements.values()], index=self.names)

    def counts(self, name: str | None = None) -> tuple[list[str], list[str], np.ndarray]:
        """Return the baseline's values, another reward's (ranges where there are many), and how often which of them
        meet, (old, new) int64. Failed completions have a value of their own.
        """
        rows, row = _binned(np.asarray(self.rewards(self.baseline)))
        columns, column = _binned(np.asarray(self.rewards(name)))
        counts = np.zeros((len(rows), len(columns)), np.int64)
        np.add.at(counts, (row, column), 1)
        return rows, columns, counts

    def disagreements(self, n: int | None = 10, name: str | None = None) -> list[Disagreement]:
        """The `n` completions (None: all) whose rewards differ most from the baseline's, those where one failed first.

        `name`: of the reward compared; the second one where not given.
        """
        old, new = np.asarray(self.rewards(self.baseline)), np.asarray(self.rewards(name))
        apart = np.nan_to_num(np.abs(new - old)) > _tolerance(old, new)
        rows = np.flatnonzero(apart | (np.isnan(old) != np.isnan(new)))
        order = rows[np.argsort(-np.nan_to_num(np.abs(new - old)[rows], nan=np.inf), kind="stable")]
        base = self.scored[self.baseline]
        listed = []
        for i in order[:n].tolist():
            p, prompt = int(base.group[i]), base.prompts[base.group[i]]
            values = float(old[i]), float(new[i]), float(new[i] - old[i])
            listed.append(Disagreement(i, p, prompt.text, base.texts[i], prompt.label, *values))
        return listed

    def slowest(self, n: int = 10) -> list[Timing]:
        """The completions whose scoring took longest, over all rewards that were run here."""
        timed = {name: one.reward_seconds for name, one in self.scored.items() if one.reward_seconds is not None}
        texts = self.scored[self.baseline].texts
        timings = [Timing(k, i, float(s), texts[i]) for k, seconds in timed.items() for i, s in enumerate(seconds)]
        return sorted(timings, key=lambda timing: (-timing.seconds, timing.index))[:n]

    def plot(self, bins: int | None = None) -> Any:
        """The distributions of all rewards on one axis, as a `Chart`."""
        first, *others = self.names
        compared = {name: known(self.rewards(name)) for name in others}
        return Column.of(known(self.rewards(first)), "rewards").plot(compared, bins=bins, name=first)

    def __repr__(self) -> str:
        parts = [f"{name} {format_number(self.agreements[name].mean)}" for name in self.names]
        return f"RewardComparison({len(self.rewards(self.baseline))} completions: {', '.join(parts)})"

    def _agreement(self, name: str) -> Agreement:
        scored, own = self.scored[name], known(self.rewards(name))
        old, new = np.asarray(self.rewards(self.baseline)), np.asarray(self.rewards(name))
        both = np.flatnonzero(~np.isnan(old) & ~np.isnan(new))
        a, b, group = old[both], new[both], scored.group[both]
        near = _tolerance(a, b)
        signs = [_signs(x - _group_mean(x, group), near) for x in (a, b)]
        seconds = scored.reward_seconds
        return Agreement(
            compared=len(both),
            mean=float(own.mean()) if len(own) else np.nan,
            std=float(own.std()) if len(own) else np.nan,
            errors=scored.samples - len(own),
            spread=_spread(new, scored.group),
            correlation=_correlation(a, b),
            changed=_share(np.abs(b - a) > near),
            order_changed=_order_changed(a, b, group, near),
            flipped=_share(signs[0] * signs[1] < 0),
            seconds=float(np.nansum(seconds)) if seconds is not None else np.nan,
        )


def compare(rollouts: Rollouts, rewards: Mapping[str, Any], options: Mapping[str, Any]) -> RewardComparison:
    """See `Rollouts.compare`."""
    chosen = dict(rewards)
    if len(chosen) == 1 and rollouts.rewards is not None:
        chosen = {"before" if "old" in chosen else "old": "rewards", **chosen}
    if len(chosen) < 2 or not rollouts.samples:
        raise DataError(
            f"compare: {len(chosen)} rewards of {rollouts.samples} completions, and these rollouts have none of their "
            "own to compare with: rollouts.compare(old=one_reward, new=another)"
        )
    scored: dict[str, Rollouts] = {}
    for name, reward in chosen.items():
        try:
            scored[name] = scored_by(rollouts, f"compare: {name!r}", reward, options)
        except Stopped as stopped:
            done = RewardComparison(scored) if len(scored) > 1 else None
            raise Stopped(f"{name!r}: {stopped}; {len(scored)} of {len(chosen)} rewards are whole", done) from None
    return RewardComparison(scored)


def scored_by(rollouts: Rollouts, who: str, reward: Any, options: Mapping[str, Any]) -> Rollouts:
    """The rollouts with that reward: a function's, numbers, or one they have by name, as "rewards" or a component.

    `who` asks, as a refusal says.
    """
    if callable(reward):
        return rollouts.score(reward, on_error="keep", **{key: value for key, value in options.items() if value})
    if not isinstance(reward, str):
        return rollouts.score(reward)
    if reward == "rewards" and rollouts.rewards is not None:
        return rollouts
    if reward in rollouts.components:
        return with_rewards(rollouts, rollouts.components[reward])
    there = [*(["rewards"] if rollouts.rewards is not None else []), *rollouts.components]
    these = f"there are {', '.join(there)}" if there else "they are not scored yet"
    raise DataError(f"{who} asks for {reward!r} of these rollouts{nearest(reward, there)}; {these}")


# -- numbers


def _tolerance(a: np.ndarray, b: np.ndarray) -> float:
    largest = max((float(np.nanmax(np.abs(x))) for x in (a, b) if len(x) and not np.isnan(x).all()), default=0.0)
    return SAME * max(1.0, largest)


def _signs(values: np.ndarray, near: float) -> np.ndarray:
    return np.sign(np.where(np.abs(values) <= near, 0.0, values))


def _group_mean(values: np.ndarray, group: np.ndarray) -> np.ndarray:
    """(N,) each completion's group mean."""
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
        signs = [_signs(x[own][i] - x[own][j], near) for x in (a, b)]
        pairs += len(i)
        wrong += int((signs[0] != signs[1]).sum())
    return wrong / pairs if pairs else float("nan")


def _correlation(a: np.ndarray, b: np.ndarray) -> float:
    """Pearson's; NaN for fewer than two, or where one is constant."""
    if len(a) < 2 or np.ptp(a) <= SAME or np.ptp(b) <= SAME:
        return float("nan")
    return float(np.corrcoef(a, b)[0, 1])


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
