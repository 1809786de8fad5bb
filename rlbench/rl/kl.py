"""Estimators of KL(policy || reference) per token, from one sample.

J. Schulman, "Approximating KL divergence", 2020. Each takes the log-probabilities of the sampled tokens under both
policies, in one shape, and returns that shape: float64 for float64, else float32, with gradient. They know no mask:
clear untrained tokens before (`torch.where`), not after.

An estimator of the KL is one thing, a loss whose *gradient* is that of the KL another: in a loss, k2 has it, while
k1 has gradient 0 in expectation and k3 that of KL(reference || policy). "k1+" and "k3+" report the one
value and take k2's gradient.

Clamps of the peers: verl clamps the log-ratio to ±20 and k3 to ±10; OpenRLHF clamps every estimator to ±10; slime
k3 alone; NeMo-RL by option; TRL none. Here the log-ratio is clamped to ±20 where it is exponentiated, nothing else.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rlbench.errors import LossError, nearest

LOG_RATIO_BOUND = 20.0
"""Log-ratios are clamped to ± this before `exp`, so that one absurd token cannot make a batch infinite."""

Estimator = Callable[[Tensor, Tensor], Tensor]


def k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Return log p - log q: unbiased, high variance, may be negative."""
    return _log_ratio(logprobs, ref_logprobs)


def k2(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Return (log p - log q)² / 2: biased, low variance; its gradient is that of the KL."""
    return 0.5 * _log_ratio(logprobs, ref_logprobs) ** 2


def k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Return q/p - log(q/p) - 1: unbiased, low variance, never negative; GRPO's (arXiv 2402.03300).

    Beyond a log-ratio of ±20 the value is constant and the gradient 0.
    """
    log_ratio = (-_log_ratio(logprobs, ref_logprobs)).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return torch.expm1(log_ratio) - log_ratio


def absolute(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Return |log p - log q|: biased, never negative; pulls with the same force at any distance."""
    return _log_ratio(logprobs, ref_logprobs).abs()


def k1_plus(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Return the value of k1 with the gradient of k2 (straight-through; verl's "k1+")."""
    return _with_gradient_of_k2(k1, logprobs, ref_logprobs)


def k3_plus(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Return the value of k3 with the gradient of k2 (straight-through; verl's "k3+")."""
    return _with_gradient_of_k2(k3, logprobs, ref_logprobs)


ESTIMATORS: dict[str, Estimator] = {
    "k1": k1,
    "k2": k2,
    "k3": k3,
    "abs": absolute,
    "k1+": k1_plus,
    "k3+": k3_plus,
}
"""By name. verl calls k1 "kl", k2 "mse", k3 "low_var_kl"."""


def kl_estimator(name: str) -> Estimator:
    """Return the estimator of that name."""
    if name not in ESTIMATORS:
        raise LossError(
            f"unknown KL estimator {name!r}{nearest(name, ESTIMATORS)}. Use one of: {', '.join(ESTIMATORS)}."
        )
    return ESTIMATORS[name]


def ratio_corrected(estimate: Tensor, logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """Return estimate * p / p_old: the KL of the current policy from tokens of an older one.

    DeepSeek-V3.2 (arXiv 2512.02556). The gradient flows through the ratio too: that is what makes it the gradient
    of the KL. `old_logprobs` are those of the policy that sampled; the log-ratio is clamped to ±20.
    """
    if estimate.shape != logprobs.shape:
        raise LossError(f"estimate has shape {tuple(estimate.shape)}; wanted {tuple(logprobs.shape)}.")
    log_ratio = _log_ratio(logprobs, old_logprobs.detach(), "old_logprobs")
    return estimate * log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


def _log_ratio(logprobs: Tensor, other: Tensor, name: str = "ref_logprobs") -> Tensor:
    """Return log p - log q in float32 or wider."""
    if logprobs.shape != other.shape:
        raise LossError(
            f"{name} has shape {tuple(other.shape)}; wanted {tuple(logprobs.shape)}, the shape of logprobs."
        )
    wide = torch.promote_types(torch.promote_types(logprobs.dtype, other.dtype), torch.float32)
    return logprobs.to(wide) - other.to(wide)


def _with_gradient_of_k2(value: Estimator, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    carrier = k2(logprobs, ref_logprobs)
    return value(logprobs, ref_logprobs).detach() + (carrier - carrier.detach())
