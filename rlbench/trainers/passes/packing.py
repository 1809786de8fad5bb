"""From ragged sequences to micro-batches: which rows go together on which rank, and one row without padding.

The plan is a pure function of the lengths, so that every rank makes the same one without talking.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rlbench.data.base.ragged import flat_index, offsets_of
from rlbench.data.batches.batch import TrainBatch
from rlbench.errors import DataError

Plan = list[list[np.ndarray]]
"""`plan[rank][step]`: row indices, int64, ordered by length; empty where the rank has nothing in that
step."""


def plan_micro_batches(lengths: np.ndarray, world_size: int, token_budget: int) -> Plan:
    """Split rows into micro-batches of at most `token_budget` tokens, balanced over ranks and steps.

    The fewest steps whose longest-first packing stays in the budget are taken. A row longer than the budget
    is a micro-batch of its own.

    Args:
        lengths: (B,) tokens of each row, prompt and response.
        world_size: ranks; all get the same number of steps.
        token_budget: tokens of one micro-batch on one rank.

    Raises:
        DataError: no rows, or a budget below one token.
    """
    if len(lengths) == 0:
        raise DataError("the batch has no sequences; nothing can be computed.")
    if token_budget < 1:
        raise DataError(f"token_budget={token_budget}: a micro-batch must hold at least one token.")
    limit = max(token_budget, int(lengths.max()))
    steps = max(1, -(-int(lengths.sum()) // (limit * world_size)))
    while True:
        bins, loads = _longest_first(lengths, steps * world_size)
        if max(loads) <= limit or steps * world_size >= len(lengths):
            break
        steps += 1
    by_load = sorted(range(len(bins)), key=lambda i: (-loads[i], i))
    return [
        [_by_length(bins[by_load[step * world_size + rank]], lengths) for step in range(steps)]
        for rank in range(world_size)
    ]


def _longest_first(lengths: np.ndarray, count: int) -> tuple[list[list[int]], list[int]]:
    """Give each row, longest first, to the emptiest of `count` bins; return bins and their tokens."""
    bins: list[list[int]] = [[] for _ in range(count)]
    heap = [(0, i) for i in range(count)]
    for row in np.argsort(-lengths, kind="stable"):
        load, i = heapq.heappop(heap)
        bins[i].append(int(row))
        heapq.heappush(heap, (load + int(lengths[row]), i))
    loads = [0] * count
    for load, i in heap:
        loads[i] = load
    return bins, loads


def _by_length(rows: list[int], lengths: np.ndarray) -> np.ndarray:
    """Order rows by length: neighbours of equal length share one attention call."""
    return np.asarray(sorted(rows, key=lambda row: (int(lengths[row]), row)), np.int64)


@dataclass(frozen=True)
class Grid:
    """Where each response token of a micro-batch sits in the padded (sequences, tokens) view of a loss."""

    rows: Tensor
    columns: Tensor
    shape: tuple[int, int]

    def pad(self, flat: Tensor, fill: float = 0.0) -> Tensor:
        """Flat (R,) values to (S, T); differentiable."""
        return flat.new_full(self.shape, fill).index_put((self.rows, self.columns), flat)

    def flat(self, padded: Tensor) -> Tensor:
        """(S, T) back to the flat (R,) values."""
        return padded[self.rows, self.columns]


@dataclass(frozen=True)
class ModelInputs:
    """One micro-batch for the model.

    Attributes:
        input_ids, position_ids: (1, total) packed, or (S, longest) padded; int64.
        attention_mask: None packed; (S, longest) padded.
        lengths: tokens of each row.
        predictors: flat positions, in `input_ids`, whose logits predict the response tokens; (R,).
        targets: those response tokens; (R,).
        grid: their place in the loss's view.
    """

    input_ids: Tensor
    position_ids: Tensor
    attention_mask: Tensor | None
    lengths: list[int]
    predictors: Tensor
    targets: Tensor
    grid: Grid


def model_inputs(batch: TrainBatch, device: torch.device, packed: bool) -> ModelInputs:
    """Lay out the rows of `batch` as one row without padding, or as padded rows.

    Raises:
        DataError: a row without a prompt (its first response token would have nothing to be predicted from).
    """
    prompt, response = batch.prompts.lengths, batch.responses.lengths
    if (prompt < 1).any():
        raise DataError(f"sequence {int((prompt < 1).argmax())} has an empty prompt; give it at least one token.")
    lengths = prompt + response
    width = int(lengths.max())
    starts = offsets_of(lengths)[:-1] if packed else np.arange(len(lengths), dtype=np.int64) * width
    size = int(lengths.sum()) if packed else width * len(lengths)
    ids = np.zeros(size, np.int64)
    positions = np.zeros(size, np.int64) if packed else np.tile(np.arange(width), len(lengths))
    ids[_spread(starts, prompt)] = batch.prompts.values
    response_at = _spread(starts + prompt, response)
    ids[response_at] = batch.responses.values
    mask = None
    if packed:
        positions[_spread(starts, lengths)] = _spread(np.zeros_like(lengths), lengths)
    else:
        held = np.zeros(size, np.int64)
        held[_spread(starts, lengths)] = 1
        mask = torch.from_numpy(held.reshape(-1, width)).to(device)
    shape = (1, size) if packed else (len(lengths), width)
    columns = _spread(np.zeros_like(response), response)
    rows = np.repeat(np.arange(len(response)), response)
    grid = Grid(_to(rows, device), _to(columns, device), (len(response), max(1, int(response.max()))))
    return ModelInputs(
        input_ids=_to(ids.reshape(shape), device),
        position_ids=_to(positions.reshape(shape), device),
        attention_mask=mask,
        lengths=lengths.tolist(),
        predictors=_to(response_at - 1, device),
        targets=_to(ids[response_at], device),
        grid=grid,
    )


def _spread(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Positions start, start+1, … of each row, joined."""
    offsets = offsets_of(lengths)
    within = flat_index(offsets, np.arange(len(lengths))) - np.repeat(offsets[:-1], lengths)
    return np.repeat(starts, lengths) + within


def _to(values: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values, np.int64)).to(device)
