"""Policy losses whose ratio belongs to the whole response: GSPO, LUSPO, GMPO and VESPO.

They read sums or means over each row of (S, T); a response is always whole within one micro-batch. The numbers per
sequence are written to all its tokens, so that the named aggregation makes of them what the paper means.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rlbench.rl.clipped import ppo
from rlbench.rl.kl import LOG_RATIO_BOUND
from rlbench.rl.policy import (
    Metrics,
    PolicyLoss,
    log_ratio_of,
    masked,
    ratio_metrics,
    ratio_of,
    sequence_mean,
)
from rlbench.rl.reward_checks import one_of, within
from rlbench.rl.types import LossInputs

LOG_WEIGHT_BOUNDS = (math.log(1e-8), 20.0)
"""Between these VESPO's log sequence weight is clamped (TRL's numbers)."""


@dataclass(frozen=True, kw_only=True, repr=False)
class gspo(ppo):
    """PPO's clip on the geometric mean of a response's ratios: GSPO (arXiv 2507.18071).

    s = exp(mean over the response's tokens of log new/old), clamped to exp(±20); L = max(-A s, -A clip(s)).
    Pairs with `rb.rl.group_normalized`. verl and SkyRL use the token form and clamp log s to <= 10; TRL and NeMo-RL
    the sequence form. With one advantage per response both have the same gradient under seq-mean-token-mean, the
    aggregation it is made for.

    Attributes:
        level: "sequence": one s per response, the gradient flows through the mean; "token" (GSPO-token):
            s_t = sg(s) p_t / sg(p_t), for advantages that differ within a response.
        clip_low, clip_high: the paper's; two orders below PPO's, for s varies far less than a token's ratio.
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
    """GSPO's loss times the response's length, no bias towards short ones: LUSPO (arXiv 2602.05261).

    The same loss per token as GSPO, summed over a response in place of averaged. Pairs with
    `rb.rl.group_normalized`.

    Attributes:
        clip_low, clip_high: the paper's, as TRL's paper index quotes them from its section 5.1.
    """

    paper: ClassVar[str] = "2602.05261"

    clip_low: float = 2e-3
    clip_high: float = 2.5e-3
    aggregation: str = "seq-mean-token-sum"


@dataclass(frozen=True, kw_only=True, repr=False)
class gmpo(PolicyLoss):
    """Geometric mean of ratios clipped token by token: GMPO (arXiv 2507.20673).

    With z = log new/old and s = sign(A): z' = s min(s z, s clip(z, -clip_low, clip_high));
    L = -mean(A) exp(mean(z')), both means over the response, the exponent clamped to ±20. Pairs with
    `rb.rl.group_normalized`; aggregation seq-mean-token-mean makes it the plain mean over responses.

    Attributes:
        clip_low, clip_high: bounds of the *log*-ratio; the paper and TRL clip to (e^-0.4, e^0.4). verl's
            `geo_mean` reads PPO's 0.2 unless told otherwise.
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
        return loss, ratio_metrics(x, ratio) | {
            "clip_fraction": bites.float(),
            "clip_fraction_low": (bites & (sign < 0)).float(),
            "clip_fraction_high": (bites & (sign > 0)).float(),
        }


@dataclass(frozen=True, kw_only=True, repr=False)
class vespo(PolicyLoss):
    """Policy gradient softly weighted by the whole response's ratio: VESPO (arXiv 2602.10693).

    w = exp(sum over the response of log new/old), w clamped to [1e-8, e^20];
    phi(w) = w^k exp(lambda (1 - w)), 1 at w = 1; L = -sg(phi) A log p. Pairs with `rb.rl.group_normalized`. TRL
    multiplies the sampler's correction into w: anchor="sampler" is the same.

    Attributes:
        k_pos, lambda_pos: k and lambda where A >= 0. All four are those of the authors' code and of TRL.
        k_neg, lambda_neg: k and lambda where A < 0.
    """

    paper: ClassVar[str] = "2602.10693"

    k_pos: float = within(2.0, 0.0)
    lambda_pos: float = within(3.0, 0.0)
    k_neg: float = within(3.0, 0.0)
    lambda_neg: float = within(2.0, 0.0)

    def surrogate(self, x: LossInputs) -> tuple[Tensor, Metrics]:
        """Weigh the policy gradient; the metric `sequence_weight` is phi."""
        with torch.no_grad():
            log_weight = masked(log_ratio_of(x), x.mask).sum(1, keepdim=True).clamp(*LOG_WEIGHT_BOUNDS)
            weight = torch.where(
                x.advantages >= 0,
                _gamma_shape(log_weight, self.k_pos, self.lambda_pos),
                _gamma_shape(log_weight, self.k_neg, self.lambda_neg),
            )
        loss = -weight * x.advantages * x.logprobs
        return loss, ratio_metrics(x, ratio_of(x)) | {"sequence_weight": weight}


def _geometric_mean(log_ratios: Tensor, mask: Tensor) -> Tensor:
    """Return exp of each sequence's mean, (S, 1); 1 for a sequence without trained tokens."""
    return sequence_mean(log_ratios, mask).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


def _gamma_shape(log_weight: Tensor, k: float, rate: float) -> Tensor:
    """Return w^k exp(rate (1 - w)), computed in log space."""
    return torch.exp(k * log_weight - rate * torch.expm1(log_weight))
