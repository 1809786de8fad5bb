"""What is done to the scores of a rank's samples, and their advantages by the name of an estimator.

    score -> overlong penalty -> clip -> running norm -> the estimator's own comparison within groups

Each estimator compares within groups, which lie whole on one rank, or not at all; what is over all samples, the one
whitening, is over all ranks. A sample without a trained token (it was cut by an interrupt) is compared with none.

| name | reward of a response | advantage of a token |
|---|---|---|
| gae | R | GAE(gamma, lambd) of the critic's values |
| reinforce, reinforce++ | R | discounted return; reinforce++ whitened |
| rloo | R - mean of the others of its group | discounted return |
| reinforce_baseline | R - mean of its group | return, whitened |
| group_norm, grpo | (R - mean) / (std + 1e-9), unbiased std | discounted return |
| cpgd | R, less the KL of the whole response | (s - mean) / (std + 1e-6), population std, of the group |

Without `use_kl_loss` each token's reward loses kl_coef times its KL to the reference, and the response's reward stands
on its last trained token. `advantages_norm` whitens once, after that; `advantage_clip` comes last.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from rlbench import rl
from rlbench.data.base.ragged import Ragged
from rlbench.strategies.options.config import StrategyConfig
from rlbench.strategies.ranks.control import ControlGroup
from rlbench.trainers.experience.over_ranks import moments_over_ranks, whitened
from rlbench.trainers.passes.packing import Grid

Compare = Callable[[Tensor, Tensor], Tensor]


def _less_mean(rewards: Tensor, group: Tensor) -> Tensor:
    one = torch.ones(len(rewards), 1, dtype=torch.bool)
    return rl.reinforce_plus_plus_baseline(whiten=False)(rewards, group, mask=one)[:, 0]


COMPARED: dict[str, Compare] = {
    "rloo": rl.rloo(),
    "group_norm": rl.group_normalized(eps=1e-9),
    "grpo": rl.group_normalized(eps=1e-9),
    "reinforce_baseline": _less_mean,
}
WHITEN = ("reinforce_baseline", "reinforce++")
"""Estimators that whiten whatever `advantages_norm` says."""


@dataclass(frozen=True)
class Shaped:
    """Of B samples: `rewards` float64, NaN where there is no score; `overlong`: penalised for its length; `clipped`:
    stood outside the bound before it was clamped; `moments` of all scores of all ranks so far, these included.
    """

    rewards: np.ndarray
    overlong: np.ndarray
    clipped: np.ndarray
    moments: rl.RunningMoments


def shaped(
    scores: np.ndarray,
    lengths: np.ndarray,
    max_length: int,
    options: StrategyConfig,
    moments: rl.RunningMoments,
    control: ControlGroup,
) -> Shaped:
    """Shape the scores (B,) of this rank's samples, NaN for those that do not count, which moves nothing; collective.

    `lengths` (B,) are response tokens, trained or not, `max_length` the limit they were sampled under.
    """
    counts = ~np.isnan(scores)
    rewards = torch.from_numpy(np.asarray(scores, np.float64)[counts])
    overlong = clipped = torch.zeros(len(rewards), dtype=torch.bool)
    if options.overlong_buffer:
        own = torch.from_numpy(np.asarray(lengths)[counts])
        buffer, factor = options.overlong_buffer_len, options.overlong_buffer_penalty_factor
        penalty = rl.overlong_penalty(own, max_length, buffer, factor)
        overlong, rewards = penalty < 0, rewards + penalty
    if options.reward_clip:
        clipped = rewards.abs() > options.reward_clip
        rewards, _ = rl.clip_values(rewards, -options.reward_clip, options.reward_clip)
    if options.reward_running_norm:
        moments = moments.merge(moments_over_ranks(rewards, control))
        rewards = moments.normalized(rewards, centre=options.reward_running_norm_minus_mean)
    whole = np.full(len(counts), np.nan)
    whole[counts] = rewards.numpy()
    flags = np.zeros((2, len(counts)), bool)
    flags[:, counts] = torch.stack([overlong, clipped]).numpy()
    return Shaped(whole, flags[0], flags[1], moments)


@dataclass(frozen=True)
class Samples:
    """What advantages are taken from: B samples in one layout; arrays of tokens are flat, None without the model.

    `rewards` (B,) float64 are shaped; that of a sample without a trained token says nothing. `group` (B,) int64.
    """

    layout: Ragged
    mask: np.ndarray
    rewards: np.ndarray
    group: np.ndarray
    logprobs: np.ndarray
    ref_logprobs: np.ndarray | None = None
    values: np.ndarray | None = None

    @cached_property
    def grid(self) -> Grid:
        """Where the flat numbers sit in (B, T)."""
        return Grid.of(self.layout)

    def padded(self, flat: np.ndarray) -> Tensor:
        """Return flat numbers as (B, T), float64 for numbers and bool for a mask; 0 behind each row."""
        return self.grid.pad(torch.from_numpy(np.array(flat, bool if flat.dtype == bool else np.float64)))

    def flat(self, padded: Tensor) -> np.ndarray:
        """Return (B, T) as flat float32."""
        return self.grid.flat(padded).float().numpy()


@dataclass(frozen=True)
class Estimated:
    """Flat float32 beside the response tokens; 0 where not trained.

    `returns` are what the advantages were taken from, before whitening: for GAE the targets of the critic; `clipped` is
    bool: stood outside `advantage_clip`.
    """

    advantages: np.ndarray
    returns: np.ndarray
    token_rewards: np.ndarray
    kl: np.ndarray | None
    clipped: np.ndarray


def estimated(
    given: Samples, options: StrategyConfig, kl_coef: float, gamma: float, lambd: float, control: ControlGroup
) -> Estimated:
    """Return the advantages of this rank's samples, at least one; collective.

    `kl_coef` weighs the KL in the reward, without `use_kl_loss`; `gamma` is the discount per trained token.
    """
    name = options.advantage_estimator or ""
    mask = given.padded(given.mask)
    trains = mask.any(1)
    rewards, group = torch.from_numpy(given.rewards), torch.from_numpy(given.group)
    in_reward = 0.0 if options.use_kl_loss else kl_coef
    compared = _among(trains, COMPARED.get(name, lambda rewards, _: rewards), rewards, group)
    token_rewards = rl.at_last_token(compared, mask)
    if given.ref_logprobs is not None and in_reward:
        logprobs, ref = given.padded(given.logprobs), given.padded(given.ref_logprobs)
        token_rewards = rl.kl_in_reward(compared, logprobs, ref, mask, in_reward, options.kl_estimator)
    if name == "gae":
        assert given.values is not None
        advantages, returns = rl.gae_advantages(token_rewards, given.padded(given.values), mask, gamma, lambd)
    elif name == "cpgd":
        own = _among(trains, rl.cpgd_advantage(), token_rewards.sum(1), group)
        advantages = returns = torch.where(mask, own[:, None], 0.0)
    else:
        advantages = returns = rl.discounted_returns(token_rewards, mask, gamma)
    if options.advantages_norm or name in WHITEN:
        advantages = advantages.clone()
        advantages[mask] = whitened(advantages[mask], control)
    clipped = torch.zeros_like(mask)
    if options.advantage_clip:
        clipped = mask & (advantages.abs() > options.advantage_clip)
        advantages, _ = rl.clip_values(advantages, -options.advantage_clip, options.advantage_clip, mask)
    kl = None
    if given.ref_logprobs is not None:
        estimate = rl.kl_estimator(options.kl_estimator)(given.padded(given.logprobs), given.padded(given.ref_logprobs))
        kl = given.flat(torch.where(mask, estimate, 0.0))
    clips = given.grid.flat(clipped).numpy()
    return Estimated(given.flat(advantages), given.flat(returns), given.flat(token_rewards), kl, clips)


def _among(rows: Tensor, compare: Compare, rewards: Tensor, group: Tensor) -> Tensor:
    """Return (B,) what `compare` makes of the rewards of `rows` (B,) bool, as if there were no others; 0 for those."""
    found = torch.zeros(len(rewards), dtype=torch.float64)
    if rows.any():
        found[rows] = compare(rewards[rows], group[rows]).double()
    return found
