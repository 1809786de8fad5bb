"""The mathematics: losses, advantages, KL, mismatch, aggregation. Pure functions and values; torch alone.

`docs/algorithms.md` lists everything with formula, paper and the peers' names. B or S counts responses, T tokens, V the
vocabulary. `rewards` (B,) is one finite reward per response; `group` (B,) integers, equal for responses to the same
prompt; `mask` (B, T) bool, True for trained tokens: what stands elsewhere is arbitrary, NaN too. Results are float64
for float64 inputs, else float32, and 0 outside the mask. What does not fit raises `LossError`.
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
from rlbench.rl.distillation import gkd, sampled_kl
from rlbench.rl.group_advantages import (
    branch_values,
    gdpo,
    optimal_token_baseline,
    pass_at_k,
    pass_at_k_normalized,
    process_normalized,
)
from rlbench.rl.groups import whiten
from rlbench.rl.kl import absolute, k1, k1_plus, k2, k3, k3_plus, kl_estimator
from rlbench.rl.linear import linear_token_stats, linear_top_ids
from rlbench.rl.losses import presets, resolve
from rlbench.rl.mismatch import (
    MismatchCorrection,
    chain,
    geometric_mask,
    icepop,
    off_policy_sequence_mask,
    reject,
    sequence_mask,
    sequence_tis,
    token_tis,
)
from rlbench.rl.placing import at_last_token, at_positions, at_turn_ends, kl_in_reward
from rlbench.rl.policy import PolicyLoss, TokenFilter, high_entropy
from rlbench.rl.preference import dpo, ipo, kto, kto_kl, orpo, sequence_logprobs, simpo
from rlbench.rl.returns import (
    discounted_returns,
    gae,
    gae_advantages,
    length_adaptive,
    on_policy_distillation,
    reinforce_plus_plus,
    remax,
)
from rlbench.rl.reward import bradley_terry, hps, log_exp
from rlbench.rl.sequence import gmpo, gspo, luspo, vespo
from rlbench.rl.shaping import (
    RunningMoments,
    clip_values,
    groups_with_signal,
    groups_within,
    overlong_penalty,
    stop_properly,
    without_truncated,
)
from rlbench.rl.supervised import (
    bradley_terry_loss,
    centering_penalty,
    distillation_loss,
    explained_variance,
    generalized_jsd,
    hps_loss,
    kd_loss,
    log_exp_loss,
    prm_loss,
    ptx_loss,
    tie_penalty,
    value_loss,
)
from rlbench.rl.types import Loss, LossInputs, Side, TeacherTokens
from rlbench.rl.weighted import cispo, cpgd, dppo_kl, dppo_tv, dro, gpg, importance_sampling, reinforce, sapo, sft

__all__ = sorted(name for name, value in globals().items() if name[0] != "_" and not inspect.ismodule(value))
