"""What all policy losses share: the parts around the surrogate, each in one place.

    per_token = surrogate * mismatch weight * kept tokens + kl_coef * KL(policy || reference) - entropy_coef * entropy

A rejected or low-entropy token loses its policy term, keeps its KL and entropy terms, and still counts in the
normaliser. Padded and untrained tokens get exactly zero, in value and in gradient.
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from rlbench.errors import LossError
from rlbench.rl import checks
from rlbench.rl.aggregate import MODES
from rlbench.rl.checks import Checked, one_of, within
from rlbench.rl.kl import ESTIMATORS, LOG_RATIO_BOUND
from rlbench.rl.types import LossInputs

if TYPE_CHECKING:
    from rlbench.rl.mismatch import MismatchCorrection

Metrics = dict[str, Tensor | float]
WITH_GRADIENT = ("logprobs", "entropy")
PER_TOKEN = (*WITH_GRADIENT, "old_logprobs", "sampler_logprobs", "ref_logprobs", "advantages")
KEPT = "tokens/high_entropy"
"""The channel that holds 1 for the tokens kept out of the whole optimizer step, else 0."""


class LossPart(Checked, ABC):
    """Base of policy losses and what they are put together from: corrections and token filters."""

    @property
    def name(self) -> str:
        """Its class's name, as it is typed."""
        return type(self).__name__

    @property
    def needs_plan(self) -> bool:
        """Whether it looks at the whole optimizer step."""
        return False

    def plan(self, x: LossInputs) -> dict[str, Tensor]:
        """Return the (S, T) channels it needs, computed from the whole optimizer step; most need none."""
        return {}


@dataclass(frozen=True)
class TokenFilter(LossPart):
    """Base of the filters."""

    @abstractmethod
    def __call__(self, x: LossInputs) -> Tensor:
        """Return (S, T) bool: True for the tokens that keep their policy term, False outside the mask."""


@dataclass(frozen=True)
class high_entropy(TokenFilter):
    """Keep the tokens where the policy was most undecided ("Beyond the 80/20 rule", arXiv 2506.01939).

    Of n tokens those whose entropy is at least the k-th largest, k = max(1, floor(n * fraction)). `level` "batch": n
    counts the whole optimizer step (the paper, TRL); "sequence": each response by itself (LightRFT).
    """

    fraction: float = within(0.2, 0.0, 1.0, above=True)
    level: str = one_of("batch", ("batch", "sequence"))

    @property
    def needs_plan(self) -> bool:
        return self.level == "batch"

    def plan(self, x: LossInputs) -> dict[str, Tensor]:
        if self.level != "batch":
            return {}
        flat = self._highest(x.entropy.reshape(1, -1), x.mask.reshape(1, -1))
        return {KEPT: flat.reshape(x.mask.shape).float()}

    def __call__(self, x: LossInputs) -> Tensor:
        if self.level == "sequence":
            return self._highest(x.entropy, x.mask)
        kept = x.channels[KEPT] if KEPT in x.channels else self.plan(x)[KEPT]
        return (kept > 0.5) & x.mask

    def _highest(self, entropy: Tensor, mask: Tensor) -> Tensor:
        """Mark in each row the trained tokens at or above the row's own threshold."""
        value = torch.where(mask, entropy.detach().to(torch.float64), -math.inf)
        # a tiny bit more, so that 0.29 * 100 (28.999999999999996 in floating point) is 29
        wanted = (mask.sum(dim=1, keepdim=True).double() * self.fraction + 1e-9).floor().long().clamp(min=1)
        ordered = value.sort(dim=1, descending=True).values
        return (value >= ordered.gather(1, wanted - 1)) & mask if mask.shape[1] else mask


