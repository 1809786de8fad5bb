"""Advantages per token: discounted returns, GAE, and what is built on them.

Untrained tokens inside a response (tool output) are passed through: reward and value of a later turn reach the turns
before it undiminished, and what stands on those tokens counts for nothing. (SkyRL resets the running return there, so
that a reward never reaches the turns before an observation.) All run in float64 and return float64 for float64
rewards, else float32, with 0 outside the mask.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlbench.errors import LossError
from rlbench.rl.placing import at_last_token
from rlbench.rl.recurrence import carried_back, last_trained, next_trained
from rlbench.rl.reward_checks import (
    Checked,
    check_finite,
    check_mask,
    check_number,
    check_rewards,
    check_shape,
    clean_tokens,
    needed,
    needed_tokens,
    output_dtype,
    within,
)
from rlbench.rl.whitening import whiten


def discounted_returns(rewards: Tensor, mask: Tensor, gamma: float = 1.0) -> Tensor:
    """Return the rewards to go (B, T): G_t = r_t + gamma G_{t+1}, untrained tokens skipped."""
    check_mask(mask)
    check_number("discounted_returns", "gamma", gamma, 0.0, 1.0)
    clean = clean_tokens("rewards", rewards, mask)
    return torch.where(mask, carried_back(clean, gamma, mask), 0.0).to(output_dtype(rewards))


def gae_advantages(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    gamma: float = 1.0,
    lam: float | Tensor = 0.95,
    bootstrap: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return generalised advantages and the value targets (GAE, arXiv 1506.02438), (B, T) each; nothing is whitened.

        delta_t = r_t + gamma V_{t+1} - V_t,   A_t = delta_t + gamma lam A_{t+1},   target_t = A_t + V_t

    where t + 1 is the next *trained* token (verl, AReaL; OpenRLHF, SkyRL and slime step onto observations too).
    `values` are the critic's of the state before each token; `lam` in [0, 1] is one number, or (B,) one per response;
    `bootstrap` (B,) the value of the state after the last trained token, None for 0: a response that has ended.
    """
    check_mask(mask)
    check_number("gae_advantages", "gamma", gamma, 0.0, 1.0)
    r, v = clean_tokens("rewards", rewards, mask), clean_tokens("values", values, mask)
    after = torch.zeros(len(mask), dtype=torch.float64, device=mask.device)
    if bootstrap is not None:
        check_shape("bootstrap", bootstrap, (len(mask),))
        check_finite("bootstrap", bootstrap)
        after = bootstrap.double()
    delta = torch.where(mask, r + gamma * next_trained(v, mask, after) - v, 0.0)
    advantages = torch.where(mask, carried_back(delta, gamma * _per_row(lam, len(mask)), mask), 0.0)
    dtype = output_dtype(rewards)
    return advantages.to(dtype), (advantages + v).to(dtype)


@dataclass(frozen=True)
class length_adaptive(Checked):
    """GAE's lambda by length (VAPO, arXiv 2504.05118): lam = 1 - 1 / (alpha length), at least 0.

    Long responses get a lambda nearer to 1, so that the reward still reaches their first tokens. alpha is the paper's.
    """

    alpha: float = within(0.05, 0.0, above=True)

    def __call__(self, lengths: Tensor) -> Tensor:
        """Return (B,) lambdas for (B,) numbers of trained tokens."""
        return (1.0 - 1.0 / (self.alpha * lengths.double().clamp(min=1.0))).clamp(min=0.0)


