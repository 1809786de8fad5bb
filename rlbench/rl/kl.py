"""Estimators of KL(policy || reference) per token, from one sample (J. Schulman, "Approximating KL divergence", 2020).

Each takes the log-probabilities of the sampled tokens under both policies, in one shape, and returns that shape. They
know no mask: clear untrained tokens before (`torch.where`). In a loss, k2 has the gradient of the KL, while k1 has
gradient 0 in expectation and k3 that of KL(reference || policy); "k1+" and "k3+" report the one value and take k2's
gradient. The log-ratio is clamped to ±20 where it is exponentiated, nothing else (verl, OpenRLHF and slime clamp more).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rlbench.rl import checks

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
    """Return q/p - log(q/p) - 1: unbiased, low variance, never negative; GRPO's (arXiv 2402.03300)."""
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


ESTIMATORS: dict[str, Estimator] = {"k1": k1, "k2": k2, "k3": k3, "abs": absolute, "k1+": k1_plus, "k3+": k3_plus}
"""By name. verl calls k1 "kl", k2 "mse", k3 "low_var_kl"."""


def kl_estimator(name: str) -> Estimator:
    """Return the estimator of that name."""
    checks.choice("kl_estimator", "name", name, ESTIMATORS)
    return ESTIMATORS[name]


def _log_ratio(logprobs: Tensor, other: Tensor) -> Tensor:
    """Return log p - log q in float32 or wider."""
    checks.shape("ref_logprobs", other, tuple(logprobs.shape))
    wide = torch.promote_types(torch.promote_types(logprobs.dtype, other.dtype), torch.float32)
    return logprobs.to(wide) - other.to(wide)


def _with_gradient_of_k2(value: Estimator, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    carrier = k2(logprobs, ref_logprobs)
    return value(logprobs, ref_logprobs).detach() + (carrier - carrier.detach())
