"""Advantages per token: discounted returns, GAE, and what is built on them.

Untrained tokens inside a response (tool output) are passed through: they earn nothing and do not discount. Without
`token_rewards`, an estimator places each reward on the response's last trained token.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from rlbench.errors import LossError
from rlbench.rl import checks
from rlbench.rl.checks import Checked, clean_tokens, output_dtype, within
from rlbench.rl.groups import whiten
from rlbench.rl.placing import at_last_token, carried_back, last_trained, next_trained


def discounted_returns(rewards: Tensor, mask: Tensor, gamma: float = 1.0) -> Tensor:
    """Return the rewards to go (B, T): G_t = r_t + gamma G_{t+1}, untrained tokens skipped."""
    checks.mask(mask)
    checks.number("discounted_returns", "gamma", gamma, 0.0, 1.0)
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

    where t + 1 is the next *trained* token. `values` are of the state before each token; `lam` is one number, or (B,);
    `bootstrap` (B,) the value of the state after the last trained token, None for 0: a response that has ended.
    """
    checks.mask(mask)
    checks.number("gae_advantages", "gamma", gamma, 0.0, 1.0)
    r, v = clean_tokens("rewards", rewards, mask), clean_tokens("values", values, mask)
    after = torch.zeros(len(mask), dtype=torch.float64, device=mask.device)
    if bootstrap is not None:
        checks.shape("bootstrap", bootstrap, (len(mask),))
        checks.finite("bootstrap", bootstrap)
        after = bootstrap.double()
    decay = torch.as_tensor(lam, dtype=torch.float64, device=mask.device)
    if decay.dim():
        checks.shape("lam", decay, (len(mask),))
        decay = decay[:, None]
    if not ((decay >= 0) & (decay <= 1)).all():
        raise LossError(f"gae_advantages: lam={lam} must lie in [0, 1].")
    delta = torch.where(mask, r + gamma * next_trained(v, mask, after) - v, 0.0)
    advantages = torch.where(mask, carried_back(delta, gamma * decay, mask), 0.0)
    dtype = output_dtype(rewards)
    return advantages.to(dtype), (advantages + v).to(dtype)


@dataclass(frozen=True)
class length_adaptive(Checked):
    """GAE's lambda by length: lam = 1 - 1 / (alpha length), at least 0 (VAPO, arXiv 2504.05118)."""

    alpha: float = within(0.05, 0.0, above=True)

    def __call__(self, lengths: Tensor) -> Tensor:
        """Return (B,) lambdas for (B,) numbers of trained tokens."""
        return (1.0 - 1.0 / (self.alpha * lengths.double().clamp(min=1.0))).clamp(min=0.0)


@dataclass(frozen=True)
class gae(Checked):
    """Generalised advantage estimation with a critic, the advantage of PPO: `gae_advantages` (arXiv 1506.02438).

    Attributes:
        lam: lambda of the policy's advantages, in [0, 1], or `length_adaptive(…)`.
        value_lam: lambda of the value targets; None for `lam`. Decoupled GAE (arXiv 2503.01491) sets it to 1.
        bootstrap_truncated: the critic's value at a truncated response's last token stands for the state after it.
        whiten: whiten the advantages once over the trained tokens of the batch; never the targets.
    """

    gamma: float = within(1.0, 0.0, 1.0)
    lam: float | length_adaptive = 0.95
    value_lam: float | None = within(None, 0.0, 1.0)
    bootstrap_truncated: bool = False
    whiten: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.lam, length_adaptive):
            checks.number("gae", "lam", self.lam, 0.0, 1.0)

    def __call__(
        self,
        rewards: Tensor,
        group: Tensor,
        *,
        values: Tensor,
        mask: Tensor,
        token_rewards: Tensor | None = None,
        truncated: Tensor | None = None,
    ) -> Tensor:
        """Return (B, T) advantages."""
        on_tokens = _on_tokens(rewards, group, mask, token_rewards)
        after = None
        if self.bootstrap_truncated:
            if truncated is None:
                raise LossError("gae: bootstrap_truncated=True needs truncated=, a bool tensor (B,).")
            checks.shape("truncated", truncated, (len(mask),))
            last = torch.where(last_trained(mask), clean_tokens("values", values, mask), 0.0).sum(1)
            after = torch.where(truncated.bool(), last, 0.0)
        lam = self.lam(mask.sum(1)) if isinstance(self.lam, length_adaptive) else self.lam
        advantages, _ = gae_advantages(on_tokens, values, mask, self.gamma, lam, after)
        return (whiten(advantages, mask) if self.whiten else advantages).to(output_dtype(rewards))

    def returns(
        self, rewards: Tensor, group: Tensor, *, values: Tensor, mask: Tensor, **optional: Tensor | None
    ) -> Tensor:
        """Return the (B, T) targets of the value loss, called like the estimator."""
        lam = self.lam if self.value_lam is None else self.value_lam
        plain = replace(self, lam=lam, whiten=False)
        advantages = plain(rewards.double(), group, values=values, mask=mask, **optional)
        return (advantages + clean_tokens("values", values, mask)).to(output_dtype(rewards))


