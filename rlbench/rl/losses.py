"""Policy losses as values: frozen dataclasses called with `LossInputs`, printing as they are written.

A loss gives one number per token and does not aggregate (see `aggregate`). Padded and untrained tokens get
exactly zero, in value and in gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rlbench.errors import LossError, nearest
from rlbench.rl.kl import ESTIMATORS, LOG_RATIO_BOUND
from rlbench.rl.types import Loss, LossInputs


@dataclass(frozen=True)
class grpo:
    """Clipped policy loss of GRPO (arXiv 2402.03300) and PPO (arXiv 1707.06347).

    Attributes:
        clip_low: the probability ratio new/old is clipped from below to 1 - clip_low.
        clip_high: and from above to 1 + clip_high; larger than clip_low it is DAPO's clip-higher
            (arXiv 2503.14476).
        kl_coef: weight of the KL penalty against the reference policy; 0 needs no reference.
        dual_clip: bound c > 1 on the ratio for negative advantages (arXiv 1912.09729); None for no bound.
        entropy_coef: weight of an entropy bonus; positive values keep the policy more random.
        kl_estimator: "k1", "k2" or "k3", see `rlbench.rl.kl`.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    kl_coef: float = 0.0
    dual_clip: float | None = None
    entropy_coef: float = 0.0
    kl_estimator: str = "k3"

    def __post_init__(self) -> None:
        if not (0 <= self.clip_low <= 1 and self.clip_high >= 0):
            raise LossError(
                f"grpo: clip_low={self.clip_low!r} must lie in [0, 1], "
                f"clip_high={self.clip_high!r} must be >= 0."
            )
        if self.dual_clip is not None and self.dual_clip <= 1:
            raise LossError(f"grpo: dual_clip={self.dual_clip!r} must be > 1, or None for no bound.")
        if self.kl_estimator not in ESTIMATORS:
            raise LossError(
                f"grpo: kl_estimator={self.kl_estimator!r} is unknown. Use one of: {', '.join(ESTIMATORS)}."
            )

    @property
    def needs_reference(self) -> bool:
        """Whether `ref_logprobs` must be there."""
        return self.kl_coef != 0

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor | float]]:
        """Return the loss per token (S, T) and the metrics `ratio`, `clip_fraction`, `ppo_kl` (and `kl`)."""
        log_ratio = _masked(inputs.logprobs - inputs.old_logprobs, inputs.mask)
        ratio = log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
        advantages = _masked(inputs.advantages, inputs.mask)
        free = -advantages * ratio
        clipped = -advantages * ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        loss = torch.maximum(free, clipped)
        if self.dual_clip is not None:
            loss = torch.where(advantages < 0, torch.minimum(loss, -advantages * self.dual_clip), loss)
        metrics: dict[str, Tensor | float] = {
            "ratio": ratio.detach(),
            "clip_fraction": (clipped > free).float(),
            "ppo_kl": -log_ratio.detach(),
        }
        if self.kl_coef != 0:
            kl = self._kl(inputs)
            loss = loss + self.kl_coef * kl
            metrics["kl"] = kl.detach()
        if self.entropy_coef != 0:
            loss = loss - self.entropy_coef * _entropy(inputs)
        return _masked(loss, inputs.mask), metrics

    def _kl(self, inputs: LossInputs) -> Tensor:
        """Return the KL estimate per token (S, T), zero where untrained."""
        if inputs.ref_logprobs is None:
            raise LossError(
                f"{self} needs log-probabilities of a reference policy, and the batch has none. "
                "Add them to the batch from a reference engine, or set kl_coef=0."
            )
        logprobs = _masked(inputs.logprobs, inputs.mask)
        return ESTIMATORS[self.kl_estimator](logprobs, _masked(inputs.ref_logprobs, inputs.mask))


@dataclass(frozen=True)
class reinforce:
    """Plain policy gradient, -advantage * log-probability (Williams 1992): no ratio, no clipping."""

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor | float]]:
        """Return the loss per token (S, T) and the metric `ppo_kl`."""
        loss = -_masked(inputs.advantages, inputs.mask) * _masked(inputs.logprobs, inputs.mask)
        return loss, {"ppo_kl": _masked(inputs.old_logprobs - inputs.logprobs.detach(), inputs.mask)}


NAMED: dict[str, Callable[[], Loss]] = {"grpo": grpo, "reinforce": reinforce}


def resolve(loss: str | Loss) -> Loss:
    """Return the loss value that a name stands for, with its defaults; a callable is returned as it is.

    Raises:
        LossError: an unknown name, a loss class that was not called, or something that cannot be called.
    """
    if isinstance(loss, str):
        if loss not in NAMED:
            raise LossError(
                f"unknown loss {loss!r}{nearest(loss, NAMED)}. Known: {', '.join(NAMED)}; or pass a function "
                "(LossInputs) -> (per_token, metrics)."
            )
        return NAMED[loss]()
    if isinstance(loss, type):
        raise LossError(f"the loss is the class {loss.__name__}; call it to get a loss: {loss.__name__}().")
    if not callable(loss):
        raise LossError(
            f"a loss is a name or a function (LossInputs) -> (per_token, metrics); got {type(loss).__name__}."
        )
    return loss


def _masked(values: Tensor, mask: Tensor) -> Tensor:
    """Replace untrained values by 0; multiplying would let a NaN in the padding through."""
    return torch.where(mask, values, 0.0)


def _entropy(inputs: LossInputs) -> Tensor:
    """Return the entropy with its gradient; refuse a bonus that could not act."""
    if inputs.logprobs.requires_grad and not inputs.entropy.requires_grad:
        raise LossError(
            "entropy_coef has no effect here: `entropy` came without a gradient. "
            "Whoever makes the inputs must compute it with one."
        )
    return inputs.entropy
