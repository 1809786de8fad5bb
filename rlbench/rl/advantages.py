"""From one reward per response to one advantage per response."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rlbench.errors import LossError

AdvantageFunction = Callable[[Tensor, Tensor], Tensor]
"""(rewards (B,), group (B,) int) -> advantages (B,). `group` tells which responses answer the same prompt."""

EQUAL_TOLERANCE = 1e-7
"""Rewards of a group count as equal when they differ by less than this times the largest of them."""


@dataclass(frozen=True)
class group_normalized:
    """Reward relative to the other responses to the same prompt (GRPO, arXiv 2402.03300).

    A group whose rewards are all equal, and a group of one, gets exactly 0. Statistics are float64: in
    float32 rounding noise divided by a tiny deviation gives equal rewards sizeable advantages.

    Attributes:
        std: what the centred rewards are divided by: the deviation of their "group" (GRPO), of the whole
            "batch" (arXiv 2508.08221), or "none" (Dr. GRPO, arXiv 2503.20783).
        ddof: 1 for the unbiased deviation, 0 for that of the population.
        eps: added to the deviation.
        leave_one_out: subtract the mean of the *other* responses (RLOO, arXiv 2402.14740) instead of that of
            the whole group; the deviation stays the whole group's.
    """

    std: str = "group"
    ddof: int = 1
    eps: float = 1e-6
    leave_one_out: bool = False

    def __post_init__(self) -> None:
        if self.std not in ("group", "batch", "none"):
            raise LossError(f'group_normalized: std={self.std!r} is unknown. Use "group", "batch" or "none".')
        if self.ddof not in (0, 1):
            raise LossError(
                f"group_normalized: ddof={self.ddof!r} is neither 0 (population) nor 1 (unbiased)."
            )
        if self.eps < 0:
            raise LossError(f"group_normalized: eps={self.eps!r} is negative.")

    def __call__(self, rewards: Tensor, group: Tensor) -> Tensor:
        """Return the advantages of a batch.

        Args:
            rewards: (B,) one finite reward per response.
            group: (B,) integers; equal numbers mark responses to the same prompt, in any order.

        Returns:
            (B,) in the dtype of `rewards` (float32 for integer or bool rewards).

        Raises:
            LossError: shapes differ, or a reward is not finite.
        """
        _check(rewards, group)
        values = rewards.double()
        groups, index = torch.unique(group, return_inverse=True)
        count = torch.bincount(index, minlength=len(groups)).double()
        mean = _per_group(values, index, len(groups), "sum") / count
        centred = values - mean[index]
        if self.leave_one_out:
            centred = centred * (count / (count - 1).clamp(min=1))[index]
        advantages = centred / self._scale(values, values - mean[index], index, count)
        advantages = torch.where(_has_signal(values, index, len(groups))[index], advantages, 0.0)
        return advantages.to(rewards.dtype if rewards.is_floating_point() else torch.float32)

    def _scale(self, values: Tensor, centred: Tensor, index: Tensor, count: Tensor) -> Tensor:
        """Return the divisor of each response, (B,) float64."""
        if self.std == "none":
            return torch.ones_like(values)
        if self.std == "batch":
            squares = ((values - values.mean()) ** 2).sum() / max(len(values) - self.ddof, 1)
            return (squares.sqrt() + self.eps).expand_as(values)
        squares = _per_group(centred**2, index, len(count), "sum") / (count - self.ddof).clamp(min=1)
        return (squares.sqrt() + self.eps)[index]


def _per_group(values: Tensor, index: Tensor, groups: int, reduce: str) -> Tensor:
    """Reduce (B,) values to (groups,) with "sum", "amax" or "amin"."""
    out = torch.zeros(groups, dtype=values.dtype, device=values.device)
    return out.scatter_reduce(0, index, values, reduce=reduce, include_self=reduce == "sum")


def _has_signal(values: Tensor, index: Tensor, groups: int) -> Tensor:
    """Tell for each group, (groups,) bool, whether its rewards differ."""
    spread = _per_group(values, index, groups, "amax") - _per_group(values, index, groups, "amin")
    return spread > EQUAL_TOLERANCE * _per_group(values.abs(), index, groups, "amax")


def _check(rewards: Tensor, group: Tensor) -> None:
    """Raise LossError unless both are (B,) and the rewards finite."""
    if rewards.dim() != 1 or rewards.shape != group.shape:
        raise LossError(
            f"advantages need rewards and group of one shape (B,); got {tuple(rewards.shape)} "
            f"and {tuple(group.shape)}."
        )
    bad = (~torch.isfinite(rewards)).nonzero().flatten().tolist()
    if bad:
        raise LossError(
            f"{len(bad)} rewards are not finite, first at rows {bad[:5]}. "
            "Mend the reward function and score again."
        )
