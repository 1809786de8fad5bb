"""The mathematics: losses, advantages, KL, mismatch, aggregation. Pure functions and values; torch alone.

`presets()` shows the policy losses; `docs/algorithms.md` lists everything with formula, paper and the peers' names.

What holds for all of them, and is not repeated at each:

* B or S counts responses, T tokens, V the vocabulary. `rewards` (B,) is one finite reward per response; `group` (B,)
  integers, equal for responses to the same prompt; `mask` (B, T) bool, True for trained tokens: what stands
  elsewhere is arbitrary, NaN too. `reward_checks.MEANING` says it of every argument an estimator asks for by name.
* Results are float64 for float64 inputs, else float32, and 0 outside the mask.
* What does not fit (a shape, a range, an empty batch, a value that is not finite) raises `LossError`, which names
  the argument, what was seen and what is wanted.
"""

import inspect

from rlbench.rl.advantages import (
    AdvantageFunction,
    cpgd_advantage,
    gpg_advantage,
    group_normalized,
    maxrl,
    opo,
    reinforce_plus_plus_baseline,
    rloo,
)
from rlbench.rl.aggregate import Aggregation, BatchTotals
from rlbench.rl.clipped import bnpo, dapo, decoupled_ppo, dr_grpo, grpo, ppo
from rlbench.rl.controllers import AdaptiveEntropy, AdaptiveKL, FixedKL
from rlbench.rl.covariance import clip_cov, kl_cov
from rlbench.rl.diagnostics import MismatchMoments, mismatch_diagnostics
from rlbench.rl.distillation import distillation_loss, kd_loss
from rlbench.rl.divergence import dppo_kl, dppo_tv
from rlbench.rl.group_advantages import gdpo, pass_at_k, pass_at_k_normalized, process_normalized
from rlbench.rl.kl import absolute, k1, k1_plus, k2, k3, k3_plus, kl_estimator, ratio_corrected
from rlbench.rl.linear import linear_token_stats
from rlbench.rl.losses import presets, resolve
from rlbench.rl.mismatch import MismatchCorrection, chain, icepop, sequence_mask, sequence_tis, token_tis
from rlbench.rl.placing import at_last_token, at_positions, at_turn_ends, kl_in_reward
from rlbench.rl.policy import PolicyLoss
from rlbench.rl.preference import dpo, ipo, kto, kto_kl, orpo, sequence_logprobs, simpo
from rlbench.rl.rejection import geometric_mask, off_policy_sequence_mask, reject
from rlbench.rl.returns import (
    discounted_returns,
    gae,
    gae_advantages,
    length_adaptive,
    on_policy_distillation,
    reinforce_plus_plus,
    remax,
)
from rlbench.rl.reward_model import (
    bradley_terry_loss,
    centering_penalty,
    hps_loss,
    log_exp_loss,
    prm_loss,
    tie_penalty,
)
from rlbench.rl.sequence import gmpo, gspo, luspo, vespo
from rlbench.rl.shaping import (
    RunningMoments,
    clip_values,
    groups_with_signal,
    groups_within,
    overlong_penalty,
    rows_of_groups,
    stop_properly,
    without_truncated,
)
from rlbench.rl.token_baseline import optimal_token_baseline
from rlbench.rl.token_filters import TokenFilter, high_entropy
from rlbench.rl.types import Loss, LossInputs
from rlbench.rl.value import explained_variance, ptx_loss, value_loss
from rlbench.rl.weighted import cispo, cpgd, dro, gpg, importance_sampling, reinforce, sapo
from rlbench.rl.whitening import whiten

TYPES = (
    "AdvantageFunction",
    "BatchTotals",
    "Loss",
    "LossInputs",
    "MismatchCorrection",
    "PolicyLoss",
    "TokenFilter",
    "presets",
    "resolve",
)
"""Contracts, bases and look-ups: documented in their docstrings, not algorithms of their own."""

__all__ = sorted(name for name, value in globals().items() if name[0] != "_" and not inspect.ismodule(value))
