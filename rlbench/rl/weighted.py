"""Policy gradients with a weight in place of PPO's clip: from plain REINFORCE to CISPO, SAPO, CPGD, DRO and DPPO.

r = exp(logprobs - old_logprobs), the log-ratio clamped to ±20; sg: without gradient.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rlbench.errors import LossError
from rlbench.rl.checks import within
from rlbench.rl.policy import Metrics, PolicyLoss, clip_metrics, log_ratio_of, ratio_metrics, ratio_of
from rlbench.rl.types import LossInputs

SMALL = 1e-8
"""Added inside the logarithm of DPPO's Bernoulli KL, as verl does, so that a probability of 1 stays finite."""


@dataclass(frozen=True, kw_only=True, repr=False)
class reinforce(PolicyLoss):
    """Plain policy gradient, -A log p: no ratio, no clipping (Williams 1992); for one update per batch."""

    paper: ClassVar[str] = "Williams 1992"

    def surrogate(self, x: LossInputs) -> tuple[Tensor, Metrics]:
        return -x.advantages * x.logprobs, ratio_metrics(x, ratio_of(x))


@dataclass(frozen=True, kw_only=True, repr=False)
class sft(PolicyLoss):
    """-log p, cross-entropy on texts: supervised fine-tuning, of `rb.data.demonstrations` (InstructGPT, 2203.02155).

    Every trained token weighs the same, whatever the advantages say; `reinforce` weighs them by these.
    """

    paper: ClassVar[str] = "2203.02155"

    def surrogate(self, x: LossInputs) -> tuple[Tensor, Metrics]:
        return -x.logprobs, ratio_metrics(x, ratio_of(x))


@dataclass(frozen=True, kw_only=True, repr=False)
class gpg(reinforce):
    """-A log p averaged over all tokens: GPG (arXiv 2504.02546), which pairs with `rb.rl.gpg_advantage`."""

    paper: ClassVar[str] = "2504.02546"


@dataclass(frozen=True, kw_only=True, repr=False)
class importance_sampling(PolicyLoss):
    """Policy gradient corrected for the policy that sampled, unclipped: -A r (Precup, Sutton and Singh 2000).

    The ratio is against the sampler by default, as in Tinker's loss of that name, which sums over tokens ("token-sum").
    """

    paper: ClassVar[str] = "Precup 2000"
    anchor: str = "sampler"

    def surrogate(self, x: LossInputs) -> tuple[Tensor, Metrics]:
        ratio = ratio_of(x)
        return -x.advantages * ratio, ratio_metrics(x, ratio)


@dataclass(frozen=True, kw_only=True, repr=False)
class cispo(PolicyLoss):
    """Policy gradient weighted by a clipped ratio, so that no token loses its gradient: CISPO (arXiv 2506.13585).

    L = -sg(clip(r, 1 - clip_low, 1 + clip_high)) A log p, by default from above alone at ScaleRL's c = 5 (arXiv
    2510.13786). The bounds are offsets from 1; Tinker's [0, 4] and TRL's `epsilon_high` are absolute.
    """

    paper: ClassVar[str] = "2506.13585"
    clip_low: float = within(1.0, 0.0, 1.0)
    clip_high: float = within(4.0, 0.0)

    def surrogate(self, x: LossInputs) -> tuple[Tensor, Metrics]:
        ratio = ratio_of(x).detach()
        weight = ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        acts = x.advantages != 0
        clipped = clip_metrics(acts & (weight > ratio), acts & (weight < ratio))
        return -weight * x.advantages * x.logprobs, ratio_metrics(x, ratio) | clipped


