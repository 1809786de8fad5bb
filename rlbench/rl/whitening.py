"""The one place where a batch of advantages is whitened.

An advantage is whitened at most once: an estimator that does it says so in a `whiten` field, and nothing after it
does it again. Two passes hide the scale that the first one chose.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlbench.rl.groups import EQUAL_TOLERANCE
from rlbench.rl.reward_checks import check_finite, check_shape, output_dtype

WHITEN_EPS = 1e-8
"""Added to the variance (verl's; OpenRLHF clamps a population variance at it, TRL adds 1e-4 to the deviation)."""


def whiten(values: Tensor, mask: Tensor | None = None, eps: float = WHITEN_EPS) -> Tensor:
    """Shift and scale to mean 0 and unbiased variance 1 over the trained entries; any shape.

    (x - mean) / sqrt(variance + eps), with one weight per entry: in a (B, T) batch a long response counts more.
    Statistics are float64. Entries that are all equal, and a single one, become exactly 0.
    """
    counted = torch.ones_like(values, dtype=torch.bool) if mask is None else mask
    check_shape("mask", counted, tuple(values.shape))
    x = torch.where(counted, values.double(), 0.0)
    check_finite("values", x)
    kept = x[counted]
    if kept.numel() < 2 or kept.max() - kept.min() <= EQUAL_TOLERANCE * kept.abs().max():
        return torch.zeros_like(values, dtype=output_dtype(values))
    scaled = (x - kept.mean()) * torch.rsqrt(kept.var(correction=1) + eps)
    return torch.where(counted, scaled, 0.0).to(output_dtype(values))
