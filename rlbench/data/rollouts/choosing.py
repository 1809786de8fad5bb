"""Texts out of what was sampled: pairs of a better and a worse completion, and the best ones to imitate."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from rlbench.data.batches.batch import TrainBatch
from rlbench.data.record.origin import made_with
from rlbench.data.rollouts import taking
from rlbench.data.rollouts.comparing import scored_by
from rlbench.data.rollouts.contexts import refuse_several
from rlbench.data.rollouts.turns import sampled_mask
from rlbench.errors import DataError

if TYPE_CHECKING:
    from rlbench.data.rollouts.rollouts import Rollouts

SAME = 1e-9
"""Scores of a group count as equal when they differ by less than this times the largest of them, at least 1."""


def best_and_worst(rollouts: Rollouts, by: Any) -> TrainBatch:
    """See `Rollouts.pairs`."""
    refuse_several(rollouts, "pairs")
    scored = scored_by(rollouts, "pairs: by=", by, {})
    rows, ties, single = [], 0, 0
    for own in _groups(scored):
        scores = np.asarray(scored.rewards)[own]
        best, worst = own[scores.argmax()], own[scores.argmin()]
        if len(own) < 2:
            single += 1
        elif np.ptp(scores) <= SAME * max(1.0, float(np.abs(scores).max())):
            ties += 1
        else:
            rows += [int(best), int(worst)]
    said = f"pairs: {ties} of {len(rollouts)} prompts have equal scores throughout"
    said += f", {single} fewer than two finished completions with a score" if single else ""
    if not rows:
        raise DataError(f"{said}: no pair is left")
    if ties or single:
        warnings.warn(f"{said}: left out", stacklevel=3)
    sign = np.tile(np.array([1, -1], np.int8), len(rows) // 2)
    batch = _batch(scored, rows, sign)
    return batch.replace(preference=sign, pair=np.repeat(np.arange(len(rows) // 2, dtype=np.int32), 2))


def best_of(rollouts: Rollouts, by: Any, count: int | None, at_least: float | None) -> TrainBatch:
    """See `Rollouts.demonstrations`."""
    if count is not None and (not isinstance(count, int) or count < 1):
        raise DataError(f"demonstrations: best_of={count!r}: wanted a whole number, at least one")
    scored = scored_by(rollouts, "demonstrations: by=", by, {})
    rows = []
    for own in _groups(scored):
        scores, size = np.asarray(scored.rewards), count or len(own)
        for at in range(0, len(own) - size + 1, size):
            best = own[at : at + size][scores[own[at : at + size]].argmax()]
            rows += [int(best)] if at_least is None or scores[best] >= at_least else []
    if not rows:
        reason = "" if at_least is None else f", or none scores {at_least} or more"
        raise DataError(f"demonstrations: no prompt has {count or 1} finished completions with a score{reason}")
    return _batch(scored, rows, np.ones(len(rows)))


def _groups(scored: Rollouts) -> list[np.ndarray]:
    """Return the rows of each prompt that can be learnt from: finished, scored, and with a token that was sampled."""
    own = np.add.reduceat(np.append(sampled_mask(scored), False), scored.responses.offsets[:-1], dtype=np.int64)
    good = (own > 0) & (scored.lengths > 0) & ~scored.aborted & np.isfinite(np.asarray(scored.rewards))
    rows = np.flatnonzero(good)
    return [rows[scored.group[rows] == group] for group in np.unique(scored.group[rows])]


def _batch(scored: Rollouts, rows: list[int], advantages: np.ndarray) -> TrainBatch:
    given: Callable[..., Any] = lambda rewards, group: advantages  # noqa: E731
    batch = taking.samples(scored, np.asarray(rows, np.int64)).batch(given)
    return made_with(batch, scored, advantage=None)