@dataclass(frozen=True, kw_only=True, repr=False)
class sapo(PolicyLoss):
    """A smooth gate in place of the clip: SAPO (arXiv 2511.20347).

    L = -A (4 / tau) sigmoid(tau (r - 1)); tau = tau_pos where A > 0, else tau_neg (larger fades sooner). The gate's
    slope is 1 at r = 1 and fades on both sides.
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
    `drift_coef` weighs the drift KL(old || new), per token r - 1 - log r. Pairs with `rb.rl.cpgd_advantage`.
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
        loss = -x.advantages * torch.where(too_high, highest, torch.where(too_low, lowest, x.logprobs))
        metrics = ratio_metrics(x, ratio_of(x)) | clip_metrics(too_low, too_high)
        if self.drift_coef != 0:
            drift = torch.expm1(log_ratio_of(x)) - log_ratio_of(x)
            loss = loss + self.drift_coef * drift
            metrics["drift"] = drift.detach()
        return loss, metrics


@dataclass(frozen=True, kw_only=True, repr=False)
class dro(PolicyLoss):
    """Policy gradient with a quadratic pull back to the old policy: DRO (arXiv 2405.19107, Kimi 2501.12599).

    L = -(A log p - beta / 2 (log p - log p_old)^2), the log-ratio not clamped.
    """

    paper: ClassVar[str] = "2405.19107"
    beta: float = within(0.05, 0.0, above=True)

    def surrogate(self, x: LossInputs) -> tuple[Tensor, Metrics]:
        distance = x.logprobs - x.old_logprobs
        loss = -x.advantages * x.logprobs + 0.5 * self.beta * distance**2
        return loss, ratio_metrics(x, ratio_of(x))


@dataclass(frozen=True, kw_only=True, repr=False)
class dppo_tv(PolicyLoss):
    """Trust region in probabilities instead of ratios, |p - p_old|: DPPO-Binary-TV (arXiv 2602.04879).

    L = -A sg(min(r, cap)) log p, 0 for tokens that have moved too far and would move further: A > 0 with p - p_old >
    delta_high, A < 0 with p - p_old < -delta_low. Anchored at the sampler, as the paper asks; verl takes the
    trainer's old log-probs: anchor="old". The paper's large runs have 0.2 and a cap of 5. `cap_fraction`: ratios
    capped.
    """

    paper: ClassVar[str] = "2602.04879"
    delta_low: float = within(0.15, 0.0, 1.0)
    delta_high: float = within(0.15, 0.0, 1.0)
    cap: float = within(20.0, 0.0, above=True)
    anchor: str = "sampler"

    def moved(self, new: Tensor, old: Tensor) -> tuple[Tensor, Tensor]:
        """Return which tokens' log-probs, both without gradient, have moved too far down, and too far up."""
        change = new.exp() - old.exp()
        return change < -self.delta_low, change > self.delta_high

    def surrogate(self, x: LossInputs) -> tuple[Tensor, Metrics]:
        too_low, too_high = self.moved(x.logprobs.detach(), x.old_logprobs)
        too_low, too_high = too_low & (x.advantages < 0), too_high & (x.advantages > 0)
        ratio = ratio_of(x).detach()
        loss = torch.where(too_low | too_high, 0.0, -x.advantages * ratio.clamp(max=self.cap) * x.logprobs)
        capped = {"cap_fraction": (ratio > self.cap).float()}
        return loss, ratio_metrics(x, ratio) | clip_metrics(too_low, too_high) | capped


@dataclass(frozen=True, kw_only=True, repr=False)
class dppo_kl(dppo_tv):
    """Trust region in the Bernoulli KL(p_old || p): DPPO-Binary-KL (arXiv 2602.04879).

    As `dppo_tv`; the distance is KL = p_old log(p_old / p) + (1 - p_old) log((1 - p_old) / (1 - p)) in nats, and moving
    back is always allowed. The bounds 0.05 are those of all runs of the paper.
    """

    delta_low: float = within(0.05, 0.0)
    delta_high: float = within(0.05, 0.0)

    def moved(self, new: Tensor, old: Tensor) -> tuple[Tensor, Tensor]:
        other_new, other_old = (-torch.expm1(logprobs.clamp(max=0.0)) + SMALL for logprobs in (new, old))
        kl = old.exp() * (old - new) + (1 - old.exp()) * (other_old.log() - other_new.log())
        return (kl > self.delta_low) & (new < old), (kl > self.delta_high) & (new > old)


def _gate(ratio: Tensor, tau: float) -> Tensor:
    return torch.sigmoid(tau * (ratio - 1)) * (4 / tau)
