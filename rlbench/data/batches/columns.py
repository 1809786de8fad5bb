"""Columns of a batch: numbers beside its tokens that a loss of one's own asks for, and those of a teacher."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlbench.data.base.ragged import Ragged
from rlbench.errors import DataError

TEACHER = "teacher_logprobs"
"""Log-prob of each response token under a teacher, float32 (tokens,)."""
TEACHER_IDS, TEACHER_TOP = "teacher_ids", "teacher_top_logprobs"
"""The teacher's K likeliest tokens there, int32 (tokens, K), and their log-probs, float32 (tokens, K)."""


def as_column(name: str, values: Any, rows: Ragged) -> np.ndarray:
    """Bring what a user gave to (tokens, …): float32; whole numbers int64, or int32 where they are.

    It comes flat over the response tokens, as one row per sequence, padded (sequences, longest, …), or as one number
    per sequence, which each of its tokens gets.
    """
    found = _flat(name, values, rows)
    tokens, lengths = len(rows.values), rows.lengths
    longest = int(lengths.max(initial=0))
    if found.shape[:1] == (tokens,):
        pass
    elif found.shape == (len(rows),):
        found = np.repeat(found, lengths)
    elif found.shape[:2] == (len(rows), longest):
        found = found[np.arange(longest) < lengths[:, None]]
    else:
        raise DataError(
            f"with_columns: {name} has shape {found.shape}; wanted ({tokens},) per response token, ({len(rows)},) per "
            f"sequence, or ({len(rows)}, {longest}) padded; further dimensions may follow the tokens'"
        )
    if found.dtype.kind == "f":
        return found.astype(np.float32)
    return found.astype(np.int32 if found.dtype == np.int32 else np.int64)


def _flat(name: str, values: Any, rows: Ragged) -> np.ndarray:
    """Return numbers as an array; rows of different lengths one after another."""
    if hasattr(values, "detach"):  # a tensor, of bfloat16 perhaps, which numpy does not know
        values = values.detach().cpu()
        values = (values.float() if values.is_floating_point() else values).numpy()
    try:
        if not isinstance(values, np.ndarray):
            values = list(values)
            if values and np.ndim(values[0]):
                parts = [np.asarray(value) for value in values]
                if [len(part) for part in parts] != rows.lengths.tolist():
                    raise DataError(f"with_columns: the rows of {name} are not as long as the responses")
                values = np.concatenate(parts)
        found = np.asarray(values)
    except (TypeError, ValueError) as error:
        raise DataError(f"with_columns: {name}: wanted numbers: {error}") from None
    if found.dtype.kind not in "biuf":
        raise DataError(f"with_columns: {name} holds {found.dtype}; wanted numbers")
    return found


def join_columns(columns: Sequence[Mapping[str, np.ndarray]], tokens: Sequence[int]) -> dict[str, np.ndarray]:
    """Join the columns of several batches by name; one number per token is NaN where a batch lacks it."""
    joined = {}
    for name in dict.fromkeys(name for one in columns for name in one):
        held = [one.get(name) for one in columns]
        shapes = {part.shape[1:] for part in held if part is not None}
        lacking = any(part is None for part in held)
        if len(shapes) > 1 or (lacking and shapes != {()}):
            how = "not in all" if lacking else "of other widths in some"
            raise DataError(f"join: column {name!r} is {how} of the batches")
        unknown = [np.full(count, np.nan, np.float32) for count in tokens]
        joined[name] = np.concatenate([nan if part is None else part for part, nan in zip(held, unknown, strict=True)])
    return joined
