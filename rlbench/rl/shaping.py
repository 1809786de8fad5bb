"""What is done to rewards and masks before advantages are taken from them.

The order that makes sense: score, penalise length and truncation, clip, normalise by the running scale, then the
estimator. Group estimators subtract and divide by their own statistics: normalising after them undoes them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from rlbench.errors import LossError
from rlbench.rl.groups import EQUAL_TOLERANCE, Groups
from rlbench.rl.reward_checks import (
    Checked,
    check_finite,
    check_number,
    check_rewards,
    check_shape,
    output_dtype,
    within,
)


def clip_values(values: Tensor, low: float, high: float, mask: Tensor | None = None) -> tuple[Tensor, float]:
    """Clip rewards or advantages of any shape; return them, and the share of counted values that stood outside.

    The result is 0 outside `mask` (None counts all), and keeps the dtype.
    """
    if not low < high:
        raise LossError(f"clip_values: low={low!r} must be below high={high!r}.")
    counted = torch.ones_like(values, dtype=torch.bool) if mask is None else mask
    check_shape("mask", counted, tuple(values.shape))
    clean = torch.where(counted, values, torch.zeros((), dtype=values.dtype, device=values.device))
    if torch.isnan(clean).any():
        raise LossError(f"clip_values: {int(torch.isnan(clean).sum())} values are NaN; a bound does not mend them.")
    outside = ((clean < low) | (clean > high)) & counted
    share = int(outside.sum()) / max(int(counted.sum()), 1)
    return torch.where(counted, clean.clamp(low, high), torch.zeros_like(clean)), share


@dataclass(frozen=True)
class RunningMoments(Checked):
    """Mean and spread of all rewards seen so far, as an immutable value (Welford 1962; merging: Chan et al. 1983).

        moments = moments.update(rewards)
        rewards = moments.normalized(rewards)

    `squares` is the sum of the squared distances from `mean`.
    """

    count: int = within(0, 0)
    mean: float = 0.0
    squares: float = within(0.0, 0.0)

    def update(self, values: Tensor, mask: Tensor | None = None) -> RunningMoments:
        """Return the moments with these values added; `mask` says which count, None for all."""
        if mask is not None:
            check_shape("mask", mask, tuple(values.shape))
        counted = (values if mask is None else values[mask]).double().flatten()
        check_finite("values", counted)
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

    -factor * clip(length - (max_length - buffer), 0, buffer) / buffer: nothing until the buffer begins, then linear,
    and -factor from the limit on. `lengths` (B,) counts all response tokens, trained or not.
    """
    if lengths.dim() != 1 or not (lengths >= 0).all():
        raise LossError(f"lengths has shape {tuple(lengths.shape)}; wanted (B,) numbers of tokens, at least 0.")
    check_number("overlong_penalty", "max_length", max_length, 1)
    check_number("overlong_penalty", "buffer", buffer, 1, max_length)
    check_number("overlong_penalty", "factor", factor, 0.0)
    over = (lengths.double() - (max_length - buffer)).clamp(0, buffer)
    return -factor * over / buffer


def stop_properly(
    rewards: Tensor, truncated: Tensor, *, scale: float | None = None, value: float | None = None
) -> Tensor:
    """Return the rewards with those of truncated responses scaled down or replaced (ProRL v2), (B,).

    J. Hu et al., "ProRL v2", 2025, a report that continues ProRL (arXiv 2505.24864) and is not on arXiv. OpenRLHF's and
    NeMo-RL's `stop_properly_penalty_coef`: from 0 to 1 it is `scale`; below 0, in OpenRLHF alone, it is `value`. Where
    rewards can be negative give `value`: scaling brings a negative reward nearer to 0.
    """
    check_rewards(rewards)
    check_shape("truncated", truncated, tuple(rewards.shape))
    out, cut = rewards.to(output_dtype(rewards)), truncated.bool()
    if (scale is None) == (value is None):
        raise LossError(f"stop_properly: give exactly one of scale and value; got scale={scale!r}, value={value!r}.")
    if value is not None:
        if not math.isfinite(value):
            raise LossError(f"stop_properly: value={value!r} is not finite.")
        return torch.where(cut, value, out)
    assert scale is not None
    check_number("stop_properly", "scale", scale, 0.0, 1.0)
    return torch.where(cut, out * scale, out)


def without_truncated(mask: Tensor, truncated: Tensor) -> Tensor:
    """Return the mask (B, T) with the rows of truncated responses cleared (overlong filtering, DAPO, arXiv 2503.14476).

    They still count in the statistics of their group, but train nothing (TRL's `mask_truncated_completions`).
    """
    check_shape("truncated", truncated, tuple(mask.shape[:1]))
    return mask & ~truncated.bool()[:, None]


# -- dynamic sampling -----------------------------------------------------------------------------------------


def groups_with_signal(rewards: Tensor, group: Tensor) -> Tensor:
    """Tell which responses belong to a group whose rewards differ, (B,) bool.

    Dynamic sampling (DAPO, arXiv 2503.14476) keeps these and samples more prompts in place of the rest.
    """
    check_rewards(rewards, group)
    return Groups.of(group).differ(rewards.double())


def groups_within(rewards: Tensor, group: Tensor, low: float, high: float) -> Tensor:
    """Tell which responses belong to a group whose mean reward lies strictly between two bounds, (B,) bool.

    OpenRLHF's dynamic filtering; with rewards 0 and 1 and bounds 0 and 1 it equals `groups_with_signal`.
    """
    check_rewards(rewards, group)
    if not low < high:
        raise LossError(f"groups_within: low={low!r} must be below high={high!r}.")
    mean = Groups.of(group).mean(rewards.double())
    return (mean > low) & (mean < high)


def rows_of_groups(kept: Tensor, group: Tensor, limit: int | None = None) -> Tensor:
    """Return the rows, ascending, of the first `limit` groups all of whose responses are kept.

    With `limit`, each step has the same number of prompts, whatever dynamic sampling (arXiv 2503.14476) left over.
    """
    check_shape("kept", kept, tuple(group.shape))
    if limit is not None:
        check_number("rows_of_groups", "limit", limit, 1)
    groups = Groups.of(group)
    rows = torch.arange(len(group), device=group.device)
    first = torch.full((len(groups.count),), len(group), dtype=torch.int64, device=group.device)
    first = first.scatter_reduce(0, groups.index, rows, reduce="amin")
    whole = groups.total(kept.double()) == groups.count
    chosen = first[whole].sort().values[:limit]
    return rows[torch.isin(first[groups.index], chosen)]
