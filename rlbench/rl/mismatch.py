"""Correcting for a sampler that computes other probabilities than the trainer.

The sampler (inference engine) and the trainer hold the same weights and still disagree: other kernels, other
precision, or weights a few steps older. A `MismatchCorrection` weighs the policy term of each token for that; the
log-weight of a token is x = old_logprobs - sampler_logprobs, and its weight exp(x) the importance weight
pi_old / pi_sampler.

Here are the importance weights; `rlbench.rl.rejection` has the corrections that only keep or drop. They are put
together with `+`: their weights multiply, so a token must pass all of them, as in

    token_tis(cap=2.0) + reject(0.05, estimator="k3", level="seq_mean")

Weights carry no gradient and touch the policy term alone. A token that is dropped still counts in the normaliser
(`Aggregation` sees the mask as it was): dividing by what is kept would inflate the gradient by all / kept.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from rlbench.errors import LossError
from rlbench.rl.kl import LOG_RATIO_BOUND
from rlbench.rl.policy import LossPart, Metrics, masked
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

    def __call__(self, x: LossInputs) -> tuple[Tensor, Metrics]:
        """Return weights (S, T) without gradient, 0 outside the mask, and metrics by name.

        Metrics are (S, T) float: `rejected` (1 where the token was dropped), and from an importance weight
        `is_weight` (after its bounds, before `normalise`) and `is_truncated`.
        """
        raise NotImplementedError

    def __add__(self, other: MismatchCorrection) -> chain:
        """Return both together: the weights multiply."""
        if not isinstance(other, MismatchCorrection):
            return NotImplemented
        return chain((*parts_of(self), *parts_of(other)))


@dataclass(frozen=True)
class chain(MismatchCorrection):
    """Several corrections together, written `a + b`: weights multiply, a token must pass all rejections.

    Each part sees the whole batch, so their order does not matter. At most one importance weight may be among them.
    """

    parts: tuple[MismatchCorrection, ...]

    def __post_init__(self) -> None:
        weighing = [part.name for part in self.parts if isinstance(part, ImportanceWeight)]
        if not self.parts or len(weighing) > 1:
            raise LossError(
                f"chain: parts holds {len(self.parts)} corrections, importance weights among them: {weighing}; "
                "wanted one part or more, with at most one importance weight (two would correct twice)."
            )

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


@dataclass(frozen=True)
class ImportanceWeight(MismatchCorrection):
    """Base of the importance weights; a subclass says its level and what happens outside the bounds.

    `normalise` divides the weights by their mean over the step's tokens (over its sequences for a weight per sequence),
    taken after the bounds and before any rejection.
    """

    per_sequence: ClassVar[bool] = False
    normalise: bool = field(default=False, kw_only=True)

    def bounded(self, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the weights after the bounds, and bool tensors: which were truncated, which rejected."""
        raise NotImplementedError

    @property
    def needs_plan(self) -> bool:
        return self.normalise

    def plan(self, x: LossInputs) -> dict[str, Tensor]:
        if not self.normalise:
            return {}
        weights = self.bounded(self._raw(x))[0].double()
        if self.per_sequence:  # each sequence counts once
            weights, counted = weights[:, :1], x.mask.any(dim=1, keepdim=True)
        else:
            counted = x.mask
        mean = masked(weights, counted).sum() / counted.sum().clamp(min=1)
        mean = torch.where(mean > 0, mean, 1.0)  # nothing passed: all weights are 0 anyway
        return {SCALE: mean.to(log_weights(x).dtype).expand(x.mask.shape).clone()}

    def __call__(self, x: LossInputs) -> tuple[Tensor, Metrics]:
        weights, truncated, rejected = self.bounded(self._raw(x))
        metrics: Metrics = {
            "is_weight": masked(weights, x.mask),
            "is_truncated": masked(truncated.float(), x.mask),
            "rejected": masked(rejected.float(), x.mask),
        }
        if self.normalise:
            scale = x.channels[SCALE] if SCALE in x.channels else self.plan(x)[SCALE]
            weights = weights / torch.where(x.mask, scale, 1.0)
        return masked(weights, x.mask), metrics

    def _raw(self, x: LossInputs) -> Tensor:
        """Return exp of the log-weight, or of its sum over the sequence, (S, T); the exponent within ± 20."""
        exponent = log_weights(x)
        if self.per_sequence:
            exponent = exponent.sum(dim=1, keepdim=True).expand(x.mask.shape)
        return exponent.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


