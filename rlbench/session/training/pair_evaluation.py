"""How well a reward model tells the better of two responses, and how far its confidence can be trusted."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from rlbench.data import Rollouts, TrainBatch
from rlbench.data.base.drawing import drawn
from rlbench.data.batches.pairing import check_pairs
from rlbench.dispatch.chain import ChainStep
from rlbench.errors import DataError, Suggesting
from rlbench.session.core import SessionCore
from rlbench.session.training.reward_steps import ask_scores, up_to_the_end
from rlbench.session.training.statistics import wilson_interval
from rlbench.session.training.text_data import compared

BINS = 10


class Bin(NamedTuple):
    """Pairs of about one confidence: how many, their mean confidence, and the share of them that is right."""

    pairs: int
    confidence: float
    accuracy: float


@dataclass(frozen=True, eq=False)
class PairEvaluation(Suggesting):
    """Scores of the chosen and the rejected response of each pair, (P,) float64 each, in the order of the batch.

    `tied` (P,) bool: pairs that were rated equal (margin 0), which are neither right nor wrong; `version`: of the
    weights that scored; `bins`: how many there are of confidence.
    """

    chosen: np.ndarray
    rejected: np.ndarray
    tied: np.ndarray
    version: int
    bins: int = BINS

    @property
    def right(self) -> np.ndarray:
        """Of each pair that is no tie, in order: whether its chosen response scores higher, bool."""
        return (self.chosen > self.rejected)[~self.tied]

    @property
    def accuracy(self) -> float:
        """Share of the pairs, ties aside, whose chosen response scores higher."""
        return float(self.right.mean())

    @property
    def interval(self) -> tuple[float, float]:
        """A 95 % interval of the accuracy, of pairs that are independent (Wilson 1927)."""
        return wilson_interval(int(self.right.sum()), len(self.right))

    @property
    def margin(self) -> float:
        """Mean of chosen - rejected over the pairs that are no ties."""
        return float((self.chosen - self.rejected)[~self.tied].mean())

    @property
    def log_loss(self) -> float:
        """Mean of -log σ(chosen - rejected) over the pairs that are no ties, in nats; log 2 says nothing."""
        return float(np.logaddexp(0.0, (self.rejected - self.chosen)[~self.tied]).mean())

    @cached_property
    def reliability(self) -> tuple[Bin, ...]:
        """Pairs by confidence σ(|chosen - rejected|), from 0.5 to 1 in `bins` equal parts; those with a pair."""
        gap = np.abs(self.chosen - self.rejected)[~self.tied]
        confidence = 1.0 / (1.0 + np.exp(-gap))
        place = np.minimum(((confidence - 0.5) * 2 * self.bins).astype(int), self.bins - 1)
        return tuple(
            Bin(int(held.sum()), float(confidence[held].mean()), float(self.right[held].mean()))
            for held in (place == i for i in range(self.bins))
            if held.any()
        )

    @property
    def calibration_error(self) -> float:
        """Expected calibration error: mean over pairs of |confidence - accuracy| of their bin (arXiv 1706.04599)."""
        return sum(b.pairs * abs(b.confidence - b.accuracy) for b in self.reliability) / len(self.right)

    def metrics(self) -> dict[str, float]:
        """Return what the record and trackers keep of it, by the names a step has for it."""
        found = {"reward_accuracy": self.accuracy, "reward_margin": self.margin, "loss": self.log_loss}
        return {f"eval/{name}": value for name, value in found.items()}

    def samples(self) -> dict[str, Rollouts]:
        """Nothing was sampled."""
        return {}

    def plot(self) -> Any:
        """Draw accuracy over confidence, and the diagonal that a calibrated model lies on."""
        return drawn("reliability_plot", self)

    def __float__(self) -> float:
        return self.accuracy

    def __repr__(self) -> str:
        low, high = self.interval
        ties = f", {int(self.tied.sum())} ties aside" if self.tied.any() else ""
        return (
            f"PairEvaluation(accuracy {self.accuracy:.3f} [{low:.3f}, {high:.3f}] of {len(self.right)} pairs{ties}; "
            f"margin {self.margin:.3g}, log loss {self.log_loss:.3g}, calibration error {self.calibration_error:.3f}; "
            f"v{self.version})"
        )


def evaluate(core: SessionCore, pairs: TrainBatch, *, bins: int = BINS) -> Generator[ChainStep, Any, PairEvaluation]:
    """Compare the scores of pairs that were not trained on; nothing is changed.

    Args:
        pairs: of `rb.data.pairs(rows, rm)`, or of `rollouts.pairs(by=…)`. Those with a margin of 0 are ties.
        bins: of confidence, for the calibration.

    Returns:
        A `PairEvaluation`: `accuracy` with its `interval`, `margin`, `log_loss`, `calibration_error`, `reliability`.
    """
    if isinstance(bins, bool) or not isinstance(bins, int) or bins < 1:
        raise DataError(f"evaluate: bins={bins!r}: a whole number from 1 on")
    batch = compared(pairs, "evaluate")
    check_pairs(batch)
    assert batch.pair is not None and batch.preference is not None
    tied = np.zeros(len(batch), bool) if batch.margin is None else batch.margin == 0
    sides = [np.flatnonzero((batch.preference == sign) & (batch.pair >= 0)) for sign in (1, -1)]
    chosen, rejected = (rows[np.argsort(batch.pair[rows], kind="stable")] for rows in sides)
    if tied[chosen].all():
        raise DataError("evaluate: all pairs are ties (margin 0), so none can be right")
    version = core.version
    scores = np.asarray((yield ask_scores(core, *up_to_the_end(batch))), np.float64)
    if not np.isfinite(scores).all():
        bad = int((~np.isfinite(scores)).sum())
        raise DataError(f"evaluate: {bad} of {len(scores)} scores are not finite: rm.undo() takes the last step back")
    return PairEvaluation(scores[chosen], scores[rejected], tied[chosen], version, bins)
