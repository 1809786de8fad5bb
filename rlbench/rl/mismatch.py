"""Correcting for a sampler that computes other probabilities than the trainer: other kernels, or older weights.

A `MismatchCorrection` weighs the policy term of each token; the log-weight of a token is x = old_logprobs -
sampler_logprobs, and its weight exp(x), within exp(±20), the importance weight pi_old / pi_sampler. Others only keep or
drop. Put together with `+` their weights multiply, so a token must pass all of them:

    token_tis(cap=2.0) + reject(0.05, estimator="k3", level="seq_mean")

Weights carry no gradient and touch the policy term alone; a dropped token still counts in the normaliser. "When speed
kills stability" is J. Liu, Y. Li et al., "… demystifying RL collapse from the training-inference mismatch", 2025.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from rlbench.errors import LossError
from rlbench.rl import checks
from rlbench.rl.checks import one_of, within
from rlbench.rl.kl import ESTIMATORS, LOG_RATIO_BOUND, k1
from rlbench.rl.policy import LossPart, Metrics, masked, sequence_mean
from rlbench.rl.types import LossInputs

SCALE = "mismatch/scale"
"""The channel that holds the mean weight of the whole optimizer step."""


@dataclass(frozen=True)
class MismatchCorrection(LossPart):
    """Base of the corrections; one is called with `LossInputs` and returns a weight per token."""

    @property
    def needs_sampler(self) -> bool:
        """Whether it takes the sampler's log-probs for those of the policy, but for rounding and age."""
        return True

    @abstractmethod
    def __call__(self, x: LossInputs) -> tuple[Tensor, Metrics]:
        """Return weights (S, T) without gradient, 0 outside the mask, and metrics (S, T) float by name.

        `rejected` is 1 where the token was dropped; an importance weight also gives `is_weight` and `is_truncated`.
        """

    def __add__(self, other: MismatchCorrection) -> chain:
        """Return both together: the weights multiply."""
        if not isinstance(other, MismatchCorrection):
            return NotImplemented
        return chain((*parts_of(self), *parts_of(other)))


@dataclass(frozen=True)
class chain(MismatchCorrection):
    """Several corrections together, written `a + b`, in any order; at most one importance weight among them."""

    parts: tuple[MismatchCorrection, ...]

    def __post_init__(self) -> None:
        weighing = [part.name for part in self.parts if isinstance(part, ImportanceWeight)]
        if not self.parts or len(weighing) > 1:
            raise LossError(f"chain: {self.parts} holds importance weights {weighing}; wanted parts, at most one such.")

    @property
    def needs_sampler(self) -> bool:
        return any(part.needs_sampler for part in self.parts)

    @property
    def needs_plan(self) -> bool:
        return any(part.needs_plan for part in self.parts)

    def plan(self, x: LossInputs) -> dict[str, Tensor]:
        return {name: channel for part in self.parts for name, channel in part.plan(x).items()}

    def __call__(self, x: LossInputs) -> tuple[Tensor, Metrics]:
        weights = masked(torch.ones_like(log_weights(x)), x.mask)
        rejected = torch.zeros_like(weights)
        metrics: Metrics = {}
        for part in self.parts:
            own, measured = part(x)
            weights = weights * own
            rejected = torch.maximum(rejected, torch.as_tensor(measured["rejected"]))
            metrics |= measured
        return weights, metrics | {"rejected": rejected}


# -- importance weights


