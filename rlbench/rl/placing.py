"""Rewards of responses, turns and steps, placed on the tokens that earned them.

The result is `token_rewards` (B, T), which the estimators of `rlbench.rl.returns` take instead of one reward per
response. A reward is never lost in silence: one that would fall on an untrained token is refused.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlbench.errors import LossError
from rlbench.rl.kl import kl_estimator
from rlbench.rl.recurrence import last_of_turn, last_trained
from rlbench.rl.reward_checks import (
    check_finite,
    check_mask,
    check_number,
    check_rewards,
    check_shape,
    clean_tokens,
    output_dtype,
)


def at_last_token(rewards: Tensor, mask: Tensor) -> Tensor:
    """Place rewards (B,) on the last trained token of each response, (B, T); a row without one stays 0."""
    check_rewards(rewards)
    check_mask(mask, len(rewards))
    return torch.where(last_trained(mask), rewards[:, None].to(output_dtype(rewards)), 0.0)


def at_turn_ends(turn_rewards: Tensor, turns: Tensor, mask: Tensor) -> Tensor:
    """Place the reward of each turn on the turn's last trained token, (B, T).

    `turn_rewards` (B, K) holds turn k in column k, 0 or NaN for turns that a response does not have; `turns` (B, T)
    integers from 0. A reward whose turn has no trained token is refused.
    """
    check_mask(mask)
    if turn_rewards.dim() != 2 or len(turn_rewards) != len(mask):
        raise LossError(f"turn_rewards has shape {tuple(turn_rewards.shape)}; wanted ({len(mask)}, K).")
    _, ends = last_of_turn(turns, mask)
    row, column = ends[:, 0], ends[:, 1]
    number = turns[row, column].to(torch.int64)
    columns = turn_rewards.shape[1]
    outside = (number < 0) | (number >= columns)
    if outside.any():
        raise LossError(
            f"turns holds {int(number[outside][0])} at row {int(row[outside][0])}; wanted numbers from 0 to "
            f"{columns - 1}, the columns of turn_rewards {tuple(turn_rewards.shape)}."
        )
    earned = turn_rewards[row, number]
    check_finite("turn_rewards", earned)
    spare = turn_rewards.clone()
    spare[row, number] = 0.0
    lost = ~((spare == 0) | torch.isnan(spare))
    if lost.any():
        i, k = lost.nonzero()[0].tolist()
        raise LossError(
            f"turn_rewards[{i}, {k}]={float(turn_rewards[i, k]):g}, but response {i} has no trained token in turn {k}."
        )
    placed = torch.zeros(mask.shape, dtype=output_dtype(turn_rewards), device=mask.device)
    placed[row, column] = earned.to(placed.dtype)
    return placed


def at_positions(step_rewards: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
    """Place rewards on given tokens, e.g. those of a process reward model; rewards on one token add up, (B, T).

    `step_rewards` and `positions` are (B, S): columns of `mask`, -1 where a response has fewer steps. An untrained
    position is refused.
    """
    check_mask(mask)
    if positions.dim() != 2 or len(positions) != len(mask):
        raise LossError(f"positions has shape {tuple(positions.shape)}; wanted ({len(mask)}, S).")
    check_shape("step_rewards", step_rewards, tuple(positions.shape))
    given = positions != -1
    where = positions.to(torch.int64)
    inside = (where >= 0) & (where < mask.shape[1])
    trained = mask.gather(1, torch.where(inside, where, 0)) & inside
    if (given & ~trained).any():
        i, s = (given & ~trained).nonzero()[0].tolist()
        raise LossError(
            f"positions[{i}, {s}]={int(where[i, s])} is not a trained token of response {i}; a reward there would be "
            "lost. Move it to the trained token before."
        )
    earned = torch.where(given, step_rewards.to(output_dtype(step_rewards)), 0.0)
    check_finite("step_rewards", earned)
    placed = torch.zeros(mask.shape, dtype=earned.dtype, device=mask.device)
    return placed.scatter_add(1, torch.where(given, where, 0), earned)


def kl_in_reward(
    rewards: Tensor,
    logprobs: Tensor,
    ref_logprobs: Tensor,
    mask: Tensor,
    coef: float,
    estimator: str = "k1",
) -> Tensor:
    """Take the KL against a reference off the rewards, token by token (Ziegler et al., arXiv 1909.08593), (B, T).

    r_t = -coef KL_t + R at the last trained token. Summed over tokens (`.sum(1)`) it is the penalised reward of the
    response, as the group estimators take it. `logprobs` are those of the policy that sampled; `coef` ≥ 0 (a
    controller's `.coef`). OpenRLHF and TRL's RLOO use k1 here; no gradient flows, so that "k1+" is k1 and "k3+" is k3.
    """
    check_number("kl_in_reward", "coef", coef, 0.0)
    estimate = kl_estimator(estimator)
    placed = at_last_token(rewards, mask)
    p = clean_tokens("logprobs", logprobs.detach(), mask)
    q = clean_tokens("ref_logprobs", ref_logprobs, mask)
    return (placed - coef * estimate(p, q)).to(placed.dtype)
