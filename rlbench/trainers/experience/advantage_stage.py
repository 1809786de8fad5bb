"""Advantages of a rank's samples from their shaped rewards, by the name of an estimator.

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
on its last trained token. `advantages_norm` whitens once, after that; estimators that whiten by themselves are not
whitened again, and no estimator is left out. `advantage_clip` comes last.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from rlbench.data.base.ragged import Ragged
from rlbench.errors import nearest
from rlbench.rl import (
    at_last_token,
    clip_values,
    cpgd_advantage,
    discounted_returns,
    gae_advantages,
    group_normalized,
    kl_estimator,
    kl_in_reward,
    reinforce_plus_plus_baseline,
    rloo,
)
from rlbench.rl.kl import ESTIMATORS as KL_ESTIMATORS
from rlbench.strategies.options.config import OptionError, StrategyConfig
from rlbench.strategies.ranks.control import ControlGroup
from rlbench.trainers.experience.over_ranks import whitened
from rlbench.trainers.options.trainer_options import with_estimator

GROUP_EPS = 1e-9
ALIASES = {"grpo": "group_norm"}
ESTIMATORS = ("gae", "reinforce", "rloo", "reinforce_baseline", "reinforce++", "group_norm", "cpgd")
COMPARE = ("rloo", "reinforce_baseline", "group_norm", "cpgd")
"""Those that compare the samples of a prompt."""
WHITEN = ("reinforce_baseline", "reinforce++")
"""Those that whiten whatever `advantages_norm` says."""
UNDISCOUNTED = ("reinforce_baseline", "cpgd")


def check_estimator(options: StrategyConfig, gamma: float, critic: bool) -> str:
    """Return the estimator's name, aliases resolved; refuse options that it cannot honour."""
    name = _name_of(with_estimator(options, critic))
    for option, value, known in (
        ("advantage_estimator", name, (*ESTIMATORS, *ALIASES)),
        ("kl_estimator", options.kl_estimator, tuple(KL_ESTIMATORS)),
    ):
        if value not in known:
            raise OptionError(f"{option}={value!r} is unknown{nearest(value, known)}. Use one of: {', '.join(known)}.")
    if name == "gae" and not critic:
        raise OptionError("advantage_estimator='gae' needs a critic; give one, or 'group_norm' for GRPO.")
    if name != "gae" and critic:
        raise OptionError(
            f"the critic would have no effect with advantage_estimator={name!r}: give critic=None, as the reference's "
            "command line does then, or use 'gae'."
        )
    if name in COMPARE and options.n < 2:
        raise OptionError(
            f"advantage_estimator={name!r} compares the samples of a prompt: n is 2 or more, not {options.n}."
        )
    if name in UNDISCOUNTED and gamma != 1.0:
        raise OptionError(f"gamma={gamma:g} would have no effect: advantage_estimator={name!r} knows no discount.")
    return name


def _name_of(options: StrategyConfig) -> str:
    assert options.advantage_estimator is not None, "with_estimator comes first"
    return ALIASES.get(options.advantage_estimator, options.advantage_estimator)


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

    def padded(self, flat: np.ndarray) -> Tensor:
        """Return flat numbers as (B, T), float64 for numbers and bool for a mask; 0 behind each row."""
        kind = bool if flat.dtype == bool else np.float64
        out = np.zeros((len(self.layout), max(1, int(self.layout.lengths.max(initial=0)))), kind)
        out[self._held] = flat
        return torch.from_numpy(out)

    def flat(self, padded: Tensor) -> np.ndarray:
        """Return (B, T) as flat float32."""
        return padded.numpy()[self._held].astype(np.float32)

    @property
    def _held(self) -> np.ndarray:
        lengths = self.layout.lengths
        return np.arange(max(1, int(lengths.max(initial=0))))[None] < lengths[:, None]


@dataclass(frozen=True)
class Estimated:
    """Flat float32 beside the response tokens; 0 where not trained.

    `returns` are what the advantages were taken from, before whitening: for GAE the targets of the critic;
    `token_rewards` the shaped rewards on tokens, with their KL penalty; `kl` to the reference, None without one;
    `clipped` is bool: stood outside `advantage_clip`.
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

    `kl_coef` is the weight of the KL in the reward, not used with `use_kl_loss`; `gamma` the discount per trained
    token.
    """
    name = _name_of(options)
    mask = given.padded(given.mask)
    trains = mask.any(1)
    rewards, group = torch.from_numpy(given.rewards), torch.from_numpy(given.group)
    in_reward = 0.0 if options.use_kl_loss else kl_coef
    compared = _among(trains, partial(_compared, name), rewards, group)
    token_rewards = at_last_token(compared, mask)
    if given.ref_logprobs is not None and in_reward:
        logprobs, ref = given.padded(given.logprobs), given.padded(given.ref_logprobs)
        token_rewards = kl_in_reward(compared, logprobs, ref, mask, in_reward, options.kl_estimator)
    if name == "gae":
        assert given.values is not None
        advantages, returns = gae_advantages(token_rewards, given.padded(given.values), mask, gamma, lambd)
    elif name == "cpgd":
        own = _among(trains, cpgd_advantage(), token_rewards.sum(1), group)
        advantages = returns = torch.where(mask, own[:, None], 0.0)
    else:
        advantages = returns = discounted_returns(token_rewards, mask, gamma)
    if options.advantages_norm or name in WHITEN:
        advantages = advantages.clone()
        advantages[mask] = whitened(advantages[mask], control)
    clipped = torch.zeros_like(mask)
    if options.advantage_clip:
        clipped = mask & (advantages.abs() > options.advantage_clip)
        advantages, _ = clip_values(advantages, -options.advantage_clip, options.advantage_clip, mask)
    kl = None
    if given.ref_logprobs is not None:
        estimate = kl_estimator(options.kl_estimator)(given.padded(given.logprobs), given.padded(given.ref_logprobs))
        kl = given.flat(torch.where(mask, estimate, 0.0))
    clips = clipped.numpy()[given._held]
    return Estimated(given.flat(advantages), given.flat(returns), given.flat(token_rewards), kl, clips)


def _among(rows: Tensor, compare: Callable[[Tensor, Tensor], Tensor], rewards: Tensor, group: Tensor) -> Tensor:
    """Return (B,) what `compare` makes of the rewards of `rows` (B,) bool, as if there were no others; 0 for those."""
    found = torch.zeros(len(rewards), dtype=torch.float64)
    if rows.any():
        found[rows] = compare(rewards[rows], group[rows]).double()
    return found


def _compared(name: str, rewards: Tensor, group: Tensor) -> Tensor:
    """Return the reward of each response, compared with those of its group where the estimator does so."""
    if name == "rloo":
        return rloo()(rewards, group)
    if name == "group_norm":
        return group_normalized(eps=GROUP_EPS)(rewards, group)
    if name == "reinforce_baseline":
        one = torch.ones(len(rewards), 1, dtype=torch.bool)
        return reinforce_plus_plus_baseline(whiten=False)(rewards, group, mask=one)[:, 0]
    return rewards
