"""Estimators of KL(policy || reference) per token, from one sample.

J. Schulman, "Approximating KL divergence", 2020. Each takes the log-probabilities of the sampled tokens under
both policies, in one shape, and returns that shape.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

LOG_RATIO_BOUND = 20.0
"""Log-ratios are clamped to ± this before `exp`, so that one absurd token cannot make a batch infinite."""


def k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Return log p - log q: unbiased, high variance, may be negative."""
    return logprobs - ref_logprobs


def k2(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Return (log p - log q)² / 2: biased, low variance; its gradient is that of the KL."""
    return 0.5 * (logprobs - ref_logprobs) ** 2


def k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Return q/p - log(q/p) - 1: unbiased, low variance, never negative; GRPO's (arXiv 2402.03300)."""
    log_ratio = (ref_logprobs - logprobs).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return torch.expm1(log_ratio) - log_ratio


ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}
