"""Which prompts and completions a viewer shows, in which order: summaries, sorting, filtering, searching."""

from __future__ import annotations

from collections.abc import Callable
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
    """What is shown: `groups` (prompt numbers) in order, `counts` of completions of each, `samples` group by group.

    All int32.
    """

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
        """Tokens of each completion, (N,) int64."""
        return self.rollouts.lengths

    @cached_property
    def threshold(self) -> float | None:
        """A completion is right when its reward is above: halfway between the least and the largest, or 0 where all
        rewards are equal. None before scoring."""
        rewards = known(self.rewards)
        if self.rollouts.rewards is None or not len(rewards):
            return None
        low, high = float(rewards.min()), float(rewards.max())
        return 0.0 if low == high else (low + high) / 2

    @cached_property
    def right(self) -> np.ndarray:
        """(N,) bool."""
        rewards = self.rollouts.rewards
        if rewards is None or self.threshold is None:
            return np.zeros(self.rollouts.samples, bool)
        return rewards > self.threshold

    @cached_property
    def two_valued(self) -> bool:
        """Whether every reward is one of two numbers, so that "4/8 right" says all."""
        rewards = self.rollouts.rewards
        return rewards is not None and 0 < len(np.unique(known(rewards))) <= 2

    @cached_property
    def mean(self) -> np.ndarray:
        """Mean reward of each prompt, (P,) float64; NaN without any."""
        return self.per_prompt(self.rewards)

    @cached_property
    def spread(self) -> np.ndarray:
        """Standard deviation of each prompt's rewards, (P,) float64."""
        off = self.rewards - self.mean[self.rollouts.group]
        return np.sqrt(self.per_prompt(off**2))

    @cached_property
    def mixed(self) -> np.ndarray:
        """(P,) bool: its completions have different rewards."""
        return np.nan_to_num(self.spread) > 1e-12

    @cached_property
    def rewards(self) -> np.ndarray:
        """(N,) float64; zeros before scoring, NaN where it failed."""
        given = self.rollouts.rewards
        return np.zeros(self.rollouts.samples) if given is None else np.asarray(given)

    @cached_property
    def failed(self) -> np.ndarray:
        """(N,) bool: scoring it failed."""
        return np.isnan(self.rewards)

    @cached_property
    def mismatch(self) -> np.ndarray | None:
        """Mean |trainer − sampler| log-prob of each completion, nats, (N,) float64; NaN or None where not known."""
        values = self.rollouts.channels.get("difference")
        return None if values is None else self.per_sample(np.abs(values))

    @cached_property
    def clipped(self) -> np.ndarray | None:
        """(N,) bool: at least one token was clipped; None where not known."""
        values = self.rollouts.channels.get("clipped")
        return None if values is None else np.nan_to_num(self.per_sample(values)) > 0

    def per_sample(self, values: np.ndarray) -> np.ndarray:
        """Mean of a flat channel over each completion's known tokens, (N,) float64; NaN where none is known."""
        known = np.isfinite(values)
        filled = self.lengths > 0
        starts = self.rollouts.responses.offsets[:-1][filled]  # reduceat would read an empty row's neighbour
        totals, counts = np.zeros(len(filled)), np.zeros(len(filled))
        if len(starts):
            whole = bool(known.all())
            totals[filled] = np.add.reduceat(values if whole else np.where(known, values, 0), starts, dtype=np.float64)
            counts[filled] = self.lengths[filled] if whole else np.add.reduceat(known, starts, dtype=np.int64)
        return totals / np.where(counts, counts, np.nan)

    def per_prompt(self, values: np.ndarray) -> np.ndarray:
        """Mean of a column over those of each prompt's completions that have a value, (P,) float64."""
        there = ~np.isnan(values)
        totals = np.bincount(self.rollouts.group, np.where(there, values, 0), len(self.rollouts))
        counts = np.bincount(self.rollouts.group, there, len(self.rollouts))
        return totals / np.where(counts, counts, np.nan)

    def sorts(self) -> list[str]:
        """Names of the orders these rollouts can be shown in."""
        lacking = set() if self.rollouts.rewards is not None else {"reward ↓", "reward ↑", "spread ↓"}
        lacking |= set() if self.mismatch is not None else {"mismatch ↓"}
        return [name for name in SORTS if name not in lacking]

    def filters(self) -> dict[str, str]:
        """Label -> name of the filters these rollouts can be shown through, each with how many completions it keeps."""
        found = {}
        for name, keeps in FILTERS.items():
            kept = keeps(self)
            if kept is not None:
                note = f" (> {number(self.threshold)})" if name == "right" else ""
                found[f"{name}{note} · {int(kept.sum())}"] = name
        return found

    def order(self, sort: str = "prompt", filter: str = "all", search: str = "") -> Order:
        """What to show.

        Args:
            sort: of `sorts()`.
            filter: name, of `filters()`.
            search: a text that the completion or its prompt must hold, whatever the case.

        Raises:
            DataError: an unknown name, or one these rollouts cannot be shown by.
        """
        if sort not in self.sorts():
            raise DataError(f"no order {sort!r}{nearest(sort, self.sorts())}; there are {', '.join(self.sorts())}")
        keeps = FILTERS[filter](self) if filter in FILTERS else None
        if keeps is None:
            known = list(self.filters().values())
            raise DataError(f"no filter {filter!r}{nearest(filter, known)}; there are {', '.join(known)}")
        if search.strip():
            keeps = keeps & self._found(search.strip())
        by_prompt, by_sample = SORTS[sort](self)
        kept = np.flatnonzero(keeps)
        rank = np.empty(len(self.rollouts), np.int64)
        in_order = np.argsort(np.nan_to_num(by_prompt, nan=np.inf), kind="stable")
        rank[in_order] = np.arange(len(in_order))
        group = self.rollouts.group[kept]
        samples = kept[np.lexsort((kept, np.nan_to_num(by_sample[kept], nan=np.inf), rank[group]))]
        counts = np.bincount(self.rollouts.group[samples], minlength=len(self.rollouts))
        everything = filter == "all" and not search.strip()
        groups = in_order if everything else in_order[counts[in_order] > 0]
        return Order(groups.astype(np.int32), counts[groups].astype(np.int32), samples.astype(np.int32))

    def _found(self, search: str) -> np.ndarray:
        needle = search.lower()
        prompts = np.array([needle in text.lower() for text in self._prompt_texts], bool)
        texts = np.array([needle in text.lower() for text in self.rollouts.texts], bool)
        return texts | prompts[self.rollouts.group]

    @cached_property
    def _prompt_texts(self) -> list[str]:
        return [p.text for p in self.rollouts.prompts]