@dataclass(frozen=True)
class ImportanceWeight(MismatchCorrection):
    """Base of the importance weights, per token or `per_sequence`; outside its bounds one is clamped, or `drops`.

    `normalise` divides them by their mean over the step's tokens, or sequences, after the bounds, before any rejection.
    """

    per_sequence: ClassVar[bool] = False
    drops: ClassVar[bool] = True
    normalise: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        low, high = self.bounds
        if not 0 <= low < high:
            raise LossError(f"{self!r}: wanted bounds with 0 <= {low!r} < {high!r}.")

    @property
    @abstractmethod
    def bounds(self) -> tuple[float, float]:
        """The least and the greatest weight that is left as it is."""

    @property
    def needs_plan(self) -> bool:
        return self.normalise

    def plan(self, x: LossInputs) -> dict[str, Tensor]:
        if not self.normalise:
            return {}
        weights, counted = self._bounded(x)[0].double(), x.mask
        if self.per_sequence:  # each sequence counts once
            weights, counted = weights[:, :1], x.mask.any(dim=1, keepdim=True)
        mean = masked(weights, counted).sum() / counted.sum().clamp(min=1)
        mean = torch.where(mean > 0, mean, 1.0)  # nothing passed: all weights are 0 anyway
        return {SCALE: mean.to(log_weights(x).dtype).expand(x.mask.shape).clone()}

    def __call__(self, x: LossInputs) -> tuple[Tensor, Metrics]:
        weights, outside = self._bounded(x)
        outside = masked(outside.float(), x.mask)
        none = torch.zeros_like(outside)
        metrics: Metrics = {
            "is_weight": masked(weights, x.mask),
            "is_truncated": none if self.drops else outside,
            "rejected": outside if self.drops else none,
        }
        if self.normalise:
            scale = x.channels[SCALE] if SCALE in x.channels else self.plan(x)[SCALE]
            weights = weights / torch.where(x.mask, scale, 1.0)
        return masked(weights, x.mask), metrics

    def _bounded(self, x: LossInputs) -> tuple[Tensor, Tensor]:
        """Return the weights within their bounds (S, T), and bool: which were outside."""
        exponent = log_weights(x)
        if self.per_sequence:
            exponent = exponent.sum(dim=1, keepdim=True).expand(x.mask.shape)
        weights = exponent.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
        low, high = self.bounds
        outside = (weights < low) | (weights > high)
        return torch.where(outside, 0.0, weights) if self.drops else weights.clamp(low, high), outside


@dataclass(frozen=True)
class token_tis(ImportanceWeight):
    """Truncated importance sampling per token: w = min(max(exp(x), floor), cap); cap=math.inf for no bound.

    Ionides 2008; "Your efficient RL framework secretly brings you off-policy RL training" (F. Yao et al., 2025).
    """

    drops: ClassVar[bool] = False
    cap: float = 2.0
    floor: float = 0.0

    @property
    def bounds(self) -> tuple[float, float]:
        return self.floor, self.cap


@dataclass(frozen=True)
class sequence_tis(token_tis):
    """Truncated importance sampling per sequence: w = min(max(exp(sum of x), floor), cap), for all its tokens."""

    per_sequence: ClassVar[bool] = True


@dataclass(frozen=True)
class icepop(ImportanceWeight):
    """Masked importance sampling per token: w = exp(x) within [low, high], 0 outside (IcePop, arXiv 2510.18855)."""

    low: float = 0.5
    high: float = 5.0

    @property
    def bounds(self) -> tuple[float, float]:
        return self.low, self.high


@dataclass(frozen=True)
class sequence_mask(ImportanceWeight):
    """Masked importance sampling per sequence: w = exp(sum of x) within [low, high], 0 outside; TRL's default."""

    per_sequence: ClassVar[bool] = True
    high: float = 3.0
    low: float = 0.0

    @property
    def bounds(self) -> tuple[float, float]:
        return self.low, self.high


# -- rejections


@dataclass(frozen=True)
class Rejection(MismatchCorrection):
    """Base of the corrections that keep or drop; a subclass says which tokens it keeps."""

    @abstractmethod
    def keeps(self, x: LossInputs) -> Tensor:
        """Return bool, broadcastable to (S, T): True for what is kept."""

    def __call__(self, x: LossInputs) -> tuple[Tensor, Metrics]:
        """Return 1 where kept and 0 elsewhere (S, T), and the metric `rejected`."""
        kept = self.keeps(x).expand(x.mask.shape) & x.mask
        return kept.to(log_weights(x).dtype), {"rejected": (x.mask & ~kept).float()}


