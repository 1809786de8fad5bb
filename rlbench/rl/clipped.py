"""The clipped policy losses: PPO's surrogate, and its descendants that change bounds and aggregation alone.

    L = max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)),   r = exp(logprobs - old_logprobs)

The metrics beside `ratio` and `ppo_kl` are the tokens whose gradient the clip takes away, `clip_fraction` with `_low`
and `_high`, and `dual_clip_fraction`. They pair with `rb.rl.group_normalized`, ppo with `rb.rl.gae`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rlbench.errors import LossError
from rlbench.rl import checks
from rlbench.rl.checks import within
from rlbench.rl.mismatch import MismatchCorrection, token_tis
from rlbench.rl.policy import Metrics, PolicyLoss, clip_metrics, ratio_metrics, ratio_of
from rlbench.rl.types import LossInputs

CAPPED = token_tis(cap=5.0)


@dataclass(frozen=True, kw_only=True, repr=False)
class ppo(PolicyLoss):
    """Clipped surrogate of PPO (arXiv 1707.06347), with dual clip as an option.

    Attributes:
        clip_low: the probability ratio new/old is clipped from below to 1 - clip_low; in [0, 1].
        clip_high: and from above to 1 + clip_high; larger than clip_low it is DAPO's clip-higher.
        dual_clip: c > 1; for A < 0 the loss is at most -A c (arXiv 1912.09729; verl always has 3.0). None: no bound.
        delta: > 1 + clip_high, TRL's; the unclipped branch takes min(r, delta) (arXiv 2505.07291).
    """

    paper: ClassVar[str] = "1707.06347"
    clip_low: float = within(0.2, 0.0, 1.0)
    clip_high: float = within(0.2, 0.0)
    dual_clip: float | None = within(None, 1.0, above=True)
    delta: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.delta is not None:
            checks.number(self.name, "delta", self.delta, 1.0 + self.clip_high, above=True)
        if self.dual_clip is not None and self.delta is not None:
            raise LossError(f"{self.name}: dual_clip and delta={self.delta!r} bound the same tokens. Give one of them.")

    def ratio(self, x: LossInputs) -> Tensor:
        return ratio_of(x)

    def surrogate(self, x: LossInputs) -> tuple[Tensor, Metrics]:
        ratio = self.ratio(x)
        free = -x.advantages * ratio
        clipped = -x.advantages * ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        loss = torch.maximum(free, clipped)
        bites = clipped > free
        metrics = ratio_metrics(x, ratio) | clip_metrics(bites & (x.advantages < 0), bites & (x.advantages > 0))
        bound = self.dual_clip or self.delta
        if bound is not None:
            beyond = (x.advantages < 0) & (loss > -x.advantages * bound)
            loss = torch.where(beyond, -x.advantages * bound, loss)
            metrics["dual_clip_fraction"] = beyond.float()
        return loss, metrics


@dataclass(frozen=True, kw_only=True, repr=False)
class grpo(ppo):
    """PPO's clip with the mean over each response first, then over responses: GRPO (arXiv 2402.03300).

    The paper adds kl_coef=0.04 with k3. verl and TRL aggregate what they call GRPO by token-mean (DAPO's).
    """

    paper: ClassVar[str] = "2402.03300"
    aggregation: str = "seq-mean-token-mean"


@dataclass(frozen=True, kw_only=True, repr=False)
class dapo(ppo):
    """Clip-higher and the mean over all tokens: DAPO (arXiv 2503.14476)."""

    paper: ClassVar[str] = "2503.14476"
    clip_high: float = 0.28


@dataclass(frozen=True, kw_only=True, repr=False)
class dr_grpo(ppo):
    """Sums over tokens divided by a constant length: no bias towards long wrong answers; Dr.GRPO (arXiv 2503.20783)."""

    paper: ClassVar[str] = "2503.20783"
    aggregation: str = "seq-mean-token-sum-norm"


@dataclass(frozen=True, kw_only=True, repr=False)
class bnpo(ppo):
    """The mean over the batch's tokens, as in TRL's loss type of that name (not the BNPO of arXiv 2506.02864)."""

    paper: ClassVar[str] = "TRL 2025"


@dataclass(frozen=True, kw_only=True, repr=False)
class decoupled_ppo(ppo):
    """PPO around a proximal policy, weighted back to the one that sampled: decoupled PPO (arXiv 2110.00641).

    L = w max(-A r, -A clip(r)), w = min(exp(old_logprobs - sampler_logprobs), 5) without gradient: the sampler is the
    behaviour policy, several updates older in asynchronous training (AReaL, arXiv 2505.24298).
    """

    paper: ClassVar[str] = "2110.00641, 2505.24298"
    mismatch: MismatchCorrection | None = CAPPED

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mismatch is None:
            raise LossError("decoupled_ppo: mismatch=None leaves plain PPO; use ppo(), or give a correction.")
