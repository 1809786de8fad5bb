"""From one reward per response to one advantage per response, by comparing the responses to one prompt.

An advantage estimator is a callable `fn(rewards, group, **known)`: rewards (B,) and group (B,) first, and by name what
else its signature asks for: `mask`, `lengths` (B,) trained tokens, `truncated` (B,), `components` {name: (B,)}, `turns`
(B, T), `nodes` (B, T) of a tree, `token_rewards`, `values`, `logprobs`, `ref_logprobs`, `teacher_logprobs` (B, T),
`baseline_rewards` (B,). A group whose rewards are equal gets exactly 0, a group of one what `singleton` says: "zero",
or "raw", its own reward.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rlbench.errors import LossError
from rlbench.rl import checks
from rlbench.rl.checks import Checked, one_of, output_dtype, within
from rlbench.rl.groups import Groups, whiten

AdvantageFunction = Callable[..., Tensor]
"""(rewards (B,), group (B,) int, and by name what it asks for) -> advantages (B,) or (B, T)."""

SINGLETON = ("zero", "raw")


class GroupEstimator(Checked, ABC):
    """Base of the estimators that turn (B,) rewards into (B,) advantages; a subclass writes `compared`."""

    singleton: str = "zero"

    @abstractmethod
    def compared(self, values: Tensor, groups: Groups) -> Tensor:
        """Return the advantages (B,) of float64 rewards, before the two rules at the top of this file."""

    def __call__(self, rewards: Tensor, group: Tensor) -> Tensor:
        """Return one advantage per response, (B,)."""
        values, groups = start(rewards, group)
        return finish(self.compared(values, groups), rewards, groups, self.singleton)


@dataclass(frozen=True)
class group_normalized(GroupEstimator):
    """Reward relative to the other responses to the prompt, A = (R - mean) / (std + eps) (GRPO, arXiv 2402.03300).

    Attributes:
        std: the deviation of their "group" (GRPO), of the whole "batch" (arXiv 2508.08221), or "none" (Dr. GRPO, arXiv
            2503.20783).
        ddof: 1 for the unbiased deviation (verl, TRL, OpenRLHF), 0 for that of the population (torchtitan, ART).
        eps: added to the deviation. verl and SkyRL 1e-6, TRL 1e-4, AReaL 1e-5, OpenRLHF 1e-9.
        leave_one_out: subtract the mean of the *other* responses; the deviation stays the whole group's.
    """

    std: str = one_of("group", ("group", "batch", "none"))
    ddof: int = within(1, 0, 1, whole=True)
    eps: float = within(1e-6, 0.0)
    leave_one_out: bool = False
    singleton: str = one_of("zero", SINGLETON)

    def compared(self, values: Tensor, groups: Groups) -> Tensor:
        centred = values - groups.mean(values)
        if self.leave_one_out:
            centred = centred * _others_factor(groups)
        if self.std == "none":
            return centred
        if self.std == "group":
            return centred / (groups.deviation(values, self.ddof) + self.eps)
        squares = ((values - values.mean()) ** 2).sum() / max(len(values) - self.ddof, 1)
        return centred / (squares.sqrt() + self.eps)


@dataclass(frozen=True)
class rloo(GroupEstimator):
    """A = R - mean of the other responses to the prompt = (R - mean) n / (n - 1) (RLOO, arXiv 2402.14740)."""

    singleton: str = one_of("zero", SINGLETON)

    def compared(self, values: Tensor, groups: Groups) -> Tensor:
        return (values - groups.mean(values)) * _others_factor(groups)


@dataclass(frozen=True)
class opo(Checked):
    """A = R - sum(length R) / sum(length), the baseline of least variance (OPO, arXiv 2505.23585)."""

    singleton: str = one_of("zero", SINGLETON)

    def __call__(self, rewards: Tensor, group: Tensor, *, lengths: Tensor) -> Tensor:
        """Return (B,) advantages."""
        values, groups = start(rewards, group)
        tokens = lengths.double()
        checks.counts("lengths", tokens, tuple(values.shape))
        total = groups.total(tokens)
        weighted = groups.total(tokens * values) / total.clamp(min=1.0)
        baseline = torch.where(total > 0, weighted, groups.mean(values))
        return finish(values - baseline, rewards, groups, self.singleton)


@dataclass(frozen=True)
class maxrl(GroupEstimator):
    """A = (R - mean) / (mean + eps), R at least 0: hard prompts weigh more (MaxRL, arXiv 2602.02710)."""

    eps: float = within(1e-6, 0.0)

    def compared(self, values: Tensor, groups: Groups) -> Tensor:
        if (values < 0).any():
            raise LossError(f"maxrl divides by the mean: rewards holds {float(values.min()):g}; wanted at least 0.")
        mean = groups.mean(values)
        return (values - mean) / (mean + self.eps)


@dataclass(frozen=True)
class cpgd_advantage(GroupEstimator):
    """A = (R - mean) times a weight (CPGD, arXiv 2505.12504).

    weight "std": 1 / (population deviation of the group + eps). "clip_filter": min(B / B', most) with B prompts, of
    which B' have differing rewards, for the prompts that teach nothing; `most` is 3 unless given. "none": 1.
    """

    weight: str = one_of("std", ("std", "clip_filter", "none"))
    most: float | None = within(None, 1.0)
    eps: float = within(1e-6, 0.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.most is not None and self.weight != "clip_filter":
            raise LossError(f"cpgd_advantage: most={self.most!r} has no effect with weight={self.weight!r}.")

    def compared(self, values: Tensor, groups: Groups) -> Tensor:
        centred = values - groups.mean(values)
        if self.weight == "none":
            return centred
        if self.weight == "std":
            return centred * (1.0 / (groups.deviation(values, ddof=0) + self.eps))
        # each row holds 1/n of its group, so this counts groups; adding in row order leaves rounding
        learning = (groups.differ(values).double() / groups.size).sum().round().item()
        return centred * min(len(groups.count) / max(learning, 1.0), self.most or 3.0)


@dataclass(frozen=True)
class gpg_advantage(Checked):
    """A = alpha (R - mean), scaled up for the responses that teach nothing (GPG, arXiv 2504.02546).

    alpha "signal": responses / responses in groups whose rewards differ; "nonzero" (verl): / those with R other than 0.
    """

    alpha: str = one_of("signal", ("signal", "nonzero", "none"))
    singleton: str = one_of("zero", SINGLETON)

    def __call__(self, rewards: Tensor, group: Tensor) -> Tensor:
        """Return one advantage per response, (B,)."""
        values, groups = start(rewards, group)
        alpha = 1.0
        if self.alpha != "none":
            counted = groups.differ(values) if self.alpha == "signal" else values != 0
            alpha = len(values) / max(int(counted.sum()), 1)
        advantages = finish(values - groups.mean(values), values, groups, self.singleton)
        return (alpha * advantages).to(output_dtype(rewards))


@dataclass(frozen=True)
class reinforce_plus_plus_baseline(Checked):
    """A = R - mean, whitened over the batch's trained tokens (REINFORCE++-baseline, arXiv 2501.03262)."""

    whiten: bool = True
    singleton: str = one_of("zero", SINGLETON)

    def __call__(self, rewards: Tensor, group: Tensor, *, mask: Tensor) -> Tensor:
        """Return (B, T) advantages."""
        values, groups = start(rewards, group)
        advantages = finish(values - groups.mean(values), values, groups, self.singleton)
        return over_tokens(advantages, mask, self.whiten).to(output_dtype(rewards))


def start(rewards: Tensor, group: Tensor) -> tuple[Tensor, Groups]:
    """Check a batch; return its rewards in float64 and its groups."""
    checks.rewards(rewards, group)
    return rewards.double(), Groups.of(group)


def finish(advantages: Tensor, rewards: Tensor, groups: Groups, singleton: str) -> Tensor:
    """Return (B,) advantages with what the two rules at the top of this file say, in the dtype of the rewards."""
    values = rewards.double()
    advantages = torch.where(groups.differ(values), advantages, 0.0)
    if singleton == "raw":
        advantages = torch.where(groups.size == 1, values, advantages)
    return advantages.to(output_dtype(rewards))


def over_tokens(advantages: Tensor, mask: Tensor, whitened: bool) -> Tensor:
    """Give each trained token its response's advantage, (B, T); whiten once over them, or not at all."""
    checks.mask(mask, len(advantages))
    spread = torch.where(mask, advantages[:, None], 0.0)
    return whiten(spread, mask) if whitened else spread


def _others_factor(groups: Groups) -> Tensor:
    """Turn a distance from the group's mean into one from the mean of the others, (B,)."""
    return groups.size / (groups.size - 1).clamp(min=1)
