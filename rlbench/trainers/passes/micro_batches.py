"""From ragged sequences to micro-batches: which rows go together on which rank."""

from __future__ import annotations

import heapq

import numpy as np

from rlbench.errors import DataError


def plan_micro_batches(
    lengths: np.ndarray, world_size: int, token_budget: int, together: np.ndarray | None = None
) -> list[list[np.ndarray]]:
    """Split rows of these lengths (B,) into micro-batches of at most `token_budget` tokens, balanced over the ranks.

    A pure function, so that every rank makes the same plan. The fewest steps whose longest-first packing stays in the
    budget are taken; a row longer than the budget is a micro-batch of its own. `plan[rank][step]` are row indices,
    int64, ordered by length: neighbours of equal length share one attention call. Rows with one number in `together`
    (B,) int64, of at least 0, go into one micro-batch, also where they are longer than the budget.
    """
    if len(lengths) == 0 or token_budget < 1:
        raise DataError(f"token_budget={token_budget} for {len(lengths)} sequences: both are 1 at least.")
    sizes, units = _units(lengths, together)
    limit = max(token_budget, int(sizes.max()))
    steps = max(1, -(-int(sizes.sum()) // (limit * world_size)))
    while True:
        bins, loads = longest_first(sizes, steps * world_size)
        if max(loads) <= limit or steps * world_size >= len(sizes):
            break
        steps += 1
    by_load = sorted(range(len(bins)), key=lambda i: (-loads[i], i))
    rows = [bins[i] if units is None else [row for unit in bins[i] for row in units[unit]] for i in by_load]
    ordered = [np.asarray(sorted(held, key=lambda row: (int(lengths[row]), row)), np.int64) for held in rows]
    return [ordered[rank::world_size] for rank in range(world_size)]


def _units(lengths: np.ndarray, together: np.ndarray | None) -> tuple[np.ndarray, list[list[int]] | None]:
    """Tokens of what stays together, (U,) int64, and the rows of each, in the order of the first; None: each row."""
    if together is None:
        return lengths, None
    numbers = np.where(together < 0, -1 - np.arange(len(lengths)), together)
    units: dict[int, list[int]] = {}
    for row, number in enumerate(numbers.tolist()):
        units.setdefault(number, []).append(row)
    return np.array([int(lengths[rows].sum()) for rows in units.values()], np.int64), list(units.values())


def longest_first(lengths: np.ndarray, count: int) -> tuple[list[list[int]], list[int]]:
    """Give each row, longest first, to the emptiest of `count` bins; return bins and their tokens."""
    bins: list[list[int]] = [[] for _ in range(count)]
    heap = [(0, i) for i in range(count)]
    for row in np.argsort(-lengths, kind="stable"):
        load, i = heapq.heappop(heap)
        bins[i].append(int(row))
        heapq.heappush(heap, (load + int(lengths[row]), i))
    return bins, [load for load, _ in sorted(heap, key=lambda entry: entry[1])]
