"""Losses from preferences: which of two responses is better (DPO and its kin), or whether one is good (KTO).

Each is a loss as others are, `train_step(batch, loss=rb.rl.dpo(beta=0.1))`, of `LossInputs` with pairs (KTO: with
labels). The mathematics is its `of`: of one log-probability per sequence, summed over its response tokens
(`sequence_logprobs`; averaged for SimPO and ORPO), one loss per pair, or response, (B,). The metrics (B,) are the
implicit rewards `reward_chosen` and `reward_rejected`, `reward_margin` and `reward_accuracy`.
x = (chosen - rejected) - (ref_chosen - ref_rejected). Where pairs have a margin m, dpo and simpo subtract it inside of
the sigmoid (ODPO, arXiv 2402.10571).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from rlbench.errors import LossError
from rlbench.rl import checks
from rlbench.rl.checks import Checked, output_dtype, wide_rows, within
from rlbench.rl.policy import Metrics, check_shapes, masked
from rlbench.rl.types import LossInputs

POINT = "kto/point"
"""The channel that holds KTO's reference point, the same for all tokens of the step."""


def sequence_logprobs(logprobs: Tensor, mask: Tensor, average: bool = False) -> Tensor:
    """Return the sum of each sequence's trained log-probabilities, (B,), or their mean (SimPO, ORPO; IPO in TRL)."""
    checks.mask(mask)
    checks.shape("logprobs", logprobs, tuple(mask.shape))
    summed = masked(logprobs.to(output_dtype(logprobs)), mask).sum(dim=1)
    return summed / mask.sum(dim=1).clamp(min=1) if average else summed


@dataclass(frozen=True)
class PreferenceLoss(Checked, ABC):
    """Base of them all: what a training step reads of a loss."""

    paper: ClassVar[str] = ""
    aggregation: ClassVar[str] = "seq-mean-token-mean"
    """The mean over pairs, or over responses: each token of one carries the whole loss of it."""
    needs_reference: ClassVar[bool] = True
    needs_pairs: ClassVar[bool] = True
    needs_sampler: ClassVar[bool] = False

    @abstractmethod
    def __call__(self, inputs: LossInputs) -> tuple[Tensor, Metrics]:
        """Return the loss per token (S, T) and metrics by name, as every loss does."""


@dataclass(frozen=True)
class PairLoss(PreferenceLoss, ABC):
    """Base of the losses of pairs; a subclass writes `per_pair`. `beta` scales the rewards."""

    takes_margin: ClassVar[bool] = False
    beta: float = within(0.1, 0.0, above=True)

    @abstractmethod
    def per_pair(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        """Return the loss (B,) of log-probabilities, or of log-ratios to the reference, (B,) each."""

    @abstractmethod
    def compared(self, x: LossInputs) -> list[Tensor]:
        """Return what `of` takes of a micro-batch's pairs, (P,) each."""

    @abstractmethod
    def of(self, *logprobs: Tensor, margin: Tensor | None = None) -> tuple[Tensor, Metrics]:
        """Return the loss per pair (B,) and the metrics of one log-probability per response, (B,) each."""

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, Metrics]:
        """Return the loss (S, T), each pair's on every token of both responses, and the metrics (S, 1)."""
        check_shapes(inputs)
        if inputs.margin is not None and not self.takes_margin:
            raise LossError(f"{self} takes no margin, and the pairs have one: batch.replace(margin=None), or dpo.")
        loss, metrics = self.of(*self.compared(inputs), margin=inputs.chosen.margin)
        rows = {name: inputs.of_pairs(torch.as_tensor(value))[:, :1] for name, value in metrics.items()}
        return masked(inputs.of_pairs(loss), inputs.mask), dict(rows)

    def measured(self, chosen: Tensor, rejected: Tensor, margin: Tensor | None = None) -> tuple[Tensor, Metrics]:
        """Return the loss per pair, and the metrics; `margin` (B,) is what the rewards should differ by."""
        reward, other = self.beta * chosen.detach(), self.beta * rejected.detach()
        metrics: Metrics = {"reward_chosen": reward, "reward_rejected": other, "reward_margin": reward - other}
        shifted = chosen if margin is None else chosen - margin.to(chosen.dtype) / self.beta
        return self.per_pair(shifted, rejected), metrics | {"reward_accuracy": (reward > other).to(reward.dtype)}


