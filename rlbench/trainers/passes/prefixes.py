"""A prompt that several sequences of a micro-batch begin with, computed once: where it lies, and which go together.

Causal attention makes the keys and values of a prompt the same under each of its responses. So the prompt lies in the
packed row once, and each response sees it, and itself, alone; what is computed is the same to rounding. A group of n
responses of t tokens to a prompt of p takes p + n·t tokens in place of n·(p + t). Of padded rows this is Prefix Grouper
(arXiv 2506.05433).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rlbench.data.base.ragged import Ragged, offsets_of
from rlbench.data.batches.batch import TrainBatch
from rlbench.trainers.passes.micro_batches import longest_first

OWN = -1


@dataclass(frozen=True)
class Places:
    """Where B rows lie among the `size` flat tokens of a layout: the first places of `prompts` and `responses`, (B,)
    int64. What attends by itself is a segment, of `lengths` tokens; one that continues another, which its tokens see
    too, has its number in `after`, else `OWN`."""

    prompts: np.ndarray
    responses: np.ndarray
    size: int
    lengths: list[int]
    after: list[int]


def places_of(batch: TrainBatch, share_prompts: bool) -> Places:
    """Lay rows one behind the other; or where they share prompts, these and rows that share none, shortest
    first, and behind them the responses to shared prompts."""
    prompt, response = batch.prompts.lengths, batch.responses.lengths
    numbers = same_rows(batch.prompts) if share_prompts else np.arange(len(batch))
    shared = np.bincount(numbers)[numbers] > 1
    if not shared.any():
        starts, own = offsets_of(batch.lengths), (batch.lengths.tolist(), [OWN] * len(batch))
        return Places(starts[:-1], starts[:-1] + prompt, int(starts[-1]), *own)
    _, firsts = np.unique(numbers, return_index=True)
    trunks = np.where(shared, prompt, prompt + response)[firsts]
    order = np.argsort(trunks, kind="stable")
    rank = np.argsort(order)[numbers]  # of each row's trunk
    branches = np.flatnonzero(shared & (response > 0))
    branches = branches[np.lexsort((response[branches], rank[branches]))]
    lengths = np.concatenate([trunks[order], response[branches]])
    starts = offsets_of(lengths)
    prompts = starts[rank]
    responses = prompts + prompt
    responses[branches] = starts[len(trunks) : -1]
    after = [OWN] * len(trunks) + rank[branches].tolist()
    return Places(prompts, responses, int(starts[-1]), lengths.tolist(), after)


def padded_places(batch: TrainBatch, width: int) -> Places:
    """Lay rows out one below the other, with padding behind up to `width` tokens."""
    starts = np.arange(len(batch)) * width
    lengths = batch.lengths.tolist()
    return Places(starts, starts + batch.prompts.lengths, len(batch) * width, lengths, [OWN] * len(batch))


def kept_together(batch: TrainBatch, world_size: int, token_budget: int) -> tuple[np.ndarray, np.ndarray]:
    """Return which rows go into one micro-batch, a number for each, of a pair's at least 0, and how many tokens each
    adds to those of its number that come before it; (B,) int64 both.

    Rows of one prompt go together as far as they stay in `token_budget`, in as many parts as they have shares of what
    each of `world_size` ranks computes; of a batch of pairs the two of a pair, and no more.
    """
    prompt, response, same = batch.prompts.lengths, batch.responses.lengths, same_rows(batch.prompts)
    if batch.pair is not None:
        together = np.where(batch.pair < 0, -1 - np.arange(len(batch)), batch.pair).astype(np.int64)
    else:
        groups = rows_by(same)
        sizes = np.array([prompt[rows[0]] + response[rows].sum() for rows in groups])
        shares = np.rint(sizes * world_size / sizes.sum()).astype(np.int64)
        together, count = np.empty(len(batch), np.int64), 0
        for rows, least in zip(groups, shares.tolist(), strict=True):
            parts = _parts(int(prompt[rows[0]]), response[rows], token_budget, least)
            together[rows] = count + parts
            count += int(parts.max()) + 1
    _, firsts = np.unique(np.stack([same, together]), axis=1, return_index=True)
    added = response.copy()
    added[firsts] += prompt[firsts]
    return together, added


def same_rows(rows: Ragged) -> np.ndarray:
    """Return a number for each row, (B,) int64, the same where rows are; from 0, in the order of their first."""
    known: dict[bytes, int] = {}
    return np.array([known.setdefault(np.ascontiguousarray(row).tobytes(), len(known)) for row in rows], np.int64)


def rows_by(numbers: np.ndarray) -> list[np.ndarray]:
    """Return the rows of each number, in order."""
    order = np.argsort(numbers, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(numbers[order])) + 1)


def _parts(prompt: int, responses: np.ndarray, most: int, least: int) -> np.ndarray:
    """Split the responses (n,) to a prompt into the fewest parts, but `least`, that have with the prompt at `most` so
    many tokens, or into single ones; return the part of each, (n,) int64."""
    count = max(1, least, -(-int(responses.sum()) // max(1, most - prompt)))
    while count < len(responses):
        bins, loads = longest_first(responses, count)
        if prompt + max(loads) <= most:
            parts = np.empty(len(responses), np.int64)
            for part, rows in enumerate(bins):
                parts[rows] = part
            return parts
        count += 1
    return np.arange(len(responses))
