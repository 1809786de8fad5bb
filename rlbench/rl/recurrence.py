"""Sums that run from the end of a response to its start, and the places where turns end.

Untrained tokens (tool output, padding) are passed through: they add nothing and do not discount.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlbench.rl.reward_checks import check_shape


def carried_back(values: Tensor, factor: float | Tensor, mask: Tensor) -> Tensor:
    """Return y (B, T) with y_t = x_t + factor y_{t+1} at trained tokens, and y_t = y_{t+1} at the others.

    `values` x is zero outside the mask, `factor` one number or (B, 1). Solved by doubling: after pass s each y covers
    2^s tokens, so 32k tokens take 15 passes over the batch.
    """
    y = values.clone()
    reach = torch.where(mask, torch.as_tensor(factor, dtype=y.dtype, device=y.device), 1.0)
    step = 1
    while step < y.shape[1]:
        y = torch.cat([y[:, :-step] + reach[:, :-step] * y[:, step:], y[:, -step:]], dim=1)
        reach = torch.cat([reach[:, :-step] * reach[:, step:], reach[:, -step:] * 0.0], dim=1)
        step *= 2
    return y


def next_trained(values: Tensor, mask: Tensor, after_last: Tensor) -> Tensor:
    """Return for each token the value at the next trained token, (B, T); (B,) `after_last` where there is none."""
    width = mask.shape[1]
    position = torch.where(mask, torch.arange(width, device=mask.device), width)
    position = torch.cat([position[:, 1:], torch.full_like(position[:, :1], width)], dim=1)
    position = position.flip(1).cummin(1).values.flip(1)
    return torch.cat([values, after_last[:, None]], dim=1).gather(1, position)


def last_trained(mask: Tensor) -> Tensor:
    """Mark the last trained token of each row, (B, T) bool; nothing in a row without one."""
    return mask & (mask.flip(1).cumsum(1).flip(1) == 1)


def last_of_turn(turns: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Number the turns that have a trained token, and find where each ends.

    Returns the turn of each trained token, numbered over the whole batch, (trained,) in the order of `mask.nonzero()`;
    and (turns, 2) int64, row and column of each turn's last trained token.
    """
    check_shape("turns", turns, tuple(mask.shape))
    row, column = mask.nonzero().unbind(1)
    values, turn = torch.unique(turns[mask], return_inverse=True)
    keys, index = torch.unique(row * len(values) + turn, return_inverse=True)
    last = torch.zeros(len(keys), dtype=torch.int64, device=mask.device)
    last = last.scatter_reduce(0, index, column, reduce="amax")
    return index, torch.stack([keys // max(len(values), 1), last], dim=1)
