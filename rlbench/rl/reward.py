"""Losses of a reward model, from comparisons: which of two responses should score higher.

Each is a loss of a step, `rm.train_step(pairs, loss=rb.rl.bradley_terry(centering=0.01))`, of `LossInputs` with pairs
and scores: c and r are what the model says of the chosen and the rejected response after its last trained token, m the
pair's margin. The mathematics is in `rlbench.rl.supervised`. The metrics are `reward_chosen`, `reward_rejected`,
`reward_margin` = c - r and `reward_accuracy`, the share of pairs with c > r, ties aside.

Where pairs judge heads, each head is trained by the pairs that say something of it: the loss is the sum over heads of
the mean over those pairs, c and r being the head's own scores of the response that is better there and of the other. A
tie is said by the verdict. Metrics by head are called `reward_accuracy/HEAD`; without a head's name they are means over
the heads of each pair.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rlbench.errors import LossError
from rlbench.rl.checks import wide_rows, within
from rlbench.rl.policy import Metrics, masked
from rlbench.rl.preference import PreferenceLoss
from rlbench.rl.supervised import bradley_terry_loss, centering_penalty, hps_loss, log_exp_loss, tie_penalty
from rlbench.rl.types import LossInputs


@dataclass(frozen=True)
class ScoreLoss(PreferenceLoss, ABC):
    """Base of them all; a subclass writes `per_pair`.

    `centering` times (c + r)² is added for each pair, which keeps scores around 0 (arXiv 2312.09244). With `ties` a
    pair whose margin is 0 was rated equal: it gets `ties` |c - r| in place of the loss; None: it is a pair as others.
    """

    needs_reference: ClassVar[bool] = False
    takes_margin: ClassVar[bool] = False
    centering: float = within(0.0, 0.0)
    ties: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ties is not None and not self.ties > 0:
            raise LossError(f"{type(self).__name__}: ties={self.ties!r} is a weight above 0 (LightRFT: 0.01), or None.")

    @abstractmethod
    def per_pair(self, chosen: Tensor, rejected: Tensor, margin: Tensor | None) -> Tensor:
        """Return the loss (B,) of the scores (B,) of each pair."""

    def of(self, chosen: Tensor, rejected: Tensor, margin: Tensor | None = None) -> tuple[Tensor, Metrics]:
        """Return the loss per pair (B,) and the metrics, of scores and margins (B,)."""
        c, r = wide_rows(chosen=chosen, rejected=rejected)
        if margin is not None and not self.takes_margin and self.ties is None:
            raise LossError(f"{self} takes no margin, and the pairs have one: batch.replace(margin=None), or ties=.")
        tied = torch.zeros_like(c, dtype=torch.bool) if margin is None or self.ties is None else margin == 0
        return self.judged(c, r, margin, tied)

    def judged(self, c: Tensor, r: Tensor, margin: Tensor | None, tied: Tensor) -> tuple[Tensor, Metrics]:
        """Return loss and metrics as `of` does, of pairs of which those that are `tied` (B,) bool were rated equal."""
        loss = self.per_pair(c, r, margin if self.takes_margin else None)
        if self.ties is not None:
            loss = torch.where(tied, self.ties * tie_penalty(c, r), loss)
        if self.centering:
            loss = loss + self.centering * centering_penalty(c, r)
        gap = (c - r).detach()
        right = torch.where(tied, torch.nan, (gap > 0).to(gap.dtype))
        return loss, {
            "reward_chosen": c.detach(),
            "reward_rejected": r.detach(),
            "reward_margin": gap,
            "reward_accuracy": right,
        }

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, Metrics]:
        """Return the loss (S, T), each pair's on every token of both responses, and the metrics (S, 1)."""
        chosen, rejected = inputs.chosen, inputs.rejected
        if inputs.verdicts is not None:
            loss, metrics = self.of_heads(inputs)
        else:
            loss, metrics = self.of(chosen.scores, rejected.scores, chosen.margin)
        rows = {name: inputs.of_pairs(torch.as_tensor(value))[:, :1] for name, value in metrics.items()}
        return masked(inputs.of_pairs(loss), inputs.mask), dict(rows)

    def of_heads(self, inputs: LossInputs) -> tuple[Tensor, Metrics]:
        """Return the loss per pair (P,), whose mean over the step's pairs is the sum over heads, and the metrics."""
        margin, said = inputs.chosen.margin, inputs.chosen.verdicts
        assert said is not None and inputs.verdict_weights is not None and inputs.heads is not None
        if margin is not None and not self.takes_margin:
            raise LossError(f"{self} takes no margin, and the pairs have one: batch.replace(margin=None).")
        if self.ties is None and bool((said == 0).any()):
            raise LossError(
                f"{self} does not know ties, and pairs are rated equal in a head: give ties=0.01, a weight."
            )
        scores = zip(inputs.chosen.head_scores.T, inputs.rejected.head_scores.T, said.T, strict=True)
        total, found = said.new_zeros(len(said)), dict[str, list[Tensor]]()
        for (chosen, rejected, verdict), weight in zip(scores, inputs.verdict_weights, strict=True):
            judges = ~verdict.isnan()
            one, other = (torch.where(judges, score, 0.0) for score in (chosen, rejected))  # what is not said is no NaN
            better, worse = torch.where(verdict < 0, other, one), torch.where(verdict < 0, one, other)
            better, worse = wide_rows(chosen=better, rejected=worse)
            loss, metrics = self.judged(better, worse, margin, verdict == 0)
            total = total + torch.where(judges, loss * weight, 0.0)
            for name, value in metrics.items():
                found.setdefault(name, []).append(torch.where(judges, torch.as_tensor(value), torch.nan))
        by_head = {
            f"{name}/{head}": v for name, each in found.items() for head, v in zip(inputs.heads, each, strict=True)
        }
        return total, {name: torch.stack(each).nanmean(0) for name, each in found.items()} | by_head