@dataclass(frozen=True, kw_only=True, repr=False)
class PolicyLoss(LossPart):
    """Base of the policy losses; the fields every one of them has.

    Attributes: kl_coef: weight of the KL penalty against the reference policy; 0 needs no reference.
    kl_ratio_correction: multiply the KL by the ratio new/old: unbiased off policy (DeepSeek-V3.2, arXiv 2512.02556).
    entropy_coef: weight of an entropy bonus; positive values keep the policy more random. anchor: what the ratio is
    taken against: "old" (the trainer's log-probs before the step's first update) or "sampler" (the inference
    engine's: two policies instead of three). mismatch: correction for a sampler that computes other probabilities
    than the trainer, or None. tokens: which tokens keep their policy term (e.g. the high-entropy ones), or None for
    all. aggregation: how the per-token losses become one, where the caller does not say.
    """

    paper: ClassVar[str] = ""
    kl_coef: float = within(0.0, 0.0)
    kl_estimator: str = one_of("k3", ESTIMATORS)
    kl_ratio_correction: bool = False
    entropy_coef: float = within(0.0, -math.inf, above=True)
    anchor: str = one_of("old", ("old", "sampler"))
    mismatch: MismatchCorrection | None = None
    tokens: TokenFilter | None = None
    aggregation: str = one_of("token-mean", MODES)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.anchor == "sampler" and self.mismatch is not None:
            raise LossError(f'{self.name}: anchor="sampler" and mismatch={self.mismatch!r} correct twice; give one.')

    @abstractmethod
    def surrogate(self, x: LossInputs) -> tuple[Tensor, Metrics]:
        """Return the policy term per token (S, T) of clean inputs, before corrections, and its metrics."""

    def surrogate_plan(self, whole: LossInputs) -> dict[str, Tensor]:
        """Return what the surrogate must know of the whole optimizer step, as (S, T) channels "<loss>/<name>"."""
        return {}

    def __repr__(self) -> str:
        """As it is typed: the fields that differ from their defaults, the loss's own before the shared ones."""
        shared = {field.name for field in dataclasses.fields(PolicyLoss)}
        own_first = sorted(dataclasses.fields(self), key=lambda field: field.name in shared)
        typed = [f"{f.name}={value!r}" for f in own_first if (value := getattr(self, f.name)) != default_of(f)]
        return f"{self.name}({', '.join(typed)})"

    @property
    def needs_reference(self) -> bool:
        """Whether `ref_logprobs` must be there."""
        return self.kl_coef != 0

    @property
    def needs_sampler(self) -> bool:
        """Whether `sampler_logprobs` must be those of the policy itself, but for rounding and age."""
        return self.anchor == "sampler" or (self.mismatch is not None and self.mismatch.needs_sampler)

    @property
    def needs_plan(self) -> bool:
        """Whether some part looks at the whole optimizer step."""
        own = type(self).surrogate_plan is not PolicyLoss.surrogate_plan
        return own or any(part is not None and part.needs_plan for part in (self.mismatch, self.tokens))

    def plan(self, whole: LossInputs) -> dict[str, Tensor]:
        """Return the (S, T) channels of all parts for the whole step; pure and without gradient."""
        with torch.no_grad():
            x = self.cleaned(whole)
            channels = dict(self.surrogate_plan(x))
            for part in (self.mismatch, self.tokens):
                if part is not None:
                    channels |= part.plan(x)
        return channels

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, Metrics]:
        """Return the loss per token (S, T) and metrics by name."""
        if self.needs_plan and not inputs.planned:
            inputs = dataclasses.replace(inputs, channels={**inputs.channels, **self.plan(inputs)})
        x = self.cleaned(inputs)
        loss, metrics = self.surrogate(x)
        if self.mismatch is not None:
            weights, measured = self.mismatch(x)
            loss = loss * weights
            metrics |= measured
        if self.tokens is not None:
            kept = self.tokens(x)
            loss = torch.where(kept, loss, 0.0)
            metrics["tokens_kept"] = kept.float()
        if self.kl_coef != 0:
            assert x.ref_logprobs is not None  # cleaned() has refused
            kl = ESTIMATORS[self.kl_estimator](x.logprobs, x.ref_logprobs)
            kl = kl * ratio_of(x) if self.kl_ratio_correction else kl
            loss = loss + self.kl_coef * kl
            metrics["ref_kl"] = kl.detach()
        if self.entropy_coef != 0:
            if x.logprobs.requires_grad and not x.entropy.requires_grad:
                raise LossError("entropy_coef has no effect here: inputs.entropy came without a gradient.")
            loss = loss - self.entropy_coef * x.entropy
        return masked(loss, x.mask), metrics

    def cleaned(self, inputs: LossInputs) -> LossInputs:
        """Return the inputs in float32 or wider, zero where untrained, anchored; checked for shape."""
        check_shapes(inputs)
        if self.needs_reference and inputs.ref_logprobs is None:
            raise LossError(f"{self} needs ref_logprobs, and the batch has none: use a reference, or set kl_coef=0.")
        clean: dict[str, Tensor] = {}
        for name in PER_TOKEN:
            values = getattr(inputs, name)
            if values is not None:
                values = values if name in WITH_GRADIENT else values.detach()
                clean[name] = masked(values if values.dtype == torch.float64 else values.float(), inputs.mask)
        if self.anchor == "sampler":
            clean["old_logprobs"] = clean["sampler_logprobs"]
        return dataclasses.replace(inputs, **clean)

    def channel(self, x: LossInputs, name: str) -> Tensor:
        """Return what `surrogate_plan` said under "<loss>/<name>" of these tokens."""
        key = f"{self.name}/{name}"
        if key not in x.channels:
            raise LossError(f"{self} needs channels[{key!r}] of its own plan(whole); seen: {sorted(x.channels)}.")
        return x.channels[key]


