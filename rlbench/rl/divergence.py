"""Policy losses with a trust region in probabilities instead of ratios: DPPO (arXiv 2602.04879).

A ratio says little about a rare token and hides much about a frequent one. DPPO drops the gradient of a token that
has moved too far *and* would move further, the distance measured between the two Bernoulli distributions "this
token or another":

    L = -A sg(min(r, cap)) log p, 0 for the tokens dropped.

Both are anchored at the sampler by default, as the paper asks and as TRL's experimental trainer did before it
was removed (July 2026): two policies, no third in between. verl takes the trainer's old log-probs:
anchor="old". Metrics: `ratio`, `ppo_kl`, `clip_fraction` (tokens dropped, of either sign), `clip_fraction_low`,
`clip_fraction_high` and `cap_fraction` (ratios capped). Both pair with `rb.rl.group_normalized`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rlbench.rl.policy import Metrics, PolicyLoss, ratio_metrics, ratio_of
from rlbench.rl.reward_checks import within
from rlbench.rl.types import LossInputs

SMALL = 1e-8
"""Added inside the logarithm of the Bernoulli KL, as verl does, so that a probability of 1 stays finite."""


@dataclass(frozen=True, kw_only=True, repr=False)
class dppo_tv(PolicyLoss):
    """Trust region in total variation, |p - p_old|: DPPO-Binary-TV (arXiv 2602.04879).

    Drops A > 0 with p - p_old > delta_high, and A < 0 with p - p_old < -delta_low. prime-rl's default loss is this
    mask with an added squared log-ratio.

    Attributes:
        delta_low, delta_high: in [0, 1]. The paper has 0.15 in its stability test and with LoRA, 0.2 in its
            other large runs; verl's example and TRL had 0.15, SkyRL has 0.2. verl reads PPO's 0.2 unless told
            otherwise.
        cap: > 0, bound of the ratio. The paper has none in its stability test and 5 in its large runs, TRL
            had 20. verl reads clip_ratio_c = 3.0 unless told otherwise; its loss falls back to 20.
    """

    paper: ClassVar[str] = "2602.04879"

    delta_low: float = within(0.15, 0.0, 1.0)
    delta_high: float = within(0.15, 0.0, 1.0)
    cap: float = within(20.0, 0.0, above=True)
    anchor: str = "sampler"

    def surrogate(self, x: LossInputs) -> tuple[Tensor, Metrics]:
        moved = (x.logprobs.exp() - x.old_logprobs.exp()).detach()
        return _within(x, too_high=moved > self.delta_high, too_low=moved < -self.delta_low, cap=self.cap)


@dataclass(frozen=True, kw_only=True, repr=False)
class dppo_kl(PolicyLoss):
    """Trust region in the Bernoulli KL(p_old || p): DPPO-Binary-KL (arXiv 2602.04879).

    KL = p_old log(p_old / p) + (1 - p_old) log((1 - p_old) / (1 - p)). Drops A > 0 with p > p_old and
    KL > delta_high, and A < 0 with p < p_old and KL > delta_low: moving back is always allowed.

    Attributes:
        delta_low, delta_high: in nats, at least 0; 0.05 in all runs of the paper and in verl's example, and
            what TRL and SkyRL advise. verl reads PPO's 0.2 unless told otherwise.
        cap: > 0, bound of the ratio; see `dppo_tv`.
    """

    paper: ClassVar[str] = "2602.04879"

    delta_low: float = within(0.05, 0.0)
    delta_high: float = within(0.05, 0.0)
    cap: float = within(20.0, 0.0, above=True)
    anchor: str = "sampler"

    def surrogate(self, x: LossInputs) -> tuple[Tensor, Metrics]:
        new, old = x.logprobs.detach(), x.old_logprobs
        other_new, other_old = (-torch.expm1(logprobs.clamp(max=0.0)) + SMALL for logprobs in (new, old))
        kl = old.exp() * (old - new) + (1 - old.exp()) * (other_old.log() - other_new.log())
        return _within(
            x,
            too_high=(kl > self.delta_high) & (new > old),
            too_low=(kl > self.delta_low) & (new < old),
            cap=self.cap,
        )


def _within(x: LossInputs, too_high: Tensor, too_low: Tensor, cap: float) -> tuple[Tensor, Metrics]:
    """Return the capped policy gradient without the tokens that would move further away, and its metrics."""
    ratio = ratio_of(x).detach()
    dropped_high, dropped_low = too_high & (x.advantages > 0), too_low & (x.advantages < 0)
    dropped = dropped_high | dropped_low
    loss = torch.where(dropped, 0.0, -x.advantages * ratio.clamp(max=cap) * x.logprobs)
    return loss, ratio_metrics(x, ratio) | {
        "clip_fraction": dropped.float(),
        "clip_fraction_low": dropped_low.float(),
        "clip_fraction_high": dropped_high.float(),
        "cap_fraction": (ratio > cap).float(),
    }
