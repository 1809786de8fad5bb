"""`NeedParallel`: which arguments of a call are split over the ranks, and how.

The rest is copied to all ranks. Rows are split into near-equal contiguous chunks, the remainder to the first ranks;
fewer rows than ranks are repeated where that is exact (rows divide ranks), else the call raises. Tokens are split over
the ranks of a group (`sequence_parallel`) evenly.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from typing import Any

from rlbench.errors import DataError

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of one rank."""


class NeedParallel:
    """Marks an argument that is to be split over the ranks.

    Args:
        data: a list, tuple, tensor, array, `TrainBatch`, … : anything with a length and slices.
        type: `"dp"` or `"data parallel"` splits rows, the first dimension. `"seq"` or `"sequence parallel"` splits rows
            over the groups of ranks that split sequences, and the tokens of a row, the second dimension, over the ranks
            of its group: the module attends across the slices.
    """

    def __init__(self, data: Any, /, *, type: str = "dp") -> None:
        words = re.split("[ _-]", type)
        if words not in (["dp"], ["data", "parallel"], ["seq"], ["sp"], ["sequence", "parallel"]):
            raise DataError(
                f'NeedParallel(type={type!r}): wanted "dp", which splits rows, or "seq", which splits tokens'
            )
        if isinstance(data, str | bytes | Mapping) or not hasattr(data, "__len__") or not hasattr(data, "__getitem__"):
            raise DataError(
                f"NeedParallel wants rows to split (a list, tensor, array or batch), got {data.__class__.__name__}; "
                "wrap each list of a dict by itself"
            )
        self.data = data
        self.splits_tokens = words[0].startswith("s")

    @property
    def tokens(self) -> int:
        """Tokens of a row, where they are split."""
        counts = {len(row) for row in self.data} if isinstance(self.data, list | tuple) else {self.data.shape[1]}
        if len(counts) != 1:
            raise DataError(
                f"NeedParallel(type='seq') got rows of {min(counts)} to {max(counts)} tokens: pad to one length"
            )
        return int(counts.pop())

    def part(self, rows: slice, tokens: slice) -> Any:
        """Return those rows, and of split ones those tokens."""
        if not self.splits_tokens:
            return self.data[rows]
        if isinstance(self.data, list | tuple):
            return [row[tokens] for row in self.data[rows]]
        return self.data[rows, tokens]

    def __len__(self) -> int:
        return len(self.data)

    def __repr__(self) -> str:
        return f"NeedParallel({len(self.data)} rows of {type(self.data).__name__})"


def row_spans(rows: int, ranks: int) -> list[tuple[int, int]]:
    """Return the rows [first, last) of each rank."""
    if rows == 0:
        raise DataError("NeedParallel got no rows: give at least one")
    if rows < ranks:
        if ranks % rows:
            raise DataError(
                f"NeedParallel got {rows} rows for {ranks} ranks; {rows} does not divide {ranks}, so repeating rows "
                f"would weigh some more than others: give at least {ranks} rows, or a number that divides {ranks}"
            )
        return [(r * rows // ranks, r * rows // ranks + 1) for r in range(ranks)]
    size, extra = divmod(rows, ranks)
    return list(itertools.pairwise(r * size + min(r, extra) for r in range(ranks + 1)))


def split_call(
    args: tuple[Any, ...], kwargs: dict[str, Any], ranks: int, sequence_parallel: int = 1, together: int = 1
) -> tuple[list[Arguments], int | None]:
    """Return the arguments of each rank, marked ones split, all alike, the others as they are; and the tokens of the
    rows that are split (None: none is). Neighbours that compute layers `together` get the same."""
    marked = [a for a in (*args, *kwargs.values()) if isinstance(a, NeedParallel)]
    counts = {len(m) for m in marked}
    if len(counts) > 1:
        raise DataError(
            f"the NeedParallel arguments of one call must have the same number of rows, got {sorted(counts)}"
        )
    if not marked:
        return [(args, kwargs)] * ranks, None
    tokens = _tokens([one for one in marked if one.splits_tokens], sequence_parallel)
    slices = 1 if tokens is None else sequence_parallel
    spans, width = row_spans(counts.pop(), ranks // together // slices), (tokens or 0) // slices

    def call(rank: int) -> Arguments:
        group, place = divmod(rank // together, slices)

        def part(value: Any) -> Any:
            own = slice(*spans[group]), slice(place * width, (place + 1) * width)
            return value.part(*own) if isinstance(value, NeedParallel) else value

        return tuple(map(part, args)), {k: part(v) for k, v in kwargs.items()}

    return list(map(call, range(ranks))), tokens


def _tokens(split: list[NeedParallel], sequence_parallel: int) -> int | None:
    """Return the tokens of rows that are split; None where there are none."""
    counts = {one.tokens for one in split}
    if not counts:
        return None
    if sequence_parallel == 1:
        raise DataError(
            "NeedParallel(type='seq'): the ranks of this engine split no sequences; make it with sequence_parallel=2 "
            "(rb.TrainEngine(module, sequence_parallel=2), rb.Train(sequence_parallel=2))"
        )
    if len(counts) > 1 or max(counts) % sequence_parallel:
        raise DataError(
            f"NeedParallel(type='seq') got rows of {sorted(counts)} tokens: one number is wanted, which "
            f"{sequence_parallel} ranks can share evenly; pad on the right"
        )
    return counts.pop()


def estimated_bytes(value: Any, depth: int = 4) -> int:
    """Return a cheap lower estimate of what a value weighs on its way to a worker, by looking at a few elements."""
    if isinstance(value, NeedParallel):
        value = value.data
    fields = () if isinstance(value, type) else getattr(value, "__dataclass_fields__", ())
    if fields:  # before it is asked for `nbytes`: a batch would look for what else could be meant
        return sum(estimated_bytes(getattr(value, name), depth - 1) for name in fields) if depth else 8
    size = getattr(value, "nbytes", None)
    if isinstance(size, int):
        return size
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple) and value and depth:
        looked = value[:: max(1, len(value) // 8)]
        return len(value) * sum(estimated_bytes(v, depth - 1) for v in looked) // len(looked)
    return 8
