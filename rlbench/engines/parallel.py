"""`NeedParallel`: which arguments of a call are split over the ranks, and how.

Everything else is copied to all ranks. Rows are split into near-equal contiguous chunks, the remainder to the first
ranks; with fewer rows than ranks the rows are repeated where that is exact (rows divide ranks), else the call raises.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from rlbench.errors import DataError

_DP = {"dp", "data parallel", "data_parallel", "data-parallel"}
_SEQ = {
    "seq",
    "sequence parallel",
    "sequence_parallel",
    "sequence-parallel",
    "ctx",
    "context parallel",
    "context_parallel",
    "context-parallel",
}


class NeedParallel:
    """Marks an argument whose first dimension is to be split over the ranks.

    Args:
        data: a list, tuple, tensor, array, `TrainBatch`, … : anything with a length and slices.
        type: `"dp"`. `"seq"` raises: attention over a split sequence is not computed right yet.
    """

    def __init__(self, data: Any, /, *, type: str = "dp") -> None:
        if type in _SEQ:
            raise DataError(
                'NeedParallel(type="seq"): splitting a sequence over ranks is not supported, attention over the parts '
                'would be computed wrong; split rows with type="dp"'
            )
        if type not in _DP:
            raise DataError(f'NeedParallel(type={type!r}): wanted "dp"')
        if isinstance(data, str | bytes | Mapping) or not hasattr(data, "__len__") or not hasattr(data, "__getitem__"):
            raise DataError(
                f"NeedParallel wants rows to split (a list, tensor, array or batch), got {data.__class__.__name__}; "
                "wrap each list of a dict by itself"
            )
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __repr__(self) -> str:
        return f"NeedParallel({len(self.data)} rows of {type(self.data).__name__})"


def row_spans(rows: int, ranks: int) -> list[tuple[int, int]]:
    """The rows [first, last) of each rank.

    Raises DataError for no rows, and for fewer rows than ranks where repeating them would weigh some more than others.
    """
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
    starts = [r * size + min(r, extra) for r in range(ranks + 1)]
    return list(itertools.pairwise(starts))


def split_call(
    args: tuple[Any, ...], kwargs: dict[str, Any], ranks: int
) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """The arguments of each rank: marked ones split, all alike; the others as they are.

    Raises DataError where marked arguments of one call differ in their number of rows.
    """
    marked = [a for a in (*args, *kwargs.values()) if isinstance(a, NeedParallel)]
    counts = {len(m) for m in marked}
    if len(counts) > 1:
        raise DataError(
            f"the NeedParallel arguments of one call must have the same number of rows, got {sorted(counts)}"
        )
    if not marked:
        return [(args, kwargs)] * ranks
    spans = row_spans(counts.pop(), ranks)
    return [(tuple(_part(a, span) for a in args), {k: _part(v, span) for k, v in kwargs.items()}) for span in spans]


def _part(value: Any, span: tuple[int, int]) -> Any:
    return value.data[span[0] : span[1]] if isinstance(value, NeedParallel) else value


def estimated_bytes(value: Any, depth: int = 4) -> int:
    """A cheap lower estimate of what a value weighs on its way to a worker, by looking at a few elements."""
    if isinstance(value, NeedParallel):
        value = value.data
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
    fields = getattr(value, "__dataclass_fields__", None)
    if fields and depth:
        return sum(estimated_bytes(getattr(value, name), depth - 1) for name in fields)
    return 8
