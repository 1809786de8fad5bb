"""Statistics of the responses to one prompt, and the one whitening of a batch, in float64."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlbench.rl import checks
from rlbench.rl.checks import output_dtype

EQUAL_TOLERANCE = 1e-7
"""Rewards of a group count as equal when they differ by less than this times the largest of them."""
WHITEN_EPS = 1e-8
"""Added to the variance (verl's; OpenRLHF clamps a population variance at it, TRL adds 1e-4 to the deviation)."""


@dataclass(frozen=True)
class Groups:
    """Which rows of a batch answer the same prompt: `index` (B,) int64, from 0; `count` (G,) float64, rows of each."""

    index: Tensor
    count: Tensor

    @classmethod
    def of(cls, group: Tensor) -> Groups:
        """Number the groups of (B,) integers, in any order."""
        numbers, index = torch.unique(group, return_inverse=True)
        return cls(index=index, count=torch.bincount(index, minlength=len(numbers)).double())

    @property
    def size(self) -> Tensor:
        """How many rows the group of each row has, (B,) float64."""
        return self.count[self.index]

    def total(self, values: Tensor) -> Tensor:
        """Return the group's sum of (B,) values seen by each row, (B,)."""
        return self._reduce(values, "sum")[self.index]

    def mean(self, values: Tensor) -> Tensor:
        """Return the group mean seen by each row, (B,)."""
        return self.total(values) / self.size

    def deviation(self, values: Tensor, ddof: int = 1) -> Tensor:
        """Return the group's standard deviation seen by each row, (B,); 0 for a group of one."""
        squares = self.total((values - self.mean(values)) ** 2)
        return (squares / (self.size - ddof).clamp(min=1)).sqrt()

    def differ(self, values: Tensor) -> Tensor:
        """Tell for each row, (B,) bool, whether the values of its group differ."""
        spread = self._reduce(values, "amax") - self._reduce(values, "amin")
        return (spread > EQUAL_TOLERANCE * self._reduce(values.abs(), "amax"))[self.index]

    def _reduce(self, values: Tensor, how: str) -> Tensor:
        out = torch.zeros(len(self.count), dtype=values.dtype, device=values.device)
        return out.scatter_reduce(0, self.index, values, reduce=how, include_self=how == "sum")


def whiten(values: Tensor, mask: Tensor | None = None, eps: float = WHITEN_EPS) -> Tensor:
    """Shift and scale to (x - mean) / sqrt(unbiased variance + eps) over the trained entries; any shape.

    Entries that are all equal, and a single one, become exactly 0. An estimator whitens at most once (field `whiten`).
    """
    counted = torch.ones_like(values, dtype=torch.bool) if mask is None else mask
    checks.shape("mask", counted, tuple(values.shape))
    x = torch.where(counted, values.double(), 0.0)
    checks.finite("values", x)
    kept = x[counted]
    if kept.numel() < 2 or kept.max() - kept.min() <= EQUAL_TOLERANCE * kept.abs().max():
        return torch.zeros_like(values, dtype=output_dtype(values))
    scaled = (x - kept.mean()) * torch.rsqrt(kept.var(correction=1) + eps)
    return torch.where(counted, scaled, 0.0).to(output_dtype(values))
