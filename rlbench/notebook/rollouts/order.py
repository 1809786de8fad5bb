"""Which prompts and completions a viewer shows, in which order: summaries, sorting, filtering, searching."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from rlbench.data import Rollouts
from rlbench.data.rollouts.scoring import known
from rlbench.errors import DataError, nearest
from rlbench.notebook.rollouts.channel_scale import number

MISMATCH_SHARE = 0.05  # of all completions, that "largest mismatch" keeps


@dataclass(frozen=True, eq=False)
class Order:
    """What is shown, int32: `groups` (prompt numbers) in order, `counts` of completions of each, `samples` by group."""

    groups: np.ndarray
    counts: np.ndarray
    samples: np.ndarray


@dataclass(frozen=True, eq=False)
class Summary:
    """Numbers per completion and per prompt of rollouts."""

    rollouts: Rollouts

    @cached_property
    def counts(self) -> np.ndarray:
        """Completions of each prompt, (P,) int64."""
        return np.bincount(self.rollouts.group, minlength=len(self.rollouts))

    @cached_property
    def lengths(self) -> np.ndarray:
        """Tokens of each completion, (N,) float64."""
        return np.asarray(self.rollouts.lengths, np.float64)

    @cached_property
    def rewards(self) -> np.ndarray:
        """(N,) float64; zeros before scoring, NaN where it failed."""
        rewards = self.rollouts.rewards
        return np.zeros(self.rollouts.samples) if rewards is None else np.asarray(rewards)

    @cached_property
    def failed(self) -> np.ndarray:
        """(N,) bool: scoring it failed."""
        return np.isnan(self.rewards)

    @cached_property
    def threshold(self) -> float | None:
        """A completion is right when its reward is above: halfway between the ends, or 0. None before scoring."""
        rewards = known(self.rewards)
        if self.rollouts.rewards is None or not len(rewards):
            return None
        low, high = float(rewards.min()), float(rewards.max())
        return 0.0 if low == high else (low + high) / 2

    @cached_property
    def right(self) -> np.ndarray:
        """(N,) bool."""
        return self.rewards > (np.inf if self.threshold is None else self.threshold)

    @cached_property
    def two_valued(self) -> bool:
        """Whether every reward is one of two numbers, so that "4/8 right" says all."""
        return self.rollouts.rewards is not None and 0 < len(np.unique(known(self.rewards))) <= 2

    @cached_property
    def forked(self) -> np.ndarray:
        """(N,) bool: continued from another completion, so that it says nothing of the prompt by itself."""
        return np.array(["fork" in info for info in self.rollouts.infos] or [False] * self.rollouts.samples, bool)

    @cached_property
    def own(self) -> np.ndarray:
        """(N,) bool: what tells of its prompt: all that are not forked; of a prompt that has only such, those."""
        count = np.bincount(self.rollouts.group, ~self.forked, len(self.rollouts))
        return ~self.forked | (count == 0)[self.rollouts.group]

    @cached_property
    def mean(self) -> np.ndarray:
        """Mean reward of each prompt, (P,) float64; NaN without any."""
        return self.per_prompt(self.rewards)

    @cached_property
    def spread(self) -> np.ndarray:
        """Standard deviation of each prompt's rewards, (P,) float64."""
        return np.sqrt(self.per_prompt((self.rewards - self.mean[self.rollouts.group]) ** 2))

    @cached_property
    def mismatch(self) -> np.ndarray | None:
        """Mean |trainer − sampler| log-prob of each completion, nats, (N,) float64; NaN or None where not known."""
        values = self.rollouts.channels.get("difference")
        return None if values is None else self.per_sample(np.abs(values))

    def per_sample(self, values: np.ndarray) -> np.ndarray:
        """Mean of a flat channel over each completion's known tokens, (N,) float64; NaN where none is known."""
        finite, filled = np.isfinite(values), self.lengths > 0
        starts = self.rollouts.responses.offsets[:-1][filled]  # reduceat would read an empty row's neighbour
        means = np.full(len(filled), np.nan)
        if len(starts):
            counts = np.add.reduceat(finite, starts, dtype=np.int64)
            totals = np.add.reduceat(np.where(finite, values, 0), starts, dtype=np.float64)
            means[filled] = totals / np.where(counts, counts, np.nan)
        return means

    def per_prompt(self, values: np.ndarray) -> np.ndarray:
        """Mean of a column over those of each prompt's own completions that have a value, (P,) float64."""
        there = ~np.isnan(values) & self.own
        totals = np.bincount(self.rollouts.group, np.where(there, values, 0), len(self.rollouts))
        counts = np.bincount(self.rollouts.group, there, len(self.rollouts))
        return totals / np.where(counts, counts, np.nan)

    @cached_property
    def sorts(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Orders these rollouts can be shown in -> keys, smallest first: per prompt (P,) and per completion (N,)."""
        r, length = self.rollouts, self.per_prompt(self.lengths)
        sorts = {"prompt": (np.arange(len(r), dtype=np.float64), np.zeros(r.samples))}
        if r.rewards is not None:
            sorts |= {"reward ↓": (-self.mean, -self.rewards), "reward ↑": (self.mean, self.rewards)}
            sorts["spread ↓"] = (-self.spread, -self.rewards)
        sorts |= {"length ↓": (-length, -self.lengths), "length ↑": (length, self.lengths)}
        if self.mismatch is not None:
            values, most = np.nan_to_num(self.mismatch), np.zeros(len(r))
            np.maximum.at(most, r.group, values)
            sorts["mismatch ↓"] = (-most, -values)
        return sorts

    @cached_property
    def filters(self) -> dict[str, np.ndarray]:
        """Filters these rollouts can be shown through -> which completions stay, (N,) bool."""
        r = self.rollouts
        filters = {"all": np.ones(r.samples, bool)}
        if r.rewards is not None:
            mixed = (np.nan_to_num(self.spread) > 1e-12)[r.group]
            filters |= {"mixed groups": mixed, "zero-variance groups": ~mixed}
            filters |= {"right": self.right, "wrong": ~self.right & ~self.failed}
        if self.failed.any():
            filters["scoring failed"] = self.failed
        filters |= {"truncated": r.truncated, "aborted": r.aborted}
        if "clipped" in r.channels:
            filters["clipped tokens"] = np.nan_to_num(self.per_sample(r.channels["clipped"])) > 0
        if self.mismatch is not None:
            values = np.nan_to_num(self.mismatch, nan=-1.0)
            worst = np.argsort(-values, kind="stable")[: max(1, round(len(values) * MISMATCH_SHARE))]
            filters["largest mismatch"] = np.isin(np.arange(len(values)), worst) & (values >= 0)
        return filters

    def labels(self) -> list[str]:
        """What each filter is called, with how many completions it keeps."""
        notes = {"right": "" if self.threshold is None else f" (> {number(self.threshold)})"}
        return [f"{name}{notes.get(name, '')} · {int(kept.sum())}" for name, kept in self.filters.items()]

    def order(self, sort: str = "prompt", filter: str = "all", search: str = "") -> Order:
        """What to show: of `sorts` and `filters`; `search`: what the completion or its prompt holds, whatever case."""
        r, needle = self.rollouts, search.strip().lower()
        keeps = self.filters[filter]
        if needle:
            prompts = np.array([needle in prompt.text.lower() for prompt in r.prompts], bool)
            texts = np.array([needle in text.lower() for text in r.texts], bool)
            keeps = keeps & (texts | prompts[r.group])
        by_prompt, by_sample = self.sorts[sort]
        kept = np.flatnonzero(keeps)
        groups = np.argsort(np.nan_to_num(by_prompt, nan=np.inf), kind="stable")
        rank = np.argsort(groups)
        samples = kept[np.lexsort((kept, np.nan_to_num(by_sample[kept], nan=np.inf), rank[r.group[kept]]))]
        counts = np.bincount(r.group[samples], minlength=len(r))
        if filter != "all" or needle:
            groups = groups[counts[groups] > 0]
        return Order(groups.astype(np.int32), counts[groups].astype(np.int32), samples.astype(np.int32))


def checked(what: str, name: str, names: Iterable[str]) -> str:
    """`name`, where it is one of `names`; else DataError."""
    if name not in (there := list(names)):
        raise DataError(f"no {what} {name!r}{nearest(name, there)}; these rollouts have {', '.join(there)}")
    return name
