"""A baseline for each token position instead of each response: the optimal token baseline."""

from __future__ import annotations

import torch
from torch import Tensor

from rlbench.errors import LossError
from rlbench.rl.advantages import SINGLETON, finish
from rlbench.rl.groups import Groups
from rlbench.rl.recurrence import carried_back
from rlbench.rl.reward_checks import check_choice, check_mask, check_shape, clean_tokens, output_dtype


def optimal_token_baseline(
    token_rewards: Tensor,
    group: Tensor,
    mask: Tensor,
    logprobs: Tensor,
    sum_p_squared: Tensor,
    weights: Tensor | None = None,
    singleton: str = "zero",
) -> Tensor:
    """Return rewards to go minus the baseline of least gradient variance at each token (OTB, arXiv 2602.07078), (B, T).

        w_t = (1 - 2 p_t + sum_v p_v²) weight_t²    W_t = w_1 + … + w_t    B_t = sum_i G_it W_it / sum_i W_it

    w_t is the squared norm of the gradient of the log-probability by the logits; sums over i run over the responses to
    one prompt, t counts trained tokens alone, so that tool output shifts nothing (verl's "tir" variant).

    Args:
        sum_p_squared: (B, T) sum over the vocabulary of the squared probabilities, in (0, 1].
        weights: (B, T) truncated importance weights that the loss will apply, ≥ 0; None for 1.
        singleton: what a token gets where no other response to the prompt is as long: "zero", or "raw", its reward
            to go (verl's default).
    """
    check_mask(mask)
    check_choice("optimal_token_baseline", "singleton", singleton, SINGLETON)
    check_shape("group", group, (len(mask),))
    reward = clean_tokens("token_rewards", token_rewards, mask)
    p = clean_tokens("logprobs", logprobs, mask).exp()
    collision = clean_tokens("sum_p_squared", sum_p_squared, mask)
    if not ((collision[mask] > 0) & (collision[mask] <= 1 + 1e-6)).all():
        raise LossError("sum_p_squared must lie in (0, 1] at trained tokens: it is a sum of squared probabilities.")
    energy = 1.0 - 2.0 * p + collision
    if weights is not None:
        energy = energy * clean_tokens("weights", weights, mask) ** 2
    energy = torch.where(mask, energy, 0.0).cumsum(1)
    to_go = carried_back(reward, 1.0, mask)

    column = mask.cumsum(1) - 1
    place = Groups.of(group).index[:, None] * mask.shape[1] + column
    same_place, values, energies = Groups.of(place[mask]), to_go[mask], energy[mask]
    total = same_place.total(energies)[same_place.index]
    weighted = same_place.total(energies * values)[same_place.index]
    baseline = torch.where(total > 0, weighted / total, same_place.mean(values))
    advantages = torch.zeros_like(to_go)
    if len(values):
        advantages[mask] = finish(values - baseline, values, same_place, singleton)
    return advantages.to(output_dtype(token_rewards))
