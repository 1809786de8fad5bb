"""What is done to rewards and masks before advantages are taken from them.

In this order: score, penalise length and truncation, clip, normalise by the running scale, then the estimator.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from rlbench.errors import LossError
from rlbench.rl import checks
from rlbench.rl.checks import Checked, output_dtype, within
from rlbench.rl.groups import EQUAL_TOLERANCE, Groups


def clip_values(values: Tensor, low: float, high: float, mask: Tensor | None = None) -> tuple[Tensor, float]:
    """Clip rewards or advantages, 0 outside `mask`; return them, and the share of counted values that stood outside."""
    if not low < high:
        raise LossError(f"clip_values: low={low!r} must be below high={high!r}.")
    counted = torch.ones_like(values, dtype=torch.bool) if mask is None else mask
    checks.shape("mask", counted, tuple(values.shape))
    clean = torch.where(counted, values, torch.zeros_like(values))
    if torch.isnan(clean).any():
        raise LossError(f"clip_values: {int(torch.isnan(clean).sum())} values are NaN; a bound does not mend them.")
    outside = ((clean < low) | (clean > high)) & counted
    share = int(outside.sum()) / max(int(counted.sum()), 1)
    return torch.where(counted, clean.clamp(low, high), torch.zeros_like(clean)), share


@dataclass(frozen=True)
class RunningMoments(Checked):
    """Mean and spread of all rewards seen so far, as an immutable value (Welford 1962; merging: Chan et al. 1983).

    `squares` is the sum of the squared distances from `mean`.
    """

    count: int = within(0, 0)
    mean: float = 0.0
    squares: float = within(0.0, 0.0)

    def update(self, values: Tensor, mask: Tensor | None = None) -> RunningMoments:
        """Return the moments with these values added; `mask` says which count, None for all."""
        if mask is not None:
            checks.shape("mask", mask, tuple(values.shape))
        counted = (values if mask is None else values[mask]).double().flatten()
        checks.finite("values", counted)
        if not len(counted):
            return self
        mean = counted.mean()
        squares = ((counted - mean) ** 2).sum()
        return self.merge(RunningMoments(len(counted), float(mean), float(squares)))

    def merge(self, other: RunningMoments) -> RunningMoments:
        """Return the moments of what both have seen, e.g. of two ranks; the order does not matter."""
        count = self.count + other.count
        if count == 0:
            return self
        gap = other.mean - self.mean
        return RunningMoments(
            count=count,
            mean=self.mean + gap * other.count / count,
            squares=self.squares + other.squares + gap * gap * self.count * other.count / count,
        )

    @property
    def std(self) -> float:
        """Unbiased standard deviation; 0 while fewer than two values, or only equal ones, were seen."""
        if self.count < 2:
            return 0.0
        deviation = math.sqrt(self.squares / (self.count - 1))
        return deviation if deviation > EQUAL_TOLERANCE * abs(self.mean) else 0.0

    def normalized(self, values: Tensor, centre: bool = True) -> Tensor:
        """Return (values - mean) / std, or values / std without `centre`; while std is 0, undivided."""
        x = values.double() - (self.mean if centre else 0.0)
        return (x / (self.std or 1.0)).to(output_dtype(values))


def overlong_penalty(lengths: Tensor, max_length: int, buffer: int, factor: float = 1.0) -> Tensor:
    """Return what to add to the rewards of responses near the length limit (DAPO, arXiv 2503.14476), (B,) float64.

    -factor * clip(length - (max_length - buffer), 0, buffer) / buffer; `lengths` (B,) counts all response tokens.
    """
    checks.number("overlong_penalty", "max_length", max_length, 1)
    checks.number("overlong_penalty", "buffer", buffer, 1, max_length)
    checks.number("overlong_penalty", "factor", factor, 0.0)
    checks.counts("lengths", lengths, (lengths.numel(),))
    over = (lengths.double() - (max_length - buffer)).clamp(0, buffer)
    return -factor * over / buffer


def stop_properly(
    rewards: Tensor, truncated: Tensor, *, scale: float | None = None, value: float | None = None
) -> Tensor:
    """Return the rewards with those of truncated responses scaled down or replaced, (B,).

    J. Hu et al., "ProRL v2", 2025 (continues arXiv 2505.24864). OpenRLHF's `stop_properly_penalty_coef` is `scale`
    from 0 to 1, `value` below 0.
    """
    checks.rewards(rewards)
    checks.shape("truncated", truncated, tuple(rewards.shape))
    out, cut = rewards.to(output_dtype(rewards)), truncated.bool()
    if scale is not None and value is None:
        checks.number("stop_properly", "scale", scale, 0.0, 1.0)
        return torch.where(cut, out * scale, out)
    if value is not None and scale is None:
        checks.finite("value", torch.tensor(value))
        return torch.where(cut, value, out)
    raise LossError(f"stop_properly: give exactly one of scale and value; got scale={scale!r}, value={value!r}.")


def without_truncated(mask: Tensor, truncated: Tensor) -> Tensor:
    """Return the mask (B, T) with the rows of truncated responses cleared (DAPO, arXiv 2503.14476)."""
    checks.shape("truncated", truncated, tuple(mask.shape[:1]))
    return mask & ~truncated.bool()[:, None]


def groups_with_signal(rewards: Tensor, group: Tensor) -> Tensor:
    """Tell which responses have a group whose rewards differ, (B,) bool (dynamic sampling, arXiv 2503.14476)."""
    checks.rewards(rewards, group)
    return Groups.of(group).differ(rewards.double())


def groups_within(rewards: Tensor, group: Tensor, low: float, high: float) -> Tensor:
    """Tell which responses have a group whose mean reward lies between two bounds, (B,) bool (OpenRLHF)."""
    checks.rewards(rewards, group)
    if not low < high:
        raise LossError(f"groups_within: low={low!r} must be below high={high!r}.")
    mean = Groups.of(group).mean(rewards.double())
    return (mean > low) & (mean < high)
