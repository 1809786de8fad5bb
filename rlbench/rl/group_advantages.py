"""Advantages within a group beyond one mean: several rewards, rewards of steps, the best of k, a baseline per token."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rlbench.errors import LossError
from rlbench.rl import checks
from rlbench.rl.advantages import SINGLETON, GroupEstimator, finish, group_normalized, over_tokens, start
from rlbench.rl.checks import Checked, clean_tokens, one_of, output_dtype, within
from rlbench.rl.groups import EQUAL_TOLERANCE, Groups, whiten
from rlbench.rl.placing import carried_back, last_of_turn


@dataclass(frozen=True)
class gdpo(Checked):
    """Several rewards, each normalised in its group: A = whiten(sum_k w_k (R_k - mean_k) / (std_k + eps)).

    GDPO (arXiv 2601.05242). `weights` are {name: weight} of all components, None for 1; `whiten` "batch" is once over
    the trained tokens (verl), "sequences" once over the responses (the paper, and TRL's `normalize_then_sum`).
    """

    weights: Mapping[str, float] | None = field(default=None, hash=False)
    whiten: str = one_of("batch", ("batch", "sequences", "none"))
    ddof: int = within(1, 0, 1, whole=True)
    eps: float = within(1e-6, 0.0)

    def __call__(
        self, rewards: Tensor, group: Tensor, *, components: Mapping[str, Tensor], mask: Tensor | None = None
    ) -> Tensor:
        """Return advantages: (B, T), 0 outside the mask, with whiten="batch"; else (B,)."""
        start(rewards, group)
        weights = dict.fromkeys(components, 1.0) if self.weights is None else self.weights
        if not components or set(weights) != set(components):
            raise LossError(f"gdpo: components {sorted(components)} and weights {sorted(weights)} differ in names.")
        summed = torch.zeros_like(rewards, dtype=torch.float64)
        normalized = group_normalized(ddof=self.ddof, eps=self.eps)
        for name in sorted(components):
            checks.shape(f"components[{name!r}]", components[name], tuple(rewards.shape))
            checks.finite(f"components[{name!r}]", components[name])
            summed = summed + weights[name] * normalized(components[name].double(), group)
        if self.whiten == "batch":
            if mask is None:
                raise LossError('gdpo: whiten="batch" is over the trained tokens: pass mask=, a bool tensor (B, T).')
            summed = over_tokens(summed, mask, whitened=True)
        elif self.whiten == "sequences":
            summed = whiten(summed)
        return summed.to(output_dtype(rewards))


@dataclass(frozen=True)
class process_normalized(Checked):
    """GRPO with process supervision (arXiv 2402.03300, section 4.1.3): rewards of steps instead of one in the end.

    Every step's reward is normalised over all steps of all responses to the prompt; a token gets the sum of those of
    the steps that end at it or after it. A step's reward is the sum of `token_rewards` over its trained tokens.
    """

    std: str = one_of("group", ("group", "none"))
    ddof: int = within(1, 0, 1, whole=True)
    eps: float = within(1e-6, 0.0)

    def __call__(self, rewards: Tensor, group: Tensor, *, mask: Tensor, token_rewards: Tensor, turns: Tensor) -> Tensor:
        """Return (B, T) advantages, 0 outside the mask."""
        start(rewards, group)
        checks.mask(mask, len(rewards))
        earned = clean_tokens("token_rewards", token_rewards, mask)
        step, ends = last_of_turn(turns, mask)
        row = mask.nonzero()[:, 0]
        per_step = torch.zeros(len(ends), dtype=torch.float64, device=earned.device)
        per_step = per_step.index_add(0, step, earned[mask])
        prompt = torch.empty(len(ends), dtype=torch.int64, device=earned.device)
        prompt[step] = group.to(torch.int64)[row]
        at_ends = torch.zeros_like(earned)
        if len(ends):
            normalized = group_normalized(std=self.std, ddof=self.ddof, eps=self.eps)
            at_ends[ends[:, 0], ends[:, 1]] = normalized(per_step, prompt)
        return torch.where(mask, carried_back(at_ends, 1.0, mask), 0.0).to(output_dtype(rewards))


@dataclass(frozen=True)
class branch_values(Checked):
    """What each stretch between two forks changed in the expected reward: A = V(behind it) - V(before it).

    V of a place is the mean, over the responses sampled there or through it, of V at the next place that a response
    passes, or of its reward where it passes none: values by continuation (VinePPO, arXiv 2410.01679) in a tree (SPO,
    arXiv 2505.23564). `rollouts.fork` makes places; without one A = R - mean.
    """

    def __call__(self, rewards: Tensor, group: Tensor, *, nodes: Tensor, mask: Tensor) -> Tensor:
        """Return (B, T) advantages, 0 outside the mask. `nodes` (B, T) int64: number of the last place before a token,
        from 1 and deeper ones higher; 0 for tokens that belong to another response."""
        values, groups = start(rewards, group)
        checks.mask(mask, len(values))
        checks.shape("nodes", nodes, tuple(mask.shape))
        passed = [[int(place) for place in row.unique() if place] for row in nodes]
        behind: list[dict[int, float]] = [{} for _ in passed]  # by row and place: the value of what follows there
        at: dict[int, float] = {}
        for place in sorted({place for row in passed for place in row}, reverse=True):
            rows = [i for i, row in enumerate(passed) if place in row]
            for i in rows:
                deeper = [other for other in passed[i] if other > place]
                behind[i][place] = at[deeper[0]] if deeper else float(values[i])
            at[place] = sum(behind[i][place] for i in rows) / len(rows)
        advantages = torch.zeros(mask.shape, dtype=torch.float64, device=mask.device)
        for i, row in enumerate(behind):
            for place, value in row.items():
                advantages[i][nodes[i] == place] = value - at[place]
        learning = mask & (nodes > 0) & groups.differ(values)[:, None]
        return torch.where(learning, advantages, 0.0).to(output_dtype(rewards))


@dataclass(frozen=True)
class pass_at_k(GroupEstimator):
    """How much a response adds to the best of k (arXiv 2503.19595, 2505.15201).

    A_i = mean over the k-subsets I of the group that hold i of  max_I R - max_{I without i} R, which is
    sum over responses j worse than i of (R_i - R_j) C(rank_j - 1, k - 2) / C(n - 1, k - 1), ranks from the worst, 1.
    k ≥ 2, None the whole group (verl's `grpo_passk`: only the best gets anything); a group with fewer responses gets 0.
    std "group" divides by the group's unbiased deviation (verl), "none" does not (the papers).
    """

    k: int | None = within(None, 2, whole=True)
    std: str = one_of("group", ("group", "none"))
    eps: float = within(1e-6, 0.0)

    def compared(self, values: Tensor, groups: Groups) -> Tensor:
        advantages = torch.zeros_like(values)
        for rows in _rows_by_group(groups, self.k):
            advantages[rows] = _marginal(values[rows], len(rows) if self.k is None else self.k)
        return advantages if self.std == "none" else advantages / (groups.deviation(values) + self.eps)


@dataclass(frozen=True)
class pass_at_k_normalized(GroupEstimator):
    """GRPO where the k-subsets of the group are the samples and their best is the reward (arXiv 2508.10751).

    A_i = (mean of max_I R over the k-subsets I that hold i - mean over all) / (their population deviation + eps).
    """

    k: int = within(4, 1, whole=True)
    eps: float = within(1e-6, 0.0)

    def compared(self, values: Tensor, groups: Groups) -> Tensor:
        advantages = torch.zeros_like(values)
        for rows in _rows_by_group(groups, self.k):
            own, mean, deviation = _subset_maxima(values[rows], self.k)
            if deviation > EQUAL_TOLERANCE * values[rows].abs().max():
                advantages[rows] = (own - mean) / (deviation + self.eps)
        return advantages


def _rows_by_group(groups: Groups, k: int | None) -> list[Tensor]:
    """Return the rows of each group of at least k (or 2) responses; refuse a batch without one for k."""
    order = torch.argsort(groups.index, stable=True)
    rows = torch.split(order, [int(n) for n in groups.count.tolist()])
    largest = max(map(len, rows))
    if k is not None and largest < k:
        raise LossError(f"k={k} but the largest group has {largest} responses; sample more of each prompt or lower k.")
    return [own for own in rows if len(own) >= (2 if k is None else k)]


def _marginal(values: Tensor, k: int) -> Tensor:
    """Return what each of (n,) values adds to the best of the k-subsets that hold it."""
    n = len(values)
    ascending, order = values.sort(stable=True)
    worse = values.new_tensor([math.comb(j, k - 2) / math.comb(n - 1, k - 1) for j in range(n)])
    lead = torch.tril(ascending[:, None] - ascending[None, :], diagonal=-1)
    return torch.empty_like(values).index_copy(0, order, lead @ worse)


def _subset_maxima(values: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the mean best of the k-subsets that hold each of (n,) values; over all k-subsets mean and deviation."""
    n = len(values)
    ascending, order = values.sort(stable=True)
    # the chance that the j-th worst is the best of a k-subset; that i is, given i in it; that a better j is
    best = values.new_tensor([math.comb(j, k - 1) / math.comb(n, k) for j in range(n)])
    itself = values.new_tensor([math.comb(j, k - 1) / math.comb(n - 1, k - 1) for j in range(n)])
    better = [math.comb(j - 1, k - 2) / math.comb(n - 1, k - 1) if j and k > 1 else 0.0 for j in range(n)]
    weighted = values.new_tensor(better) * ascending
    above = weighted.flip(0).cumsum(0).flip(0) - weighted
    own = torch.empty_like(values).index_copy(0, order, itself * ascending + above)
    mean = (best * ascending).sum()
    deviation = (best * (ascending - mean) ** 2).sum().sqrt()
    return own, mean, deviation


def optimal_token_baseline(
    token_rewards: Tensor,
    group: Tensor,
    mask: Tensor,
    logprobs: Tensor,
    sum_p_squared: Tensor,
    weights: Tensor | None = None,
    singleton: str = "zero",
) -> Tensor:
    """Return rewards to go minus the baseline of least gradient variance at each token (OTB, arXiv 2602.07078), (B, T).

        w_t = (1 - 2 p_t + sum_v p_v²) weight_t²    W_t = w_1 + … + w_t    B_t = sum_i G_it W_it / sum_i W_it

    Sums over i run over the responses to one prompt, t counts trained tokens alone (verl's "tir" variant).
    `sum_p_squared` is in (0, 1], `weights` the truncated importance weights that the loss will apply, None for 1.
    """
    checks.mask(mask)
    checks.choice("optimal_token_baseline", "singleton", singleton, SINGLETON)
    checks.shape("group", group, (len(mask),))
    reward = clean_tokens("token_rewards", token_rewards, mask)
    p = clean_tokens("logprobs", logprobs, mask).exp()
    collision = clean_tokens("sum_p_squared", sum_p_squared, mask)
    if not ((collision[mask] > 0) & (collision[mask] <= 1 + 1e-6)).all():
        raise LossError("sum_p_squared must lie in (0, 1] at trained tokens: it is a sum of squared probabilities.")
    energy = 1.0 - 2.0 * p + collision
    if weights is not None:
        energy = energy * clean_tokens("weights", weights, mask) ** 2
    energy = torch.where(mask, energy, 0.0).cumsum(1)
    to_go = carried_back(reward, 1.0, mask)

    column = mask.cumsum(1) - 1
    place = Groups.of(group).index[:, None] * mask.shape[1] + column
    same_place, values, energies = Groups.of(place[mask]), to_go[mask], energy[mask]
    total = same_place.total(energies)
    baseline = torch.where(total > 0, same_place.total(energies * values) / total, same_place.mean(values))
    advantages = torch.zeros_like(to_go)
    if len(values):
        advantages[mask] = finish(values - baseline, values, same_place, singleton)
    return advantages.to(output_dtype(token_rewards))
