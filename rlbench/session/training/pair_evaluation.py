"""How well a reward model tells the better of two responses, and how far its confidence can be trusted."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
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
from rlbench.session.training.text_data import compared, heads_known

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
    weights that scored; `bins`: how many there are of confidence. Of pairs that judge heads there is one entry for each
    verdict, by a head's own scores of the response that is better there and of the other; `heads`: those of each head.
    """

    chosen: np.ndarray
    rejected: np.ndarray
    tied: np.ndarray
    version: int
    bins: int = BINS
    heads: Mapping[str, PairEvaluation] = field(default_factory=dict)

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

    def _found(self) -> dict[str, float]:
        return {"reward_accuracy": self.accuracy, "reward_margin": self.margin, "loss": self.log_loss}

    def metrics(self) -> dict[str, float]:
        """Return what the record and trackers keep of it, by the names a step has for it."""
        by_head = {f"{name}/{head}": v for head, own in self.heads.items() for name, v in own._found().items()}
        return {f"eval/{name}": value for name, value in (self._found() | by_head).items()}

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
        ties += "".join(f", {name} {own.accuracy:.3f}" for name, own in self.heads.items())
        what = "verdicts" if self.heads else "pairs"
        return (
            f"PairEvaluation(accuracy {self.accuracy:.3f} [{low:.3f}, {high:.3f}] of {len(self.right)} {what}{ties}; "
            f"margin {self.margin:.3g}, log loss {self.log_loss:.3g}, calibration error {self.calibration_error:.3f}; "
            f"v{self.version})"
        )


def evaluate(core: SessionCore, pairs: TrainBatch, *, bins: int = BINS) -> Generator[ChainStep, Any, PairEvaluation]:
    """Compare the scores of pairs that were not trained on; nothing is changed.

    Args:
        pairs: of `rb.data.pairs(rows, rm)`, or of `rollouts.pairs(by=…)`. Those with a margin of 0 are ties. Where they
            judge heads, each head is compared by what is said of it.
        bins: of confidence, for the calibration.

    Returns:
        A `PairEvaluation`: `accuracy` with its `interval`, `margin`, `log_loss`, `calibration_error`, `reliability`;
        and one for each of `heads`.
    """
    if isinstance(bins, bool) or not isinstance(bins, int) or bins < 1:
        raise DataError(f"evaluate: bins={bins!r}: a whole number from 1 on")
    batch = compared(pairs, "evaluate", heads_known(core))
    check_pairs(batch)
    assert batch.pair is not None and batch.preference is not None
    sides = [np.flatnonzero((batch.preference == sign) & (batch.pair >= 0)) for sign in (1, -1)]
    chosen, rejected = (rows[np.argsort(batch.pair[rows], kind="stable")] for rows in sides)
    said = None if batch.verdicts is None else batch.verdicts.values[chosen]
    tied = np.zeros(len(chosen), bool) if batch.margin is None else batch.margin[chosen] == 0
    if tied.all() if said is None else not np.isin(said, (1, -1)).any():
        raise DataError("evaluate: all pairs are ties, so none can be right")
    version = core.version
    found = yield ask_scores(core, *up_to_the_end(batch))
    scores = np.asarray(found.values if said is None else found.heads, np.float64)
    if not np.isfinite(scores).all():
        bad = int((~np.isfinite(scores)).sum())
        raise DataError(f"evaluate: {bad} of {scores.size} scores are not finite: rm.undo() takes the last step back")
    if said is None:
        return PairEvaluation(scores[chosen], scores[rejected], tied, version, bins)
    return _by_head(batch.verdicts.heads, scores[chosen], scores[rejected], said, version, bins)  # type: ignore[union-attr]


def _by_head(
    heads: tuple[str, ...], one: np.ndarray, other: np.ndarray, said: np.ndarray, version: int, bins: int
) -> PairEvaluation:
    """Judge each head, and all verdicts together; scores and verdicts are (P, heads)."""
    better, worse = np.where(said < 0, other, one), np.where(said < 0, one, other)
    parts = {}
    for i, name in enumerate(heads):
        rows = ~np.isnan(said[:, i])
        if (said[rows, i] != 0).any():  # of a head that has ties alone none can be right
            parts[name] = PairEvaluation(better[rows, i], worse[rows, i], said[rows, i] == 0, version, bins)
    known = ~np.isnan(said)
    return PairEvaluation(better[known], worse[known], said[known] == 0, version, bins, parts)
