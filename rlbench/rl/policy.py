"""What all policy losses share: the parts around the surrogate, each in one place.

A policy loss is a frozen dataclass called with `LossInputs`. A subclass writes its `surrogate` (the policy term
per token) and nothing else; this module adds, in this order,

    per_token = surrogate * mismatch weight * kept tokens + kl_coef * KL(policy || reference) - entropy_coef * entropy

so that a rejected or low-entropy token loses its policy term, keeps its KL and entropy terms, and still counts in
the normaliser. Padded and untrained tokens get exactly zero, in value and in gradient.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from rlbench.errors import LossError
from rlbench.rl.aggregate import MODES
from rlbench.rl.kl import ESTIMATORS, LOG_RATIO_BOUND
from rlbench.rl.reward_checks import Checked, one_of, within
from rlbench.rl.types import LossInputs

if TYPE_CHECKING:
    from rlbench.rl.mismatch import MismatchCorrection
    from rlbench.rl.token_filters import TokenFilter

Metrics = dict[str, Tensor | float]


class LossPart(Checked):
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


@dataclass(frozen=True, kw_only=True, repr=False)
class PolicyLoss(LossPart):
    """Base of the policy losses; the fields every one of them has.

    Attributes:
        paper: the arXiv id, or a citation, of the loss.
        kl_coef: weight of the KL penalty against the reference policy; 0 needs no reference.
        kl_estimator: see `rlbench.rl.kl`.
        kl_ratio_correction: multiply the KL estimate by the ratio new/old, which makes it unbiased off policy
            (DeepSeek-V3.2, arXiv 2512.02556).
        entropy_coef: weight of an entropy bonus; positive values keep the policy more random.
        anchor: what the ratio is taken against: "old" (the trainer's log-probs before the step's first update) or
            "sampler" (the inference engine's: two policies instead of three, no correction needed beside it).
        mismatch: correction for a sampler that computes other probabilities than the trainer, or None.
        tokens: which tokens keep their policy term (e.g. the high-entropy ones), or None for all.
        aggregation: how the per-token losses become one, where the caller does not say.
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
            raise LossError(
                f'{self.name}: with anchor="sampler" the ratio itself corrects the mismatch; mismatch='
                f"{self.mismatch!r} would correct it twice. Give one of the two."
            )

    def surrogate(self, x: LossInputs) -> tuple[Tensor, Metrics]:
        """Return the policy term per token (S, T), before corrections, and its metrics.

        `x` is clean: 0 outside the mask, `x.old_logprobs` is the anchor, and only `logprobs` and `entropy` carry a
        gradient. A metric is (S, T) too, averaged over the trained tokens.
        """
        raise NotImplementedError

    def surrogate_plan(self, whole: LossInputs) -> dict[str, Tensor]:
        """Return what the surrogate must know of the whole optimizer step, as (S, T) channels "<loss>/<name>"."""
        return {}

    def __repr__(self) -> str:
        """As it is typed: the fields that differ from their defaults, the loss's own before the shared ones."""
        shared = {field.name for field in dataclasses.fields(PolicyLoss)}
        own_first = sorted(dataclasses.fields(self), key=lambda field: field.name in shared)
        typed = [
            f"{field.name}={getattr(self, field.name)!r}"
            for field in own_first
            if getattr(self, field.name) != default_of(field)
        ]
        return f"{self.name}({', '.join(typed)})"

    # -- the contract of a loss ------------------------------------------------------------------------------

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
        if self.needs_plan and not inputs.channels:
            inputs = dataclasses.replace(inputs, channels=self.plan(inputs))
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
            kl = self._kl(x)
            loss = loss + self.kl_coef * kl
            metrics["kl"] = kl.detach()
        if self.entropy_coef != 0:
            loss = loss - self.entropy_coef * _entropy(x)
        return masked(loss, x.mask), metrics

    # -- parts -----------------------------------------------------------------------------------------------

    def cleaned(self, inputs: LossInputs) -> LossInputs:
        """Return the inputs in float32 or wider, zero where untrained, anchored; checked for shape."""
        check_shapes(inputs)
        if self.needs_reference and inputs.ref_logprobs is None:
            raise LossError(
                f"{self} needs log-probabilities of a reference policy, and the batch has none. "
                "Add them to the batch from a reference engine, or set kl_coef=0."
            )

        def clean(values: Tensor) -> Tensor:
            wide = values if values.dtype == torch.float64 else values.float()
            return masked(wide, inputs.mask)

        def constant(values: Tensor) -> Tensor:
            return clean(values.detach())

        old = inputs.sampler_logprobs if self.anchor == "sampler" else inputs.old_logprobs
        return dataclasses.replace(
            inputs,
            logprobs=clean(inputs.logprobs),
            old_logprobs=constant(old),
            sampler_logprobs=constant(inputs.sampler_logprobs),
            ref_logprobs=None if inputs.ref_logprobs is None else constant(inputs.ref_logprobs),
            advantages=constant(inputs.advantages),
            entropy=clean(inputs.entropy),
        )

    def _kl(self, x: LossInputs) -> Tensor:
        assert x.ref_logprobs is not None  # cleaned() has refused
        kl = ESTIMATORS[self.kl_estimator](x.logprobs, x.ref_logprobs)
        return kl * ratio_of(x) if self.kl_ratio_correction else kl

    def channel(self, x: LossInputs, name: str) -> Tensor:
        """Return what `surrogate_plan` said under "<loss>/<name>" of these tokens."""
        key = f"{self.name}/{name}"
        if key not in x.channels:
            raise LossError(
                f"{self} needs channels[{key!r}] and the inputs have {sorted(x.channels)}. Give it the channels of "
                "its own plan(whole), or none at all."
            )
        return x.channels[key]


def default_of(field: dataclasses.Field[Any]) -> Any:
    """Return a dataclass field's default value (every field of a loss has one)."""
    factory = field.default_factory  # by cloudpickle, MISSING comes as another object
    return factory() if callable(factory) else field.default


def check_shapes(inputs: LossInputs) -> None:
    """Refuse inputs whose shapes differ, and an empty batch."""
    wanted = tuple(inputs.mask.shape)
    if inputs.mask.dim() != 2 or inputs.mask.dtype != torch.bool:
        raise LossError(
            f"mask has shape {wanted} and dtype {inputs.mask.dtype}; wanted a bool mask (sequences, tokens)."
        )
    if wanted[0] == 0:
        raise LossError("the batch is empty: mask has shape (0, …); wanted at least one sequence.")
    for name in ("logprobs", "old_logprobs", "sampler_logprobs", "ref_logprobs", "advantages", "entropy"):
        value = getattr(inputs, name)
        if value is not None and tuple(value.shape) != wanted:
            raise LossError(
                f"{name} has shape {tuple(value.shape)}; wanted {wanted}, the shape of mask (sequences, tokens)."
            )
    if inputs.group is not None and tuple(inputs.group.shape) != wanted[:1]:
        raise LossError(f"group has shape {tuple(inputs.group.shape)}; wanted {wanted[:1]}, one number per sequence.")


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


def sequence_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Return the mean over each sequence's trained tokens, (S, 1); 0 for a sequence without one."""
    return masked(values, mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)


def _entropy(x: LossInputs) -> Tensor:
    """Return the entropy with its gradient; refuse a bonus that could not act."""
    if x.logprobs.requires_grad and not x.entropy.requires_grad:
        raise LossError(
            "entropy_coef has no effect here: `entropy` came without a gradient. "
            "Whoever makes the inputs must compute it with one."
        )
    return x.entropy
