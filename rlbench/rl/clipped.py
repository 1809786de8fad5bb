"""The clipped policy losses: PPO's surrogate, and its descendants that change bounds and aggregation alone.

    L = max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)),   r = exp(logprobs - old_logprobs)

Each is called with `LossInputs`, tensors (S, T), and returns (S, T) and the metrics `ratio`, `ppo_kl`,
`clip_fraction` (tokens where the clipping takes the gradient away), `clip_fraction_low`, `clip_fraction_high`, and
`dual_clip_fraction` where a dual clip is set. The log-ratio is clamped to ±20 (verl, OpenRLHF and SkyRL do; TRL and
slime do not).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from rlbench.errors import LossError
from rlbench.rl.policy import Metrics, PolicyLoss, ratio_metrics, ratio_of
from rlbench.rl.reward_checks import check_number, within
from rlbench.rl.types import LossInputs

if TYPE_CHECKING:
    from rlbench.rl.mismatch import MismatchCorrection


@dataclass(frozen=True, kw_only=True, repr=False)
class ppo(PolicyLoss):
    """Clipped surrogate of PPO (arXiv 1707.06347), with dual clip as an option.

    Pairs with `rb.rl.gae`. Dual clip (arXiv 1912.09729) bounds the loss of a token with negative advantage and a
    ratio far above 1; INTELLECT-2 (arXiv 2505.07291) reaches the same by bounding the ratio. verl always has a dual
    clip of 3.0, TRL names the other one `delta`; OpenRLHF, slime, AReaL and NeMo-RL have it off, as here.

    Attributes:
        clip_low: the probability ratio new/old is clipped from below to 1 - clip_low; in [0, 1].
        clip_high: and from above to 1 + clip_high; larger than clip_low it is DAPO's clip-higher.
        dual_clip: c > 1; for A < 0 the loss is at most -A c. None: no bound.
        delta: > 1 + clip_high; the unclipped branch takes min(r, delta). For A > 0 the clip acts before it, for
            A < 0 it is dual_clip=delta: only one of the two may be set. None: no bound.
    """

    paper: ClassVar[str] = "1707.06347"

    clip_low: float = within(0.2, 0.0, 1.0)
    clip_high: float = within(0.2, 0.0)
    dual_clip: float | None = within(None, 1.0, above=True)
    delta: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.delta is not None:
            check_number(self.name, "delta", self.delta, 1.0 + self.clip_high, above=True)
        if self.dual_clip is not None and self.delta is not None:
            raise LossError(
                f"{self.name}: dual_clip={self.dual_clip!r} and delta={self.delta!r} bound the same tokens. "
                "Give one of the two."
            )

    def ratio(self, x: LossInputs) -> Tensor:
        return ratio_of(x)

    def surrogate(self, x: LossInputs) -> tuple[Tensor, Metrics]:
        ratio = self.ratio(x)
        free = -x.advantages * ratio
        clipped = -x.advantages * ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        loss = torch.maximum(free, clipped)
        bites = clipped > free
        metrics = ratio_metrics(x, ratio) | {
            "clip_fraction": bites.float(),
            "clip_fraction_low": (bites & (x.advantages < 0)).float(),
            "clip_fraction_high": (bites & (x.advantages > 0)).float(),
        }
        bound = self.dual_clip or self.delta
        if bound is not None:
            beyond = (x.advantages < 0) & (loss > -x.advantages * bound)
            loss = torch.where(beyond, -x.advantages * bound, loss)
            metrics["dual_clip_fraction"] = beyond.float()
        return loss, metrics


@dataclass(frozen=True, kw_only=True, repr=False)
class grpo(ppo):
    """PPO's clip with the mean over each response first, then over responses: GRPO (arXiv 2402.03300).

    Pairs with `rb.rl.group_normalized`. The paper adds kl_coef=0.04 with k3; here, as in verl and TRL, the KL is off
    until asked for. verl and TRL aggregate what they call GRPO by token-mean (DAPO's) unless told otherwise.
    """

    paper: ClassVar[str] = "2402.03300"

    aggregation: str = "seq-mean-token-mean"


@dataclass(frozen=True, kw_only=True, repr=False)
class dapo(ppo):
    """Clip-higher and the mean over all tokens: DAPO (arXiv 2503.14476).

    Pairs with `rb.rl.group_normalized`, groups of equal rewards left out, and an overlong penalty.
    """

    paper: ClassVar[str] = "2503.14476"

    clip_high: float = 0.28


@dataclass(frozen=True, kw_only=True, repr=False)
class dr_grpo(ppo):
    """Sums over tokens divided by a constant length: no bias towards long wrong answers; Dr.GRPO (arXiv 2503.20783).

    Pairs with `rb.rl.group_normalized(std="none")`. The constant is the step's longest response;
    a fixed one is `Aggregation("seq-mean-token-sum-norm", length=…)`, given to the step.
    """

    paper: ClassVar[str] = "2503.20783"

    aggregation: str = "seq-mean-token-sum-norm"


@dataclass(frozen=True, kw_only=True, repr=False)
class bnpo(ppo):
    """The mean over the batch's tokens, as in TRL's loss type of that name (pull request 3256, April 2025).

    Pairs with `rb.rl.group_normalized`. TRL divides by the tokens of each local micro-batch; here, as
    everywhere, by those of the whole step. The later BNPO of arXiv 2506.02864 is something else: it normalises
    rewards by a beta distribution.
    """

    paper: ClassVar[str] = "TRL 2025"


def _behaviour_correction() -> MismatchCorrection:
    from rlbench.rl.mismatch import token_tis

    return token_tis(cap=5.0)


@dataclass(frozen=True, kw_only=True, repr=False)
class decoupled_ppo(ppo):
    """PPO around a proximal policy, weighted back to the one that sampled: decoupled PPO (arXiv 2110.00641).

    L = w max(-A r, -A clip(r)), w = min(exp(old_logprobs - sampler_logprobs), 5) without gradient: `old` is the
    proximal policy, the sampler the behaviour policy, which in asynchronous training is several updates older
    (AReaL, arXiv 2505.24298). Pairs with `rb.rl.gae` or `rb.rl.group_normalized`. AReaL's earlier versions
    dropped the tokens above 5.0 by default; later ones bound nothing until told to clamp or to drop. Here
    `mismatch=icepop(…)` drops. Tokens dropped stay in the normaliser.
    """

    paper: ClassVar[str] = "2110.00641, 2505.24298"

    mismatch: MismatchCorrection | None = field(default_factory=_behaviour_correction)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mismatch is None:
            raise LossError("decoupled_ppo: mismatch=None leaves plain PPO; use ppo(), or give a correction.")
