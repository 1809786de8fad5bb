"""What is done to the scores of samples before advantages are taken from them, in one order.

    score -> overlong penalty -> clip -> running norm -> the estimator's own comparison within groups

Clipping counts what stands outside before it clamps. The running norm comes before groups are compared: after it, it
would divide by the scale that the comparison has just removed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from rlbench.rl import RunningMoments, clip_values, overlong_penalty
from rlbench.strategies.options.config import OptionError, StrategyConfig
from rlbench.strategies.ranks.control import ControlGroup
from rlbench.trainers.experience.over_ranks import moments_over_ranks


@dataclass(frozen=True)
class Shaped:
    """Of B samples: `rewards` float64, NaN where there is no score; `overlong`: penalised for its length; `clipped`:
    stood outside the bound before it was clamped; `moments` of all scores of all ranks so far, these included.
    """

    rewards: np.ndarray
    overlong: np.ndarray
    clipped: np.ndarray
    moments: RunningMoments


def check_shaping(options: StrategyConfig, max_length: int) -> None:
    """Refuse options of shaping that contradict each other; `max_length`: most tokens of a response."""
    if options.reward_running_norm_minus_mean and not options.reward_running_norm:
        raise OptionError("reward_running_norm_minus_mean has no effect without reward_running_norm; set both.")
    for name in ("reward_clip", "advantage_clip"):
        if getattr(options, name) < 0:
            raise OptionError(f"{name}={getattr(options, name):g}: a bound is above 0; 0 is none.")
    if options.overlong_buffer and not 1 <= options.overlong_buffer_len <= max_length:
        raise OptionError(
            f"overlong_buffer_len={options.overlong_buffer_len}: the last tokens of a response of at most {max_length} "
            "(max_tokens) are from 1 to so many."
        )
    if options.overlong_buffer_penalty_factor < 0:
        raise OptionError(
            f"overlong_buffer_penalty_factor={options.overlong_buffer_penalty_factor:g}: a penalty is 0 or more."
        )


def shaped(
    scores: np.ndarray,
    lengths: np.ndarray,
    max_length: int,
    options: StrategyConfig,
    moments: RunningMoments,
    control: ControlGroup,
) -> Shaped:
    """Shape the scores (B,) of this rank's samples, NaN for those that do not count, which moves nothing; collective.

    `lengths` (B,) are response tokens, trained or not, `max_length` the limit they were sampled under; `moments` are of
    what was seen before, over all ranks.
    """
    counts = ~np.isnan(scores)
    rewards = torch.from_numpy(np.asarray(scores, np.float64)[counts])
    overlong = clipped = torch.zeros(len(rewards), dtype=torch.bool)
    if options.overlong_buffer:
        penalty = overlong_penalty(
            torch.from_numpy(np.asarray(lengths)[counts]),
            max_length,
            options.overlong_buffer_len,
            options.overlong_buffer_penalty_factor,
        )
        overlong, rewards = penalty < 0, rewards + penalty
    if options.reward_clip:
        clipped = rewards.abs() > options.reward_clip
        rewards, _ = clip_values(rewards, -options.reward_clip, options.reward_clip)
    if options.reward_running_norm:
        moments = moments.merge(moments_over_ranks(rewards, control))
        rewards = moments.normalized(rewards, centre=options.reward_running_norm_minus_mean)
    whole = np.full(len(counts), np.nan)
    whole[counts] = rewards.numpy()
    flags = np.zeros((2, len(counts)), bool)
    flags[:, counts] = torch.stack([overlong, clipped]).numpy()
    return Shaped(whole, flags[0], flags[1], moments)
