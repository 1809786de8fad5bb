"""Which rows of a batch belong together, because a loss compares them."""

from __future__ import annotations

import numpy as np

from rlbench.data.batches.batch import TrainBatch
from rlbench.errors import LossError


def check_pairs(batch: TrainBatch) -> None:
    """Refuse a batch without pairs, and one with a part of a pair."""
    if batch.pair is None or batch.preference is None or not (batch.pair >= 0).any():
        raise LossError("the loss compares pairs, and the batch has none: rb.data.pairs(rows, tokenizer)")
    whole = np.isin(np.arange(len(batch)), whole_pairs(batch))
    broken = np.flatnonzero((batch.pair >= 0) & ~whole)
    if len(broken):
        raise LossError(
            f"sequence {broken[0]} is one of a pair whose other response is not in the batch, or there twice "
            f"({len(broken)} such): cut a batch of pairs between pairs, which stand chosen, rejected, chosen, …"
        )


def whole_pairs(batch: TrainBatch) -> np.ndarray:
    """Return the rows whose pair has exactly one chosen and one rejected response, in their order, int64."""
    if batch.pair is None or batch.preference is None:
        return np.zeros(0, np.int64)
    numbers, index = np.unique(batch.pair, return_inverse=True)
    counts = [np.bincount(index[batch.preference == sign], minlength=len(numbers)) for sign in (1, -1)]
    good = (counts[0] == 1) & (counts[1] == 1) & (np.bincount(index) == 2) & (numbers >= 0)
    return np.flatnonzero(good[index])


def shortest(batch: TrainBatch, count: int) -> np.ndarray:
    """Return the `count` rows of the shortest responses; of pairs, as many whole ones as that; beside labelled ones
    also the shortest that is judged neither way. int64."""
    lengths, rows = batch.response_lengths, np.arange(len(batch))
    pairs = whole_pairs(batch)
    if batch.pair is not None and len(pairs):
        numbers, index = np.unique(batch.pair[pairs], return_inverse=True)
        size = np.bincount(index, weights=lengths[pairs])
        first = numbers[np.argsort(size, kind="stable")[: max(1, count // 2)]]
        return pairs[np.isin(batch.pair[pairs], first)]
    if batch.preference is None or not (batch.preference == 0).any():
        return np.argsort(lengths, kind="stable")[:count]
    judged, other = rows[batch.preference != 0], rows[batch.preference == 0]
    judged, other = (part[np.argsort(lengths[part], kind="stable")] for part in (judged, other))
    return np.concatenate([judged[:count], other[:1]])
