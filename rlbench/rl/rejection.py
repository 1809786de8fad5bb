"""Corrections that keep or drop tokens and whole sequences (weight 1 or 0), without weighing what is kept.

They are `MismatchCorrection`s, put together with each other and with an importance weight by `+`; see the top of
`rlbench.rl.mismatch`. What is dropped loses its policy term and still counts in the normaliser.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rlbench.errors import LossError
from rlbench.rl.kl import k1, k2, k3
from rlbench.rl.mismatch import MismatchCorrection, check_bounds, log_weights
from rlbench.rl.policy import Metrics, masked, sequence_mean
from rlbench.rl.reward_checks import check_number, one_of
from rlbench.rl.types import LossInputs

STATISTICS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}


@dataclass(frozen=True)
class Rejection(MismatchCorrection):
    """Base of the corrections that keep or drop; a subclass says which tokens it keeps."""

    def keeps(self, x: LossInputs) -> Tensor:
        """Return bool, broadcastable to (S, T): True for what is kept."""
        raise NotImplementedError

    def __call__(self, x: LossInputs) -> tuple[Tensor, Metrics]:
        """Return 1 where kept and 0 elsewhere (S, T), and the metric `rejected`."""
        kept = self.keeps(x).expand(x.mask.shape) & x.mask
        return kept.to(log_weights(x).dtype), {"rejected": (x.mask & ~kept).float()}


@dataclass(frozen=True)
class reject(Rejection):
    """Drop where an estimate of KL(sampler || trainer) leaves its bounds.

    The estimate per token is k1 = -x, k2 = x²/2 or k3 = exp(x) - 1 - x with x = old_logprobs - sampler_logprobs
    (J. Schulman, "Approximating KL divergence", 2020). "When speed kills stability" (J. Liu, Y. Li et al., 2025)
    and verl's rollout correction drop by it. Levels:

    * `token`: each token whose estimate is outside.
    * `seq_sum`, `seq_mean`: each sequence whose summed or mean estimate is outside.
    * `seq_max`: each sequence with any token outside. verl has it for k2 and k3; with k1, high = -log(1e-4)
      and low = -inf it is the "token veto" of verl's earlier versions.

    verl gives the bounds of k1 as ratios "lo_hi": they are low=log(lo), high=log(hi) here.

    Attributes:
        high: greatest estimate that is kept, in nats; > 0.
        estimator: "k1", "k2" or "k3".
        level: see above.
        low: least estimate that is kept, in nats, with "k1" alone (the others are never negative); None: -high.
    """

    high: float
    estimator: str = one_of("k3", STATISTICS)
    level: str = one_of("seq_mean", ("token", "seq_sum", "seq_mean", "seq_max"))
    low: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self.name, "high", self.high, 0.0, above=True)
        if self.low is not None and (self.estimator != "k1" or not self.low < self.high):
            raise LossError(
                f"{self.name}: low={self.low!r} must be < high={self.high!r}, and acts with estimator='k1' alone "
                f"(the others are never negative); the estimator is {self.estimator!r}."
            )

    def keeps(self, x: LossInputs) -> Tensor:
        log_weight = log_weights(x)
        estimate = STATISTICS[self.estimator](-log_weight, torch.zeros_like(log_weight))
        if self.level == "seq_sum":
            estimate = estimate.sum(dim=1, keepdim=True)
        elif self.level == "seq_mean":
            estimate = sequence_mean(estimate, x.mask)
        low = -self.high if self.low is None else self.low
        within = (estimate >= low) & (estimate <= self.high)
        return (within | ~x.mask).all(dim=1, keepdim=True) if self.level == "seq_max" else within


@dataclass(frozen=True)
class geometric_mask(Rejection):
    """Drop each sequence whose geometric mean weight exp(mean of x) is outside [low, high].

    Unlike the product, it means the same for sequences of any length ("When speed kills stability", J. Liu,
    Y. Li et al., 2025). The defaults are SkyRL's; NeMo-RL's are 0.999 and 1.002. OpenRLHF's "seq-mask-tis" is
    `token_tis(cap=math.inf) + geometric_mask(0.5, 5.0)`.

    Attributes:
        low: least mean ratio pi_old / pi_sampler that is kept; 0 for none.
        high: the greatest.
    """

    low: float = 0.99
    high: float = 1.01

    def __post_init__(self) -> None:
        check_bounds(self.name, "low", self.low, "high", self.high)

    def keeps(self, x: LossInputs) -> Tensor:
        mean = sequence_mean(log_weights(x), x.mask)
        return (mean >= (math.log(self.low) if self.low > 0 else -math.inf)) & (mean <= math.log(self.high))


@dataclass(frozen=True)
class off_policy_sequence_mask(Rejection):
    """Drop what was sampled far from the current policy and did badly (DeepSeek-V3.2, arXiv 2512.02556).

    A token is dropped where its advantage is negative and the mean over its sequence of (log pi_against - log pi) is
    above delta, pi being the policy as it is now. With one advantage per response that drops whole responses.
    Tokens with an advantage of 0 or more always stay.

    Attributes:
        delta: bound in nats per token, >= 0. The paper names none; TRL's documentation starts at 0.5.
        against: "sampler", which includes the mismatch (the paper, TRL), or "old".
    """

    delta: float
    against: str = one_of("sampler", ("sampler", "old"))

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self.name, "delta", self.delta, 0.0)

    @property
    def needs_sampler(self) -> bool:
        return self.against == "sampler"

    def keeps(self, x: LossInputs) -> Tensor:
        behaviour = x.sampler_logprobs if self.against == "sampler" else x.old_logprobs
        distance = sequence_mean(behaviour.detach() - x.logprobs.detach(), x.mask)
        return ~((masked(x.advantages, x.mask) < 0) & (distance > self.delta))