def default_of(field: dataclasses.Field[Any]) -> Any:
    """Return a dataclass field's default value (every field of a loss has one)."""
    factory = field.default_factory  # by cloudpickle, MISSING comes as another object
    return factory() if callable(factory) else field.default


def check_shapes(inputs: LossInputs) -> None:
    """Refuse inputs whose shapes differ, and an empty batch."""
    wanted = tuple(inputs.mask.shape)
    if len(wanted) != 2 or inputs.mask.dtype != torch.bool:
        raise LossError(f"mask has shape {wanted} and dtype {inputs.mask.dtype}; wanted bool (sequences, tokens).")
    if wanted[0] == 0:
        raise LossError("the batch is empty: mask has shape (0, …); wanted at least one sequence.")
    for name in PER_TOKEN:
        if (value := getattr(inputs, name)) is not None:
            checks.shape(name, value, wanted)
    if inputs.group is not None:
        checks.shape("group", inputs.group, wanted[:1])


def masked(values: Tensor, mask: Tensor) -> Tensor:
    """Replace untrained values by 0; multiplying would let a NaN in the padding through."""
    return torch.where(mask, values, 0.0)


def log_ratio_of(x: LossInputs) -> Tensor:
    """Return log new/old per token (S, T), with gradient, clamped to ± `LOG_RATIO_BOUND`."""
    return (x.logprobs - x.old_logprobs).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def ratio_of(x: LossInputs) -> Tensor:
    """Return the probability ratio new/old per token (S, T), with gradient."""
    return log_ratio_of(x).exp()


def ratio_metrics(x: LossInputs, ratio: Tensor) -> Metrics:
    """Return `ratio` as the loss uses it and `ppo_kl`, mean of log old - log new; (S, T) without gradient."""
    return {"ratio": ratio.detach(), "ppo_kl": x.old_logprobs - x.logprobs.detach()}


def clip_metrics(low: Tensor, high: Tensor) -> Metrics:
    """Return the metrics of bool (S, T): which tokens the lower bound, and which the upper bound, takes away."""
    fractions = {"clip_fraction": low | high, "clip_fraction_low": low, "clip_fraction_high": high}
    return {name: tokens.float() for name, tokens in fractions.items()}


def sequence_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Return the mean over each sequence's trained tokens, (S, 1); 0 for a sequence without one."""
    return masked(values, mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
