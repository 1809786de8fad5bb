"""From one reward per response to one advantage per response, by comparing the responses to one prompt.

An advantage estimator is a callable `fn(rewards, group, **known)`: rewards (B,) and group (B,) first, and by name
what else its signature asks for (`rlbench.rl.reward_checks.MEANING` lists the names). It returns (B,), one advantage
per response, or (B, T), one per token. Here are the estimators that subtract a baseline of the group; others are in
`group_advantages` (several rewards, steps, pass@k) and `returns` (per token).

Two rules hold for all of them. A group whose rewards are equal gets exactly 0. And a group of one, which has nothing
to be compared with, gets what the field `singleton` says: "zero", or "raw", its own reward (verl's choice for most).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rlbench.errors import LossError
from rlbench.rl.groups import Groups
from rlbench.rl.reward_checks import (
    Checked,
    check_mask,
    check_rewards,
    check_shape,
    needed,
    one_of,
    output_dtype,
    within,
)
from rlbench.rl.whitening import whiten

AdvantageFunction = Callable[..., Tensor]
"""(rewards (B,), group (B,) int, and by name what it asks for) -> advantages (B,) or (B, T).

`group` tells which responses answer the same prompt.
"""

SINGLETON = ("zero", "raw")


class GroupEstimator(Checked):
    """Base of the estimators that turn (B,) rewards into (B,) advantages; a subclass writes `compared`."""

    singleton: str = "zero"

    def compared(self, values: Tensor, groups: Groups) -> Tensor:
        """Return the advantages (B,) of float64 rewards, before the two rules at the top of this file."""
        raise NotImplementedError

    def __call__(self, rewards: Tensor, group: Tensor) -> Tensor:
        """Return one advantage per response, (B,)."""
        values, groups = start(rewards, group)
        return finish(self.compared(values, groups), rewards, groups, self.singleton)


@dataclass(frozen=True)
class group_normalized(GroupEstimator):
    """Reward relative to the other responses to the same prompt (GRPO, arXiv 2402.03300).

    A = (R - mean) / (std + eps). GRPO is the default; Dr. GRPO is `std="none"`.

    Attributes:
        std: what the centred rewards are divided by: the deviation of their "group" (GRPO), of the whole
            "batch" (arXiv 2508.08221), or "none" (Dr. GRPO, arXiv 2503.20783).
        ddof: 1 for the unbiased deviation (verl, TRL, OpenRLHF, SkyRL), 0 for that of the population (torchtitan, ART).
        eps: added to the deviation. verl and SkyRL 1e-6, TRL 1e-4, AReaL 1e-5, OpenRLHF 1e-9.
        leave_one_out: subtract the mean of the *other* responses (RLOO, arXiv 2402.14740) instead of that of
            the whole group; the deviation stays the whole group's.
        singleton: what a group of one gets, see the top of this file.
    """

    std: str = one_of("group", ("group", "batch", "none"))
    ddof: int = 1
    eps: float = within(1e-6, 0.0)
    leave_one_out: bool = False
    singleton: str = one_of("zero", SINGLETON)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ddof not in (0, 1):
            raise LossError(f"group_normalized: ddof={self.ddof!r} is neither 0 (population) nor 1 (unbiased).")

    def compared(self, values: Tensor, groups: Groups) -> Tensor:
        centred = values - groups.mean(values)
        if self.leave_one_out:
            centred = centred * _others_factor(groups)
        return centred / self._scale(values, groups)

    def _scale(self, values: Tensor, groups: Groups) -> Tensor | float:
        """Return the divisor of each response, (B,) float64."""
        if self.std == "none":
            return 1.0
        if self.std == "group":
            return groups.deviation(values, self.ddof) + self.eps
        squares = ((values - values.mean()) ** 2).sum() / max(len(values) - self.ddof, 1)
        return squares.sqrt() + self.eps


@dataclass(frozen=True)
class rloo(GroupEstimator):
    """Reward minus the mean of the other responses to the prompt (RLOO, arXiv 2402.14740).

    A = R - mean of the others = (R - mean) n / (n - 1): an unbiased baseline, no deviation. TRL's RLOO also subtracts
    the KL of the whole response from R first (`shaping.kl_in_reward(…).sum(1)`), and its loss is on sequences. A group
    of one: verl "raw" (vectorised "zero"), SkyRL and TRL "zero".
    """

    singleton: str = one_of("zero", SINGLETON)

    def compared(self, values: Tensor, groups: Groups) -> Tensor:
        return (values - groups.mean(values)) * _others_factor(groups)


@dataclass(frozen=True)
class opo(Checked):
    """Reward minus the group's mean reward weighted by length (OPO, arXiv 2505.23585).

    A = R - sum(length R) / sum(length), the baseline of least variance where the gradient grows with the length. A
    group without a trained token falls back to the plain mean. A group of one: verl "raw".
    """

    singleton: str = one_of("zero", SINGLETON)

    def __call__(self, rewards: Tensor, group: Tensor, *, lengths: Tensor | None = None) -> Tensor:
        """Return (B,) advantages."""
        values, groups = start(rewards, group)
        tokens = needed(self, "lengths", lengths).double()
        check_shape("lengths", tokens, tuple(values.shape))
        if not (tokens >= 0).all():
            raise LossError(f"lengths holds {float(tokens.min()):g}; wanted numbers of tokens, at least 0.")
        total = groups.total(tokens)[groups.index]
        weighted = groups.total(tokens * values)[groups.index] / total.clamp(min=1.0)
        baseline = torch.where(total > 0, weighted, groups.mean(values))
        return finish(values - baseline, rewards, groups, self.singleton)


@dataclass(frozen=True)
class maxrl(GroupEstimator):
    """Reward relative to the group's mean (MaxRL, arXiv 2602.02710): A = (R - mean) / (mean + eps), R at least 0.

    With rewards 0 and 1 the expected update is the gradient of the log of the pass rate, to the order of the group
    size, instead of the pass rate's: hard prompts weigh more. A group without a success gets 0. eps is SkyRL's.
    """

    eps: float = within(1e-6, 0.0)

    def compared(self, values: Tensor, groups: Groups) -> Tensor:
        if (values < 0).any():
            raise LossError(
                f"maxrl: rewards holds {float(values.min()):g}; wanted rewards of at least 0 (best 0 and 1), "
                "because it divides by their mean."
            )
        mean = groups.mean(values)
        return (values - mean) / (mean + self.eps)


@dataclass(frozen=True)
class cpgd_advantage(GroupEstimator):
    """Advantage of CPGD (arXiv 2505.12504): the centred reward times a weight.

    weight "std": 1 / (population deviation of the group + eps). "clip_filter": min(B / B', most) with B prompts, of
    which B' have differing rewards: it makes up for the prompts that teach nothing. "none": centred only. LightRFT
    takes mean and deviation over the micro-batch, so that its result depends on the split; here it is the group.

    Attributes:
        weight: one of the above ("STD_weight", "clip_filter_like_weight", "naive" in LightRFT).
        most: bound of the "clip_filter" weight, ≥ 1; None for 3. Acts there alone.
        eps: added to the deviation of "std".
    """

    weight: str = one_of("std", ("std", "clip_filter", "none"))
    most: float | None = within(None, 1.0)
    eps: float = within(1e-6, 0.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.most is not None and self.weight != "clip_filter":
            raise LossError(f'cpgd_advantage: most={self.most!r} acts with weight="clip_filter" alone.')

    def compared(self, values: Tensor, groups: Groups) -> Tensor:
        return (values - groups.mean(values)) * self._weight(values, groups)

    def _weight(self, values: Tensor, groups: Groups) -> Tensor | float:
        if self.weight == "none":
            return 1.0
        if self.weight == "std":
            return 1.0 / (groups.deviation(values, ddof=0) + self.eps)
        # each row holds 1/n of its group, so this counts groups; adding in row order leaves rounding
        learning = (groups.differ(values).double() / groups.size).sum().round().item()
        return min(len(groups.count) / max(learning, 1.0), 3.0 if self.most is None else self.most)


@dataclass(frozen=True)
class gpg_advantage(Checked):
    """Centred reward, scaled up for the responses that teach nothing (GPG, arXiv 2504.02546): A = alpha (R - mean).

    alpha "signal" is the paper's: responses / responses in groups whose rewards differ. "nonzero" is verl's: responses
    / responses with a reward other than 0, which counts solved prompts as teaching. "none": 1. A group of one gets what
    `singleton` says, times alpha; verl "raw".
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
    """Reward minus the group's mean, whitened over the batch's trained tokens (REINFORCE++-baseline, arXiv 2501.03262).

    OpenRLHF also takes -beta k1 off each token in between; for that, put the KL in the rewards first
    (`shaping.kl_in_reward(…).sum(1)`), as verl does. A group of one, before whitening: verl "raw".
    """

    whiten: bool = True
    singleton: str = one_of("zero", SINGLETON)

    def __call__(self, rewards: Tensor, group: Tensor, *, mask: Tensor | None = None) -> Tensor:
        """Return (B, T) advantages."""
        values, groups = start(rewards, group)
        advantages = finish(values - groups.mean(values), values, groups, self.singleton)
        return over_tokens(advantages, needed(self, "mask", mask), self.whiten).to(output_dtype(rewards))


# -- shared by the estimators of this file and of `group_advantages` ------------------------------------------


def start(rewards: Tensor, group: Tensor) -> tuple[Tensor, Groups]:
    """Check a batch; return its rewards in float64 and its groups."""
    check_rewards(rewards, group)
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
    check_mask(mask, len(advantages))
    spread = torch.where(mask, advantages[:, None], 0.0)
    return whiten(spread, mask) if whitened else spread


def _others_factor(groups: Groups) -> Tensor:
    """Turn a distance from the group's mean into one from the mean of the others, (B,)."""
    return groups.size / (groups.size - 1).clamp(min=1)
