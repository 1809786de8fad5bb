"""Statistics of the responses to one prompt, in float64.

In float32, rounding noise divided by a tiny deviation gives equal rewards sizeable advantages: eight rewards of 0.7
get up to 0.95. Everything here is float64, and equal rewards are recognised as equal.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

EQUAL_TOLERANCE = 1e-7
"""Rewards of a group count as equal when they differ by less than this times the largest of them."""


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
        """Return each group's sum of (B,) values, (G,)."""
        return self._reduce(values, "sum")

    def mean(self, values: Tensor) -> Tensor:
        """Return the group mean seen by each row, (B,)."""
        return (self.total(values) / self.count)[self.index]

    def deviation(self, values: Tensor, ddof: int = 1) -> Tensor:
        """Return the group's standard deviation seen by each row, (B,); 0 for a group of one."""
        squares = self.total((values - self.mean(values)) ** 2)
        return (squares / (self.count - ddof).clamp(min=1)).sqrt()[self.index]

    def differ(self, values: Tensor) -> Tensor:
        """Tell for each row, (B,) bool, whether the values of its group differ."""
        spread = self._reduce(values, "amax") - self._reduce(values, "amin")
        return (spread > EQUAL_TOLERANCE * self._reduce(values.abs(), "amax"))[self.index]

    def _reduce(self, values: Tensor, how: str) -> Tensor:
        out = torch.zeros(len(self.count), dtype=values.dtype, device=values.device)
        return out.scatter_reduce(0, self.index, values, reduce=how, include_self=how == "sum")