@dataclass(frozen=True)
class gae(Checked):
    """Generalised advantage estimation with a critic (arXiv 1506.02438), the advantage of PPO.

    See `gae_advantages` for the formula. `returns`, called like the estimator, gives the targets of the value loss.

    Attributes:
        gamma: discount per trained token, in [0, 1].
        lam: lambda of the policy's advantages, in [0, 1], or `length_adaptive(…)`.
        value_lam: lambda of the value targets; None for `lam`. Decoupled GAE (arXiv 2503.01491) sets it to 1.
        bootstrap_truncated: a response cut at the length limit goes on, so that the state after it has a value. The
            critic's value at the last trained token stands in for it, as in AReaL; otherwise 0.
        whiten: whiten the advantages once over the trained tokens of the batch (`rlbench.rl.whitening`), as verl and
            OpenRLHF do; never the targets.
    """

    gamma: float = within(1.0, 0.0, 1.0)
    lam: float | length_adaptive = 0.95
    value_lam: float | None = within(None, 0.0, 1.0)
    bootstrap_truncated: bool = False
    whiten: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.lam, length_adaptive):
            check_number("gae", "lam", self.lam, 0.0, 1.0)

    def __call__(
        self,
        rewards: Tensor,
        group: Tensor,
        *,
        values: Tensor | None = None,
        mask: Tensor | None = None,
        token_rewards: Tensor | None = None,
        truncated: Tensor | None = None,
    ) -> Tensor:
        """Return (B, T) advantages; without `token_rewards`, a reward stands on the last trained token."""
        placed, kept = _token_rewards(self, rewards, group, mask, token_rewards)
        advantages, _ = self._estimate(self.lam, placed, kept, values, truncated)
        return (whiten(advantages, kept) if self.whiten else advantages).to(output_dtype(rewards))

    def returns(
        self,
        rewards: Tensor,
        group: Tensor,
        *,
        values: Tensor | None = None,
        mask: Tensor | None = None,
        token_rewards: Tensor | None = None,
        truncated: Tensor | None = None,
    ) -> Tensor:
        """Return the (B, T) targets of the value loss, called like the estimator."""
        lam = self.lam if self.value_lam is None else self.value_lam
        placed, kept = _token_rewards(self, rewards, group, mask, token_rewards)
        return self._estimate(lam, placed, kept, values, truncated)[1].to(output_dtype(rewards))

    def _estimate(
        self,
        lam: float | length_adaptive,
        rewards: Tensor,
        mask: Tensor,
        values: Tensor | None,
        truncated: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Return advantages and targets of (B, T) rewards in float64, not whitened."""
        v = needed_tokens(self, "values", values, mask)
        after = None
        if self.bootstrap_truncated:
            cut = needed(self, "truncated", truncated)
            check_shape("truncated", cut, (len(mask),))
            after = torch.where(cut.bool(), torch.where(last_trained(mask), v, 0.0).sum(1), 0.0)
        lambdas = lam(mask.sum(1)) if isinstance(lam, length_adaptive) else lam
        return gae_advantages(rewards, v, mask, self.gamma, lambdas, after)


@dataclass(frozen=True)
class reinforce_plus_plus(Checked):
    """Discounted returns, whitened over the batch's trained tokens (REINFORCE++, arXiv 2501.03262).

    OpenRLHF's "reinforce" is the same with a population variance; with whiten=False it is plain REINFORCE.
    """

    gamma: float = within(1.0, 0.0, 1.0)
    whiten: bool = True

    def __call__(
        self,
        rewards: Tensor,
        group: Tensor,
        *,
        mask: Tensor | None = None,
        token_rewards: Tensor | None = None,
    ) -> Tensor:
        """Return (B, T) advantages."""
        placed, kept = _token_rewards(self, rewards, group, mask, token_rewards)
        returns = discounted_returns(placed, kept, self.gamma)
        return (whiten(returns, kept) if self.whiten else returns).to(output_dtype(rewards))


@dataclass(frozen=True)
class remax:
    """Reward to go minus the reward of the greedy response to the same prompt (ReMax, arXiv 2310.10505)."""

    def __call__(
        self,
        rewards: Tensor,
        group: Tensor,
        *,
        baseline_rewards: Tensor | None = None,
        mask: Tensor | None = None,
        token_rewards: Tensor | None = None,
    ) -> Tensor:
        """Return (B, T) advantages."""
        placed, kept = _token_rewards(self, rewards, group, mask, token_rewards)
        baseline = needed(self, "baseline_rewards", baseline_rewards)
        check_shape("baseline_rewards", baseline, tuple(rewards.shape))
        check_finite("baseline_rewards", baseline)
        to_go = discounted_returns(placed, kept)
        return torch.where(kept, to_go - baseline.double()[:, None], 0.0).to(output_dtype(rewards))


@dataclass(frozen=True)
class on_policy_distillation:
    """How much likelier a teacher finds each token the student sampled: A_t = log teacher - log student, within ±clip.

    The negated k1 estimate of KL(student || teacher), each token for itself (reverse-KL distillation: MiniLLM, arXiv
    2306.08543; GKD, arXiv 2306.13649). Rewards do not count; to use both, add the two advantages.
    """

    clip: float | None = 20.0

    def __post_init__(self) -> None:
        if self.clip is not None:
            check_number("on_policy_distillation", "clip", self.clip, 0.0, above=True)

    def __call__(
        self,
        rewards: Tensor,
        group: Tensor,
        *,
        logprobs: Tensor | None = None,
        teacher_logprobs: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """Return (B, T) advantages."""
        check_rewards(rewards, group)
        kept = needed(self, "mask", mask)
        check_mask(kept, len(rewards))
        teacher = needed_tokens(self, "teacher_logprobs", teacher_logprobs, kept)
        gap = teacher - needed_tokens(self, "logprobs", logprobs, kept)
        if self.clip is not None:
            gap = gap.clamp(-self.clip, self.clip)
        return gap.to(output_dtype(rewards))


def _token_rewards(
    owner: object, rewards: Tensor, group: Tensor, mask: Tensor | None, token_rewards: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return (B, T) float64 rewards, 0 outside the mask, and the mask."""
    check_rewards(rewards, group)
    kept = needed(owner, "mask", mask)
    check_mask(kept, len(rewards))
    if token_rewards is None:
        return at_last_token(rewards.double(), kept), kept
    return needed_tokens(owner, "token_rewards", token_rewards, kept), kept


def _per_row(lam: float | Tensor, rows: int) -> float | Tensor:
    """Return lambda as one number or (B, 1)."""
    if not isinstance(lam, Tensor):
        check_number("gae_advantages", "lam", lam, 0.0, 1.0)
        return lam
    check_shape("lam", lam, (rows,))
    if not ((lam >= 0) & (lam <= 1)).all():
        raise LossError(
            f"gae_advantages: lam spans [{float(lam.min()):g}, {float(lam.max()):g}]; wanted values in [0, 1]."
        )
    return lam.double()[:, None]