@dataclass(frozen=True)
class reinforce_plus_plus(Checked):
    """Discounted returns, whitened over the batch's trained tokens (REINFORCE++, arXiv 2501.03262)."""

    gamma: float = within(1.0, 0.0, 1.0)
    whiten: bool = True

    def __call__(self, rewards: Tensor, group: Tensor, *, mask: Tensor, token_rewards: Tensor | None = None) -> Tensor:
        """Return (B, T) advantages."""
        returns = discounted_returns(_on_tokens(rewards, group, mask, token_rewards), mask, self.gamma)
        return (whiten(returns, mask) if self.whiten else returns).to(output_dtype(rewards))


@dataclass(frozen=True)
class remax:
    """Reward to go minus the reward of the greedy response to the same prompt (ReMax, arXiv 2310.10505)."""

    def __call__(
        self,
        rewards: Tensor,
        group: Tensor,
        *,
        baseline_rewards: Tensor,
        mask: Tensor,
        token_rewards: Tensor | None = None,
    ) -> Tensor:
        """Return (B, T) advantages."""
        checks.shape("baseline_rewards", baseline_rewards, tuple(rewards.shape))
        checks.finite("baseline_rewards", baseline_rewards)
        to_go = discounted_returns(_on_tokens(rewards, group, mask, token_rewards), mask)
        return torch.where(mask, to_go - baseline_rewards.double()[:, None], 0.0).to(output_dtype(rewards))


@dataclass(frozen=True)
class on_policy_distillation:
    """How much likelier a teacher finds each token the student sampled: A_t = log teacher - log student, within ±clip.

    Reverse-KL distillation (MiniLLM, arXiv 2306.08543; GKD, arXiv 2306.13649). Rollouts need no rewards.
    """

    needs_rewards: ClassVar[bool] = False
    clip: float | None = 20.0

    def __post_init__(self) -> None:
        if self.clip is not None:
            checks.number("on_policy_distillation", "clip", self.clip, 0.0, above=True)

    def __call__(
        self, rewards: Tensor, group: Tensor, *, logprobs: Tensor, teacher_logprobs: Tensor, mask: Tensor
    ) -> Tensor:
        """Return (B, T) advantages."""
        checks.rewards(rewards, group)
        checks.mask(mask, len(rewards))
        gap = clean_tokens("teacher_logprobs", teacher_logprobs, mask) - clean_tokens("logprobs", logprobs, mask)
        return (gap if self.clip is None else gap.clamp(-self.clip, self.clip)).to(output_dtype(rewards))


def _on_tokens(rewards: Tensor, group: Tensor, mask: Tensor, token_rewards: Tensor | None) -> Tensor:
    """Return (B, T) float64 rewards, 0 outside the mask."""
    checks.rewards(rewards, group)
    checks.mask(mask, len(rewards))
    if token_rewards is None:
        return at_last_token(rewards.double(), mask)
    return clean_tokens("token_rewards", token_rewards, mask)