@dataclass(frozen=True)
class token_tis(ImportanceWeight):
    """Truncated importance sampling per token: w = min(max(exp(x), floor), cap); cap=math.inf for no bound.

    Ionides, "Truncated importance sampling", 2008; for this mismatch "Your efficient RL framework secretly brings you
    off-policy RL training" (F. Yao et al., 2025). verl and SkyRL cap at 2; OpenRLHF clamps to [0.5, 5].
    """

    cap: float = 2.0
    floor: float = 0.0

    def __post_init__(self) -> None:
        check_bounds(self.name, "floor", self.floor, "cap", self.cap)

    def bounded(self, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        outside = (weights < self.floor) | (weights > self.cap)
        return weights.clamp(self.floor, self.cap), outside, torch.zeros_like(outside)


@dataclass(frozen=True)
class sequence_tis(token_tis):
    """Truncated importance sampling per sequence: w = min(max(exp(sum of x), floor), cap), for all its tokens.

    The exact weight of a sequence, at a variance that grows with its length; see `token_tis`. verl caps both at 2,
    SkyRL this one at 5, TRL at 3.
    """

    per_sequence: ClassVar[bool] = True


@dataclass(frozen=True)
class icepop(ImportanceWeight):
    """Masked importance sampling per token: w = exp(x) within [low, high], 0 outside.

    IcePop (Ring-1T, arXiv 2510.18855), whose bounds are the defaults; NeMo-RL's and verl's "lower_upper" too.
    """

    low: float = 0.5
    high: float = 5.0

    def __post_init__(self) -> None:
        check_bounds(self.name, "low", self.low, "high", self.high)

    def bounded(self, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return _kept_within(weights, self.low, self.high)


@dataclass(frozen=True)
class sequence_mask(ImportanceWeight):
    """Masked importance sampling per sequence: w = exp(sum of x) for all its tokens, 0 outside [low, high].

    TRL's default with vLLM ("When speed kills stability: demystifying RL collapse from the training-inference
    mismatch", J. Liu, Y. Li et al., 2025).
    """

    per_sequence: ClassVar[bool] = True
    high: float = 3.0
    low: float = 0.0

    def __post_init__(self) -> None:
        check_bounds(self.name, "low", self.low, "high", self.high)

    def bounded(self, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return _kept_within(weights, self.low, self.high)


# -- what corrections share ----------------------------------------------------------------------------------


def log_weights(x: LossInputs) -> Tensor:
    """Return old_logprobs - sampler_logprobs per token (S, T), without gradient, 0 outside the mask."""
    old, sampler = x.old_logprobs.detach(), x.sampler_logprobs.detach()
    wide = torch.promote_types(torch.promote_types(old.dtype, sampler.dtype), torch.float32)
    return masked(old.to(wide) - sampler.to(wide), x.mask)


def parts_of(correction: MismatchCorrection) -> tuple[MismatchCorrection, ...]:
    """Return the parts of a chain; any other correction is its own only part."""
    return correction.parts if isinstance(correction, chain) else (correction,)


def check_bounds(owner: str, low_name: str, low: float, high_name: str, high: float) -> None:
    """Refuse bounds on a weight that are not 0 <= low < high."""
    if not 0 <= low < high:
        raise LossError(f"{owner}: {low_name}={low!r}, {high_name}={high!r}; wanted 0 <= {low_name} < {high_name}.")


def _kept_within(weights: Tensor, low: float, high: float) -> tuple[Tensor, Tensor, Tensor]:
    outside = (weights < low) | (weights > high)
    return torch.where(outside, 0.0, weights), torch.zeros_like(outside), outside
