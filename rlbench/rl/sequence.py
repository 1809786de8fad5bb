"""Policy losses whose ratio belongs to the whole response: GSPO, LUSPO, GMPO and VESPO.

The numbers per sequence are written to all its tokens, so that the named aggregation makes of them what the paper
means.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rlbench.rl.checks import one_of, within
from rlbench.rl.clipped import ppo
from rlbench.rl.kl import LOG_RATIO_BOUND
from rlbench.rl.policy import (
    Metrics,
    PolicyLoss,
    clip_metrics,
    log_ratio_of,
    masked,
    ratio_metrics,
    ratio_of,
    sequence_mean,
)
from rlbench.rl.types import LossInputs

LOG_WEIGHT_BOUNDS = (math.log(1e-8), 20.0)
"""Between these VESPO's log sequence weight is clamped (TRL's numbers)."""


@dataclass(frozen=True, kw_only=True, repr=False)
class gspo(ppo):
    """PPO's clip on the geometric mean of a response's ratios: GSPO (arXiv 2507.18071).

    s = exp(mean over the response's tokens of log new/old), clamped to exp(±20); L = max(-A s, -A clip(s)). `level`
    "sequence": one s per response (TRL, NeMo-RL); "token" (GSPO-token; verl, SkyRL): s_t = sg(s) p_t / sg(p_t).
    """

    paper: ClassVar[str] = "2507.18071"
    level: str = one_of("sequence", ("sequence", "token"))
    clip_low: float = 3e-4
    clip_high: float = 4e-4
    aggregation: str = "seq-mean-token-mean"

    def ratio(self, x: LossInputs) -> Tensor:
        ratio = _geometric_mean(x.logprobs - x.old_logprobs, x.mask).expand_as(x.logprobs)
        if self.level == "sequence":
            return ratio
        return ratio.detach() * torch.exp(x.logprobs - x.logprobs.detach())


@dataclass(frozen=True, kw_only=True, repr=False)
class luspo(gspo):
    """GSPO's loss summed over a response in place of averaged: no bias towards short ones; LUSPO (arXiv 2602.05261)."""

    paper: ClassVar[str] = "2602.05261"
    clip_low: float = 2e-3
    clip_high: float = 2.5e-3
    aggregation: str = "seq-mean-token-sum"


@dataclass(frozen=True, kw_only=True, repr=False)
class gmpo(PolicyLoss):
    """Geometric mean of ratios clipped token by token: GMPO (arXiv 2507.20673).

    With z = log new/old and s = sign(A): z' = s min(s z, s clip(z, -clip_low, clip_high));
    L = -mean(A) exp(mean(z')), both means over the response, the exponent clamped to ±20. The bounds are those of the
    *log*-ratio; the paper's and TRL's are 0.4, verl's `geo_mean` reads PPO's 0.2 unless told otherwise.
    """

    paper: ClassVar[str] = "2507.20673"
    clip_low: float = within(0.4, 0.0)
    clip_high: float = within(0.4, 0.0)
    aggregation: str = "seq-mean-token-mean"

    def surrogate(self, x: LossInputs) -> tuple[Tensor, Metrics]:
        sign = x.advantages.sign()
        signed = sign * (x.logprobs - x.old_logprobs)
        clipped = sign * (x.logprobs - x.old_logprobs).clamp(-self.clip_low, self.clip_high)
        bites = clipped < signed
        ratio = _geometric_mean(sign * torch.minimum(signed, clipped), x.mask).expand_as(signed)
        loss = -sequence_mean(x.advantages, x.mask) * ratio
        return loss, ratio_metrics(x, ratio) | clip_metrics(bites & (sign < 0), bites & (sign > 0))


@dataclass(frozen=True, kw_only=True, repr=False)
class vespo(PolicyLoss):
    """Policy gradient softly weighted by the whole response's ratio: VESPO (arXiv 2602.10693).

    w = exp(sum over the response of log new/old), w clamped to [1e-8, e^20]; phi(w) = w^k exp(lambda (1 - w)), 1 at
    w = 1; L = -sg(phi) A log p. `k_pos` and `lambda_pos` act where A >= 0. The metric `sequence_weight` is phi. TRL
    multiplies the sampler's correction into w: anchor="sampler" is the same.
    """

    paper: ClassVar[str] = "2602.10693"
    k_pos: float = within(2.0, 0.0)
    lambda_pos: float = within(3.0, 0.0)
    k_neg: float = within(3.0, 0.0)
    lambda_neg: float = within(2.0, 0.0)

    def surrogate(self, x: LossInputs) -> tuple[Tensor, Metrics]:
        with torch.no_grad():
            log_weight = masked(log_ratio_of(x), x.mask).sum(1, keepdim=True).clamp(*LOG_WEIGHT_BOUNDS)
            weight = torch.where(
                x.advantages >= 0,
                torch.exp(self.k_pos * log_weight - self.lambda_pos * torch.expm1(log_weight)),
                torch.exp(self.k_neg * log_weight - self.lambda_neg * torch.expm1(log_weight)),
            )
        loss = -weight * x.advantages * x.logprobs
        return loss, ratio_metrics(x, ratio_of(x)) | {"sequence_weight": weight}


def _geometric_mean(log_ratios: Tensor, mask: Tensor) -> Tensor:
    """Return exp of each sequence's mean, (S, 1); 1 for a sequence without trained tokens."""
    return sequence_mean(log_ratios, mask).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