def _zeros(s: Summary) -> np.ndarray:
    return np.zeros(s.rollouts.samples)


def _numbers(s: Summary) -> np.ndarray:
    return np.arange(len(s.rollouts), dtype=np.float64)


def _mismatch(s: Summary) -> tuple[np.ndarray, np.ndarray]:
    values = np.nan_to_num(np.zeros(0) if s.mismatch is None else s.mismatch)
    most = np.zeros(len(s.rollouts))
    np.maximum.at(most, s.rollouts.group, values)
    return -most, -values


# Keys to sort by, smallest first: per prompt (P,) and per completion (N,).
SORTS: dict[str, Callable[[Summary], tuple[np.ndarray, np.ndarray]]] = {
    "prompt": lambda s: (_numbers(s), _zeros(s)),
    "reward ↓": lambda s: (-s.mean, -s.rewards),
    "reward ↑": lambda s: (s.mean, s.rewards),
    "spread ↓": lambda s: (-s.spread, -s.rewards),
    "length ↓": lambda s: (-s.per_prompt(s.lengths), -s.lengths.astype(np.float64)),
    "length ↑": lambda s: (s.per_prompt(s.lengths), s.lengths.astype(np.float64)),
    "mismatch ↓": _mismatch,
}


def _scored(values: Callable[[Summary], np.ndarray]) -> Callable[[Summary], np.ndarray | None]:
    return lambda s: None if s.rollouts.rewards is None else values(s)


def _worst_mismatch(s: Summary) -> np.ndarray | None:
    if s.mismatch is None:
        return None
    values = np.nan_to_num(s.mismatch, nan=-1.0)
    kept = np.zeros(len(values), bool)
    kept[np.argsort(-values, kind="stable")[: max(1, round(len(values) * MISMATCH_SHARE))]] = True
    return kept & (values >= 0)


# Which completions stay, (N,) bool; None where the rollouts do not know.
FILTERS: dict[str, Callable[[Summary], np.ndarray | None]] = {
    "all": lambda s: np.ones(s.rollouts.samples, bool),
    "mixed groups": _scored(lambda s: s.mixed[s.rollouts.group]),
    "zero-variance groups": _scored(lambda s: ~s.mixed[s.rollouts.group]),
    "right": _scored(lambda s: s.right),
    "wrong": _scored(lambda s: ~s.right & ~s.failed),
    "scoring failed": lambda s: s.failed if s.failed.any() else None,
    "truncated": lambda s: s.rollouts.truncated,
    "aborted": lambda s: s.rollouts.aborted,
    "clipped tokens": lambda s: s.clipped,
    "largest mismatch": _worst_mismatch,
}
