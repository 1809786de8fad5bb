"""Policy gradients with a weight in place of PPO's clip: from plain REINFORCE to CISPO, SAPO, CPGD and DRO.

Each is called with `LossInputs`, tensors (S, T), and returns (S, T) and the metrics `ratio` and `ppo_kl`; those that
clip also `clip_fraction`. r = exp(logprobs - old_logprobs), the log-ratio clamped to ±20; sg: without gradient.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rlbench.errors import LossError
from rlbench.rl.policy import Metrics, PolicyLoss, log_ratio_of, ratio_metrics, ratio_of
from rlbench.rl.reward_checks import within
from rlbench.rl.types import LossInputs


@dataclass(frozen=True, kw_only=True, repr=False)
class reinforce(PolicyLoss):
    """Plain policy gradient, -A log p: no ratio, no clipping (Williams 1992).

    Pairs with `rb.rl.rloo`, `rb.rl.reinforce_plus_plus` or any other estimator. Right for one update per batch; off
    policy, `mismatch=` weights it by the ratio of old to sampler.
    """

    paper: ClassVar[str] = "Williams 1992"

    def surrogate(self, x: LossInputs) -> tuple[Tensor, Metrics]:
        return -x.advantages * x.logprobs, ratio_metrics(x, ratio_of(x))


@dataclass(frozen=True, kw_only=True, repr=False)
class gpg(reinforce):
    """REINFORCE as Group Policy Gradient uses it, averaged over all tokens: GPG (arXiv 2504.02546).

    -A log p; what is new in the paper is the advantage it pairs with, `rb.rl.gpg_advantage`: rewards minus
    the group's mean, scaled up for the groups that carry no signal.
    """

    paper: ClassVar[str] = "2504.02546"


@dataclass(frozen=True, kw_only=True, repr=False)
class importance_sampling(PolicyLoss):
    """Policy gradient corrected for the policy that sampled, unclipped: -A r, the gradient through r.

    Unbiased off policy (Precup, Sutton and Singh 2000), with a variance that grows with the distance. The ratio is
    against the sampler by default, as in Tinker's loss of that name, which sums over tokens ("token-sum"). Pairs
    with `rb.rl.group_normalized(std="none")` (Tinker's) or any other estimator.
    """

    paper: ClassVar[str] = "Precup 2000"

    anchor: str = "sampler"

    def surrogate(self, x: LossInputs) -> tuple[Tensor, Metrics]:
        ratio = ratio_of(x)
        return -x.advantages * ratio, ratio_metrics(x, ratio)


@dataclass(frozen=True, kw_only=True, repr=False)
class cispo(PolicyLoss):
    """Policy gradient weighted by a clipped ratio, so that no token loses its gradient: CISPO (arXiv 2506.13585).

    L = -sg(clip(r, 1 - clip_low, 1 + clip_high)) A log p. Pairs with `rb.rl.group_normalized`.

    The bounds disagree among the peers. The paper clips from above alone; ScaleRL (arXiv 2510.13786) takes min(r, c)
    with c of 4, 5 or 8; SkyRL's offsets 1.0/4.0 are [0, 5]; Tinker's [0, 4] is absolute; verl and slime take PPO's
    0.8..1.2. TRL's `epsilon_high` is the absolute upper bound and falls back to 0.2, which clips even a ratio of 1.
    Here the bounds are offsets from 1, so an on-policy ratio is never clipped.

    Attributes:
        clip_low: the weight is at least 1 - clip_low; in [0, 1]. 1.0: no lower bound, the paper's.
        clip_high: the weight is at most 1 + clip_high; 4.0 is ScaleRL's c = 5.
    """

    paper: ClassVar[str] = "2506.13585"

    clip_low: float = within(1.0, 0.0, 1.0)
    clip_high: float = within(4.0, 0.0)

    def surrogate(self, x: LossInputs) -> tuple[Tensor, Metrics]:
        ratio = ratio_of(x).detach()
        weight = ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        acts = x.advantages != 0
        return -weight * x.advantages * x.logprobs, ratio_metrics(x, ratio) | {
            "clip_fraction": (acts & (weight != ratio)).float(),
            "clip_fraction_low": (acts & (weight > ratio)).float(),
            "clip_fraction_high": (acts & (weight < ratio)).float(),
        }


@dataclass(frozen=True, kw_only=True, repr=False)
class sapo(PolicyLoss):
    """A smooth gate in place of the clip: SAPO (arXiv 2511.20347).

    L = -A (4 / tau) sigmoid(tau (r - 1)); tau = tau_pos where A > 0, else tau_neg. The gate's slope is 1 at r = 1
    and fades on both sides. Pairs with `rb.rl.group_normalized`.

    Attributes:
        tau_pos: temperature for positive advantages; > 0.
        tau_neg: for the others; larger fades sooner. 1.05 in the paper, verl, TRL and SkyRL.
    """

    paper: ClassVar[str] = "2511.20347"

    tau_pos: float = within(1.0, 0.0, above=True)
    tau_neg: float = within(1.05, 0.0, above=True)
    aggregation: str = "seq-mean-token-mean"

    def surrogate(self, x: LossInputs) -> tuple[Tensor, Metrics]:
        ratio = ratio_of(x)
        gate = torch.where(x.advantages > 0, _gate(ratio, self.tau_pos), _gate(ratio, self.tau_neg))
        return -x.advantages * gate, ratio_metrics(x, ratio)


@dataclass(frozen=True, kw_only=True, repr=False)
class cpgd(PolicyLoss):
    """Policy gradient whose log-ratio is clipped, with a penalty on drift: CPGD (arXiv 2505.12504).

    A > 0: L = -A min(log p, log p_old + log(1 + clip_high)); else L = -A max(log p, log p_old + log(1 - clip_low)).
    No ratio multiplies the gradient. Pairs with `rb.rl.cpgd_advantage`.

    Attributes:
        clip_low: in [0, 1).
        clip_high: at least 0.
        drift_coef: weight of the policy drift KL(old || new), estimated per token as r - 1 - log r; the authors'
            code has 0.01, switched on separately. The paper also bounds the ratio in the drift's gradient; that
            is not done here.
    """

    paper: ClassVar[str] = "2505.12504"

    clip_low: float = within(0.2, 0.0)
    clip_high: float = within(0.2, 0.0)
    drift_coef: float = within(0.0, 0.0)
    aggregation: str = "seq-mean-token-mean"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.clip_low >= 1:
            raise LossError(f"cpgd: clip_low={self.clip_low!r} must be < 1: the bound is log(1 - clip_low).")

    def surrogate(self, x: LossInputs) -> tuple[Tensor, Metrics]:
        highest = x.old_logprobs + math.log1p(self.clip_high)
        lowest = x.old_logprobs + math.log1p(-self.clip_low)
        too_high = (x.advantages > 0) & (x.logprobs > highest)
        too_low = (x.advantages < 0) & (x.logprobs < lowest)
        held = torch.where(too_high, highest, torch.where(too_low, lowest, x.logprobs))
        metrics = ratio_metrics(x, ratio_of(x)) | {
            "clip_fraction": (too_high | too_low).float(),
            "clip_fraction_low": too_low.float(),
            "clip_fraction_high": too_high.float(),
        }
        loss = -x.advantages * held
        if self.drift_coef != 0:
            drift = torch.expm1(log_ratio_of(x)) - log_ratio_of(x)
            loss = loss + self.drift_coef * drift
            metrics["drift"] = drift.detach()
        return loss, metrics


@dataclass(frozen=True, kw_only=True, repr=False)
class dro(PolicyLoss):
    """Policy gradient with a quadratic pull back to the old policy: DRO (arXiv 2405.19107, Kimi 2501.12599).

    L = -(A log p - beta / 2 (log p - log p_old)^2). The log-ratio is not clamped: the pull grows with the distance.
    Pairs with rewards minus a value, or minus the group's mean: `rb.rl.group_normalized(std="none")`.

    Attributes:
        beta: > 0, the strength of the pull. verl requires one; Tinker's example has 0.05, the default here.
    """

    paper: ClassVar[str] = "2405.19107"

    beta: float = within(0.05, 0.0, above=True)

    def surrogate(self, x: LossInputs) -> tuple[Tensor, Metrics]:
        distance = x.logprobs - x.old_logprobs
        loss = -x.advantages * x.logprobs + 0.5 * self.beta * distance**2
        return loss, ratio_metrics(x, ratio_of(x))


def _gate(ratio: Tensor, tau: float) -> Tensor:
    return torch.sigmoid(tau * (ratio - 1)) * (4 / tau)