@dataclass(frozen=True)
class reject(Rejection):
    """Drop where an estimate of KL(sampler || trainer) leaves its bounds ("When speed kills stability"; verl).

    The estimate per token is k1 = -x, k2 = x²/2 or k3 = exp(x) - 1 - x (J. Schulman, 2020).

    Attributes:
        high: greatest estimate that is kept, in nats; > 0.
        level: "token" drops each token whose estimate is outside; "seq_sum", "seq_mean" each sequence whose summed or
            mean estimate is; "seq_max" each sequence with any token outside.
        low: least estimate that is kept, with "k1" alone; None: -high. verl's ratios "lo_hi" are log(lo), log(hi).
    """

    high: float
    estimator: str = one_of("k3", ("k1", "k2", "k3"))
    level: str = one_of("seq_mean", ("token", "seq_sum", "seq_mean", "seq_max"))
    low: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.number(self.name, "high", self.high, 0.0, above=True)
        if self.low is not None and (self.estimator != "k1" or not self.low < self.high):
            raise LossError(f"{self!r}: low must be below high, and acts with estimator='k1' alone.")

    def keeps(self, x: LossInputs) -> Tensor:
        log_weight = log_weights(x)
        estimate = ESTIMATORS[self.estimator](-log_weight, torch.zeros_like(log_weight))
        if self.level == "seq_sum":
            estimate = estimate.sum(dim=1, keepdim=True)
        elif self.level == "seq_mean":
            estimate = sequence_mean(estimate, x.mask)
        low = -self.high if self.low is None else self.low
        within_bounds = (estimate >= low) & (estimate <= self.high)
        return (within_bounds | ~x.mask).all(dim=1, keepdim=True) if self.level == "seq_max" else within_bounds


@dataclass(frozen=True)
class geometric_mask(Rejection):
    """Drop each sequence whose geometric mean weight exp(mean of x) is outside [low, high].

    It means the same for sequences of any length ("When speed kills stability"). The defaults are SkyRL's.
    """

    low: float = within(0.99, 0.0)
    high: float = 1.01

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.number(self.name, "high", self.high, self.low, above=True)

    def keeps(self, x: LossInputs) -> Tensor:
        mean = sequence_mean(log_weights(x), x.mask)
        return (mean >= (math.log(self.low) if self.low > 0 else -math.inf)) & (mean <= math.log(self.high))


@dataclass(frozen=True)
class off_policy_sequence_mask(Rejection):
    """Drop a token of negative advantage where the mean over its sequence of (log pi_against - log pi) is above delta.

    DeepSeek-V3.2 (arXiv 2512.02556). `delta` ≥ 0 in nats per token, TRL's documentation starts at 0.5; `against`
    "sampler" includes the mismatch (the paper, TRL), "old" does not.
    """

    delta: float
    against: str = one_of("sampler", ("sampler", "old"))

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.number(self.name, "delta", self.delta, 0.0)

    @property
    def needs_sampler(self) -> bool:
        return self.against == "sampler"

    def keeps(self, x: LossInputs) -> Tensor:
        behaviour = x.sampler_logprobs if self.against == "sampler" else x.old_logprobs
        distance = sequence_mean(behaviour.detach() - x.logprobs.detach(), x.mask)
        return ~((masked(x.advantages, x.mask) < 0) & (distance > self.delta))


def log_weights(x: LossInputs) -> Tensor:
    """Return old_logprobs - sampler_logprobs per token (S, T), without gradient, 0 outside the mask."""
    checks.shape("sampler_logprobs", x.sampler_logprobs, tuple(x.old_logprobs.shape))
    return masked(k1(x.old_logprobs.detach(), x.sampler_logprobs.detach()), x.mask)


def parts_of(correction: MismatchCorrection) -> tuple[MismatchCorrection, ...]:
    """Return the parts of a chain; any other correction is its own only part."""
    return correction.parts if isinstance(correction, chain) else (correction,)