@dataclass(frozen=True)
class ReferenceFreeLoss(PairLoss):
    """Base of the losses without a reference policy."""

    needs_reference: ClassVar[bool] = False

    def compared(self, x: LossInputs) -> list[Tensor]:
        return [x.chosen.mean_logprobs, x.rejected.mean_logprobs]

    def of(self, *logprobs: Tensor, margin: Tensor | None = None) -> tuple[Tensor, Metrics]:
        """Return the loss per pair (B,) and the metrics of averaged log-probabilities: chosen, rejected, (B,) each."""
        chosen, rejected = logprobs
        c, r = wide_rows(chosen=chosen, rejected=rejected)
        return self.measured(c, r, margin)


@dataclass(frozen=True)
class ReferenceLoss(PairLoss):
    """Base of the losses of x; `per_pair` gets log-ratios to the reference."""

    def compared(self, x: LossInputs) -> list[Tensor]:
        return [x.chosen.logprobs, x.rejected.logprobs, x.chosen.ref_logprobs, x.rejected.ref_logprobs]

    def of(self, *logprobs: Tensor, margin: Tensor | None = None) -> tuple[Tensor, Metrics]:
        """Return the loss per pair (B,) and the metrics of summed log-probabilities: chosen, rejected, the
        reference's of chosen, and of rejected, (B,) each."""
        chosen, rejected, ref_chosen, ref_rejected = logprobs
        named = {"chosen": chosen, "rejected": rejected, "ref_chosen": ref_chosen, "ref_rejected": ref_rejected}
        c, r, ref_c, ref_r = wide_rows(**named)
        return self.measured(c - ref_c.detach(), r - ref_r.detach(), margin)