@dataclass(frozen=True)
class bradley_terry(ScoreLoss):
    """L = -log σ(c - r - m) of a reward model (Bradley and Terry, 1952; arXiv 2203.02155; the margin 2307.09288)."""

    paper: ClassVar[str] = "2203.02155"
    takes_margin: ClassVar[bool] = True

    def per_pair(self, chosen: Tensor, rejected: Tensor, margin: Tensor | None) -> Tensor:
        return bradley_terry_loss(chosen, rejected, margin)[0]


@dataclass(frozen=True)
class log_exp(ScoreLoss):
    """L = log(1 + exp(r - c)) of a reward model (arXiv 2204.05862): `bradley_terry` without a margin."""

    paper: ClassVar[str] = "2204.05862"

    def per_pair(self, chosen: Tensor, rejected: Tensor, margin: Tensor | None) -> Tensor:
        return log_exp_loss(chosen, rejected)[0]


@dataclass(frozen=True)
class hps(ScoreLoss):
    """Cross-entropy over softmax(exp(log_scale) [c, r]) of a reward model (HPS v2, arXiv 2306.09341).

    `preference` in [0.5, 1]: the share of raters who preferred the chosen response; below 1 it smooths the labels.
    `scale_lr`: above 0 the scale is learned, by gradient descent at this rate beside the optimizer's step, from
    `log_scale` on (HPS v2 and LightRFT: log 1/0.07), and is a state that goes back with undo. Metric: `log_scale`.
    """

    paper: ClassVar[str] = "2306.09341"
    log_scale: float = within(0.0, -10.0, 10.0)
    preference: float = within(1.0, 0.5, 1.0)
    scale_lr: float = within(0.0, 0.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scale_lr:
            object.__setattr__(self, "state", {"log_scale": torch.tensor(self.log_scale)})

    def per_pair(self, chosen: Tensor, rejected: Tensor, margin: Tensor | None) -> Tensor:
        return hps_loss(chosen, rejected, torch.full_like(chosen, self.preference), self._log_scale)[0]

    def judged(self, c: Tensor, r: Tensor, margin: Tensor | None, tied: Tensor) -> tuple[Tensor, Metrics]:
        loss, metrics = super().judged(c, r, margin, tied)
        if self.scale_lr:
            log_scale = torch.as_tensor(self._log_scale).to(loss)
            scaled = log_scale.exp() * (c - r).detach().to(loss)
            slope = scaled * (scaled.sigmoid() - self.preference)
            metrics |= {"log_scale": log_scale.expand_as(loss), "log_scale_slope": torch.where(tied, 0.0, slope)}
        return loss, metrics

    def update(self, metrics: Mapping[str, float]) -> None:
        """Step down the slope of the whole step's loss: its mean over pairs, or the sum of those over each head's."""
        now: Tensor = self._log_scale  # type: ignore[assignment]
        by_head = [slope for name, slope in metrics.items() if name.startswith("log_scale_slope/")]
        slope = sum(by_head) if by_head else metrics["log_scale_slope"]
        object.__setattr__(self, "state", {"log_scale": now - self.scale_lr * slope})

    @property
    def _log_scale(self) -> Tensor | float:
        return self.state["log_scale"] if self.scale_lr else self.log_scale  # type: ignore[attr-defined,no-any-return]
