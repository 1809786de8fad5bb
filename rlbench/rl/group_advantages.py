"""Advantages within a group beyond one mean: several rewards, rewards of steps, the best of k.

The rules at the top of `rlbench.rl.advantages` hold here too: equal rewards give exactly 0; a group of one gives 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rlbench.errors import LossError, nearest
from rlbench.rl.advantages import GroupEstimator, group_normalized, over_tokens, start
from rlbench.rl.groups import EQUAL_TOLERANCE, Groups
from rlbench.rl.recurrence import carried_back, last_of_turn
from rlbench.rl.reward_checks import (
    MEANING,
    Checked,
    check_finite,
    check_mask,
    check_shape,
    needed,
    needed_tokens,
    one_of,
    output_dtype,
    within,
)
from rlbench.rl.whitening import whiten


@dataclass(frozen=True)
class gdpo(Checked):
    """Several rewards, each normalised within its group before they are added (GDPO, arXiv 2601.05242).

    A = whiten(sum_k w_k (R_k - mean_k) / (std_k + eps)): a reward with large numbers does not drown the others,
    and two different mixtures with the same sum stay different.

    Attributes:
        weights: {name: weight} of the components, every one of them; None weighs all by 1.
        whiten: "batch" whitens once over the trained tokens of the batch (verl), "sequences" once over the
            responses (the paper, and TRL's `normalize_then_sum`, with eps 1e-4 on the deviation there), "none" not.
        ddof: 1 for the unbiased deviation, 0 for that of the population.
        eps: added to each deviation.
    """

    weights: Mapping[str, float] | None = field(default=None, hash=False)
    whiten: str = one_of("batch", ("batch", "sequences", "none"))
    ddof: int = 1
    eps: float = 1e-6

    def __post_init__(self) -> None:
        super().__post_init__()
        group_normalized(ddof=self.ddof, eps=self.eps)  # refuses what is out of range
        if self.weights is not None and not self.weights:
            raise LossError("gdpo: weights={} weighs nothing. Give {name: weight}, or None for all alike.")

    def __call__(
        self,
        rewards: Tensor,
        group: Tensor,
        *,
        components: Mapping[str, Tensor] | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """Return advantages: (B, T), 0 outside the mask, with whiten="batch"; else (B,)."""
        start(rewards, group)
        summed = torch.zeros_like(rewards, dtype=torch.float64)
        normalized = group_normalized(ddof=self.ddof, eps=self.eps)
        for weight, name, component in self._weighted(components):
            check_shape(f"components[{name!r}]", component, tuple(rewards.shape))
            check_finite(f"components[{name!r}]", component)
            summed = summed + weight * normalized(component.double(), group)
        if self.whiten == "batch":
            summed = over_tokens(summed, needed(self, "mask", mask), whitened=True)
        elif self.whiten == "sequences":
            summed = whiten(summed)
        return summed.to(output_dtype(rewards))

    def _weighted(self, components: Mapping[str, Tensor] | None) -> list[tuple[float, str, Tensor]]:
        if not components:
            raise LossError(f"gdpo needs components: pass components={MEANING['components']}.")
        weights = self.weights if self.weights is not None else dict.fromkeys(components, 1.0)
        for name in sorted(set(weights) ^ set(components)):
            where = "has no reward in components" if name in weights else "has no weight"
            other = components if name in weights else weights
            raise LossError(
                f"gdpo: component {name!r} {where}{nearest(name, other)}; weights name {sorted(weights)}, "
                f"components {sorted(components)}."
            )
        return [(weights[name], name, components[name]) for name in sorted(components)]


@dataclass(frozen=True)
class process_normalized(Checked):
    """GRPO with process supervision (arXiv 2402.03300, section 4.1.3): rewards of steps instead of one in the end.

    Every step's reward is normalised over all steps of all responses to the prompt, and a token's advantage is the sum
    of the normalised rewards of the steps that end at it or after it. A step's reward is the sum of `token_rewards`
    over its trained tokens; a step without a trained token does not exist. Fields as in `group_normalized`.
    """

    std: str = one_of("group", ("group", "none"))
    ddof: int = 1
    eps: float = 1e-6

    def __post_init__(self) -> None:
        super().__post_init__()
        group_normalized(ddof=self.ddof, eps=self.eps)

    def __call__(
        self,
        rewards: Tensor,
        group: Tensor,
        *,
        mask: Tensor | None = None,
        token_rewards: Tensor | None = None,
        turns: Tensor | None = None,
    ) -> Tensor:
        """Return (B, T) advantages, 0 outside the mask."""
        start(rewards, group)
        kept = needed(self, "mask", mask)
        check_mask(kept, len(rewards))
        given = needed_tokens(self, "token_rewards", token_rewards, kept)
        step, ends = last_of_turn(needed(self, "turns", turns), kept)
        row = kept.nonzero()[:, 0]
        per_step = torch.zeros(len(ends), dtype=torch.float64, device=given.device)
        per_step = per_step.index_add(0, step, given[kept])
        prompt = torch.empty(len(ends), dtype=torch.int64, device=given.device)
        prompt[step] = group.to(torch.int64)[row]
        placed = torch.zeros_like(given)
        if len(ends):
            normalized = group_normalized(std=self.std, ddof=self.ddof, eps=self.eps)
            placed[ends[:, 0], ends[:, 1]] = normalized(per_step, prompt)
        return torch.where(kept, carried_back(placed, 1.0, kept), 0.0).to(output_dtype(rewards))


@dataclass(frozen=True)
class pass_at_k(GroupEstimator):
    """How much a response adds to the best of k (arXiv 2503.19595, 2505.15201).

    A_i = mean over the k-subsets I of the group that hold i of  max_I R - max_{I without i} R, which is
    sum over responses j worse than i of (R_i - R_j) C(rank_j - 1, k - 2) / C(n - 1, k - 1), ranks from the worst, 1.
    It is never negative. Up to the factor k, its policy gradient is the unbiased leave-one-out gradient of
    max@k (pass@k for rewards 0 and 1). With k = n only the best response gets anything, its lead over the second:
    verl's `grpo_passk`.

    Attributes:
        k: size of the subsets, ≥ 2; None takes the whole group. A group with fewer responses gets 0.
        std: "group" divides by the unbiased deviation of the group's rewards (verl), "none" does not (the papers).
        eps: added to the deviation.
    """

    k: int | None = None
    std: str = one_of("group", ("group", "none"))
    eps: float = within(1e-6, 0.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_k("pass_at_k", self.k)

    def compared(self, values: Tensor, groups: Groups) -> Tensor:
        advantages = torch.zeros_like(values)
        for rows in _groups_of(groups, self.k, "pass_at_k"):
            k = len(rows) if self.k is None else self.k
            advantages[rows] = _marginal(values[rows], k)
        if self.std == "group":
            advantages = advantages / (groups.deviation(values) + self.eps)
        return advantages


@dataclass(frozen=True)
class pass_at_k_normalized(GroupEstimator):
    """GRPO where the k-subsets of the group are the samples and their best is the reward (arXiv 2508.10751).

    A_i = (mean of max_I R over the k-subsets I that hold i - mean over all k-subsets) / (their population deviation
    + eps): Pass@k Training in its analytical form, here also for rewards other than 0 and 1. With k = 1 it is GRPO
    with the population's deviation.

    Attributes:
        k: size of the subsets, ≥ 1. A group with fewer responses gets 0, and so does one whose k-subsets are all
            equally good, as with exactly k responses.
        eps: added to the deviation.
    """

    k: int = 4
    eps: float = within(1e-6, 0.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_k("pass_at_k_normalized", self.k, least=1)

    def compared(self, values: Tensor, groups: Groups) -> Tensor:
        advantages = torch.zeros_like(values)
        for rows in _groups_of(groups, self.k, "pass_at_k_normalized"):
            own, mean, deviation = _subset_maxima(values[rows], self.k)
            if deviation > EQUAL_TOLERANCE * values[rows].abs().max():
                advantages[rows] = (own - mean) / (deviation + self.eps)
        return advantages


def _check_k(owner: str, k: int | None, least: int = 2) -> None:
    if k is not None and (not isinstance(k, int) or k < least):
        raise LossError(f"{owner}: k={k!r} must be a whole number of at least {least}.")


def _groups_of(groups: Groups, k: int | None, owner: str) -> list[Tensor]:
    """Return the rows of each group of at least k (or 2) responses."""
    order = torch.argsort(groups.index, stable=True)
    rows = torch.split(order, [int(n) for n in groups.count.tolist()])
    if k is not None and all(len(own) < k for own in rows):
        raise LossError(
            f"{owner}: k={k} but the largest group has {max(len(own) for own in rows)} responses; "
            "sample more of each prompt or lower k."
        )
    return [own for own in rows if len(own) >= (2 if k is None else k)]


def _marginal(values: Tensor, k: int) -> Tensor:
    """Return what each of (n,) values adds to the best of the k-subsets that hold it."""
    n = len(values)
    ascending, order = values.sort(stable=True)
    worse = _weights([math.comb(j, k - 2) / math.comb(n - 1, k - 1) for j in range(n)], values)
    lead = torch.tril(ascending[:, None] - ascending[None, :], diagonal=-1)
    return torch.empty_like(values).index_copy(0, order, lead @ worse)


def _subset_maxima(values: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the mean best of the k-subsets that hold each of (n,) values; over all k-subsets mean and deviation."""
    n = len(values)
    ascending, order = values.sort(stable=True)
    # the chance that the j-th worst is the best of a k-subset; that i is, given i in it; that a better j is
    best = _weights([math.comb(j, k - 1) / math.comb(n, k) for j in range(n)], values)
    itself = _weights([math.comb(j, k - 1) / math.comb(n - 1, k - 1) for j in range(n)], values)
    better = _weights(
        [math.comb(j - 1, k - 2) / math.comb(n - 1, k - 1) if j and k > 1 else 0.0 for j in range(n)], values
    )
    above = (better * ascending).flip(0).cumsum(0).flip(0) - better * ascending
    own = torch.empty_like(values).index_copy(0, order, itself * ascending + above)
    mean = (best * ascending).sum()
    deviation = (best * (ascending - mean) ** 2).sum().sqrt()
    return own, mean, deviation


def _weights(numbers: list[float], like: Tensor) -> Tensor:
    return torch.tensor(numbers, dtype=like.dtype, device=like.device)
