"""Rewards of responses, turns and steps, placed on the tokens that earned them: `token_rewards` (B, T)."""

from __future__ import annotations

import torch
from torch import Tensor

from rlbench.errors import LossError
from rlbench.rl import checks
from rlbench.rl.checks import clean_tokens, output_dtype
from rlbench.rl.kl import kl_estimator


def at_last_token(rewards: Tensor, mask: Tensor) -> Tensor:
    """Place rewards (B,) on the last trained token of each response, (B, T); a row without one stays 0."""
    checks.rewards(rewards)
    checks.mask(mask, len(rewards))
    return torch.where(last_trained(mask), rewards[:, None].to(output_dtype(rewards)), 0.0)


def at_turn_ends(turn_rewards: Tensor, turns: Tensor, mask: Tensor) -> Tensor:
    """Place the reward of each turn on the turn's last trained token, (B, T); refuse one whose turn has none.

    `turn_rewards` (B, K) holds turn k in column k, 0 or NaN for turns that a response does not have; `turns` from 0.
    """
    checks.mask(mask)
    if turn_rewards.dim() != 2 or len(turn_rewards) != len(mask):
        raise LossError(f"turn_rewards has shape {tuple(turn_rewards.shape)}; wanted ({len(mask)}, K).")
    row, column = last_of_turn(turns, mask)[1].unbind(1)
    number = turns[row, column].to(torch.int64)
    if ((number < 0) | (number >= turn_rewards.shape[1])).any():
        raise LossError(f"turns holds {int(number.min())} to {int(number.max())}; wanted columns of turn_rewards.")
    earned = turn_rewards[row, number]
    checks.finite("turn_rewards", earned)
    spare = torch.nan_to_num(turn_rewards)
    spare[row, number] = 0.0
    if spare.any():
        i, k = spare.nonzero()[0].tolist()
        raise LossError(f"turn_rewards[{i}, {k}] would be lost: response {i} has no trained token in turn {k}.")
    placed = torch.zeros(mask.shape, dtype=output_dtype(turn_rewards), device=mask.device)
    placed[row, column] = earned.to(placed.dtype)
    return placed


def at_positions(step_rewards: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
    """Place rewards (B, S) on trained tokens, e.g. those of a process reward model; on one token they add up, (B, T).

    `positions` (B, S) are columns of `mask`, -1 where a response has fewer steps.
    """
    checks.mask(mask)
    if positions.dim() != 2 or len(positions) != len(mask):
        raise LossError(f"positions has shape {tuple(positions.shape)}; wanted ({len(mask)}, S).")
    checks.shape("step_rewards", step_rewards, tuple(positions.shape))
    where = positions.to(torch.int64)
    present, inside = where != -1, (where >= 0) & (where < mask.shape[1])
    trained = mask.gather(1, torch.where(inside, where, 0)) & inside
    if (present & ~trained).any():
        i, s = (present & ~trained).nonzero()[0].tolist()
        raise LossError(f"positions[{i}, {s}]={int(where[i, s])} is not a trained token of response {i}.")
    earned = torch.where(present, step_rewards.to(output_dtype(step_rewards)), 0.0)
    checks.finite("step_rewards", earned)
    placed = torch.zeros(mask.shape, dtype=earned.dtype, device=mask.device)
    return placed.scatter_add(1, torch.where(present, where, 0), earned)


def kl_in_reward(
    rewards: Tensor, logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, coef: float, estimator: str = "k1"
) -> Tensor:
    """Take the KL against a reference off the rewards, token by token (Ziegler et al., arXiv 1909.08593), (B, T).

    r_t = -coef KL_t + R at the last trained token, without gradient; `.sum(1)` is the penalised reward of the response.
    """
    checks.number("kl_in_reward", "coef", coef, 0.0)
    estimate = kl_estimator(estimator)
    placed = at_last_token(rewards, mask)
    p = clean_tokens("logprobs", logprobs.detach(), mask)
    q = clean_tokens("ref_logprobs", ref_logprobs, mask)
    return (placed - coef * estimate(p, q)).to(placed.dtype)


# -- along a response, from its end to its start


def carried_back(values: Tensor, factor: float | Tensor, mask: Tensor) -> Tensor:
    """Return y (B, T) with y_t = x_t + factor y_{t+1} at trained tokens, and y_t = y_{t+1} at the others.

    `values` x is zero outside the mask, `factor` one number or (B, 1). Solved by doubling, in log2(T) passes.
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
    checks.shape("turns", turns, tuple(mask.shape))
    row, column = mask.nonzero().unbind(1)
    values, turn = torch.unique(turns[mask], return_inverse=True)
    keys, index = torch.unique(row * len(values) + turn, return_inverse=True)
    last = torch.zeros(len(keys), dtype=torch.int64, device=mask.device)
    last = last.scatter_reduce(0, index, column, reduce="amax")
    return index, torch.stack([keys // max(len(values), 1), last], dim=1)
