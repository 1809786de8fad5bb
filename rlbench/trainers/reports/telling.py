"""Which few of many samples tell a reader most."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Traits:
    """What the choice is made by, one entry per sample; NaN: not known.

    Attributes:
        group: of which prompt; int64.
        reward: the score, before shaping.
        advantage: mean over trained tokens.
        length: response tokens.
        truncated: cut at the length limit.
        entropy: mean over trained tokens.
    """

    group: np.ndarray
    reward: np.ndarray
    advantage: np.ndarray
    length: np.ndarray
    truncated: np.ndarray
    entropy: np.ndarray

    def __len__(self) -> int:
        return len(self.group)

    @classmethod
    def joined(cls, parts: list[Traits]) -> Traits:
        """The samples of all parts, in their order."""
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in cls.__dataclass_fields__))


def most_telling(traits: Traits, count: int) -> list[tuple[int, str]]:
    """At most `count` samples, the most telling first, each with what it was chosen for.

    In turn the highest and the lowest reward, the highest and the lowest advantage, the longest, a truncated one (the
    longest first) and the one of the highest entropy; then the next of each. While there are prompts nothing was chosen
    of, only their samples are; afterwards any. Among equals the sample of the lower group comes first, so the choice is
    the same however the samples lie on ranks.
    """
    queues = _queues(traits)
    reasons = list(queues)
    chosen: dict[int, str] = {}
    seen: set[int] = set()
    turn = in_vain = 0  # the criterion whose turn it is, and how many before it had nothing to offer
    while len(chosen) < min(count, len(traits)):
        reason = reasons[turn % len(reasons)]
        only_new_groups = in_vain < len(reasons)
        fitting = (i for i in queues[reason] if i not in chosen and not (only_new_groups and traits.group[i] in seen))
        if (found := next(fitting, None)) is None:
            in_vain += 1
        else:
            chosen[found] = reason
            seen.add(int(traits.group[found]))
            in_vain = 0 if only_new_groups else in_vain
        turn += 1
    return list(chosen.items())


def _queues(traits: Traits) -> Mapping[str, list[int]]:
    """The samples by each criterion, the foremost first, without those of which it is not known."""
    none = np.full(len(traits), np.nan)
    criteria = {
        "highest reward": -traits.reward,
        "lowest reward": traits.reward,
        "highest advantage": -traits.advantage,
        "lowest advantage": traits.advantage,
        "longest": -traits.length.astype(float),
        "truncated": np.where(traits.truncated, -traits.length.astype(float), none),
        "highest entropy": -traits.entropy,
    }
    queues = {}
    for reason, key in criteria.items():
        order = np.lexsort((traits.group, key))  # stable: samples of one group stay in their order
        queues[reason] = [int(i) for i in order if not np.isnan(key[i])]
    return queues