@dataclass(frozen=True)
class dpo(ReferenceLoss):
    """L = -(1 - s) log sigmoid(beta x) - s log sigmoid(-beta x), direct preference optimisation (arXiv 2305.18290).

    s = `label_smoothing` in [0, 0.5), the probability that a label is wrong (Mitchell, 2023); `robust`: ((1 - s) l(x)
    - s l(-x)) / (1 - 2 s) with l = -log sigmoid(beta x), unbiased under flipped labels (arXiv 2403.00409).
    """

    paper: ClassVar[str] = "2305.18290"
    takes_margin: ClassVar[bool] = True
    label_smoothing: float = 0.0
    robust: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.label_smoothing < 0.5 or (self.robust and not self.label_smoothing):
            raise LossError(
                f"dpo: label_smoothing={self.label_smoothing!r} must lie in [0, 0.5), and above 0 with robust=True."
            )

    def per_pair(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        x, s = chosen - rejected, self.label_smoothing
        right, wrong = -logsigmoid(self.beta * x), -logsigmoid(-self.beta * x)
        return ((1 - s) * right - s * wrong) / (1 - 2 * s) if self.robust else (1 - s) * right + s * wrong


@dataclass(frozen=True)
class ipo(ReferenceLoss):
    """L = (x - 1 / (2 beta))², identity preference optimisation (arXiv 2310.12036, equation 17; beta is its tau).

    The paper and OpenRLHF sum the log-probabilities, TRL averages them over tokens.
    """

    paper: ClassVar[str] = "2310.12036"

    def per_pair(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        return (chosen - rejected - 1 / (2 * self.beta)) ** 2


@dataclass(frozen=True)
class simpo(ReferenceFreeLoss):
    """L = -log sigmoid(beta (chosen - rejected) - gamma), gamma the margin that is wanted (SimPO, arXiv 2405.14734)."""

    paper: ClassVar[str] = "2405.14734"
    takes_margin: ClassVar[bool] = True
    beta: float = 2.0
    gamma: float = within(0.5, 0.0)

    def per_pair(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        return -logsigmoid(self.beta * (chosen - rejected) - self.gamma)


@dataclass(frozen=True)
class orpo(ReferenceFreeLoss):
    """L = -chosen - beta log sigmoid(log odds(chosen) - log odds(rejected)), odds ratio PO (arXiv 2403.07691).

    odds(l) = exp(l) / (1 - exp(l)); beta is the paper's lambda. Each pair has the same weight (TRL: each token).
    """

    paper: ClassVar[str] = "2403.07691"

    def per_pair(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        return -chosen - self.beta * logsigmoid(_log_odds(chosen) - _log_odds(rejected))


@dataclass(frozen=True)
class kto(PreferenceLoss):
    """Kahneman-Tversky optimisation: good and bad responses that need not come in pairs (arXiv 2402.01306).

    l = logprobs - ref_logprobs, z = max(0, kl): L = w_d (1 - sigmoid(beta (l - z))) or w_u (1 - sigmoid(beta (z - l))).
    In a training step `kl` is `kto_kl` of all its responses that stand after other prompts (preference 0), which
    `rb.data.labelled` adds.
    """

    paper: ClassVar[str] = "2402.01306"
    needs_pairs: ClassVar[bool] = False
    needs_plan: ClassVar[bool] = True
    beta: float = within(0.1, 0.0, above=True)
    desirable_weight: float = within(1.0, 0.0)
    undesirable_weight: float = within(1.0, 0.0)

    def of(
        self, logprobs: Tensor, ref_logprobs: Tensor, desirable: Tensor, kl: Tensor | float
    ) -> tuple[Tensor, Metrics]:
        """Return the loss per response (B,), `kl` being `kto_kl` of the whole step, and its implicit `reward` (B,)."""
        policy, reference = wide_rows(logprobs=logprobs, ref_logprobs=ref_logprobs)
        checks.shape("desirable", desirable, tuple(policy.shape))
        if desirable.dtype != torch.bool:
            raise LossError(f"desirable has dtype {desirable.dtype}; wanted bool, True for the good responses.")
        log_ratio = policy - reference.detach()
        point = torch.as_tensor(kl, dtype=log_ratio.dtype, device=log_ratio.device).detach().clamp(min=0)
        checks.shape("kl", point, ())
        good = self.desirable_weight * torch.sigmoid(self.beta * (point - log_ratio))  # 1 - sigmoid(-y)
        bad = self.undesirable_weight * torch.sigmoid(self.beta * (log_ratio - point))
        return torch.where(desirable, good, bad), {"reward": self.beta * log_ratio.detach()}

    def plan(self, whole: LossInputs) -> dict[str, Tensor]:
        """Return the reference point, `kto_kl` of the step's responses after other prompts, as a channel (S, T)."""
        preference, reference = self._labelled(whole)
        rows = preference == 0
        if whole.lengths is None or not bool(rows.any()):
            raise LossError(
                "kto needs responses after other prompts, for its reference point, and the batch has none: "
                "rb.data.labelled(rows, tokenizer) adds them."
            )
        held = torch.arange(whole.mask.shape[1], device=whole.mask.device) < whole.lengths[:, None]
        sums = [sequence_logprobs(values[rows], held[rows]) for values in (whole.logprobs, reference)]
        point = kto_kl(sums[0], sums[1])
        return {POINT: point.expand(whole.mask.shape).clone()}

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, Metrics]:
        """Return the loss (S, T), each response's on all of its tokens, and the metrics (S, 1): rewards of the good
        ones as `reward_chosen`, of the others as `reward_rejected`, and the reference `point`."""
        check_shapes(inputs)
        preference, reference = self._labelled(inputs)
        channels = inputs.channels if POINT in inputs.channels else self.plan(inputs)
        policy, base = (sequence_logprobs(values, inputs.mask) for values in (inputs.logprobs, reference))
        loss, metrics = self.of(policy, base, preference > 0, channels[POINT][0, 0])
        counted = inputs.mask & (preference != 0)[:, None]
        reward = torch.as_tensor(metrics["reward"])
        measured: Metrics = {
            name: torch.where(preference == sign, reward, torch.nan)[:, None]
            for name, sign in (("reward_chosen", 1), ("reward_rejected", -1))
        }
        measured["point"] = channels[POINT][0, 0].clamp(min=0)
        return masked(loss[:, None].expand(inputs.mask.shape), counted), measured

    def _labelled(self, x: LossInputs) -> tuple[Tensor, Tensor]:
        """Return which responses are good (S,), and the reference's log-probs (S, T)."""
        if x.preference is None:
            raise LossError("kto needs labels, good or bad, and the batch has none: rb.data.labelled(rows, tokenizer).")
        if x.ref_logprobs is None:
            raise LossError(f"{self} needs ref_logprobs, and the batch has none: use a reference.")
        return x.preference, x.ref_logprobs


def kto_kl(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Estimate KTO's reference point (arXiv 2402.01306): the mean log-ratio of responses after other prompts.

    Not clamped: average it over ranks first, `kto` then takes max(0, ·).
    """
    policy, reference = wide_rows(logprobs=logprobs, ref_logprobs=ref_logprobs)
    return (policy - reference).mean().detach()


def _log_odds(logprob: Tensor) -> Tensor:
    """Return log(p / (1 - p)); a probability of 1 is read as 1 - 1e-6, where the odds would be infinite."""
    below_one = logprob.clamp(max=-1e-6)
    return below_one - torch.log(-torch.expm1(below_one))
