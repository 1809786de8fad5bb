"""A training batch as one Parquet file that gives the same batch back, to the last bit.

One row per sequence, readable with any tool: `prompt_token_ids` and `token_ids` (list<int32>), each per-token field
(`mask`, `advantages`, `sampler_logprobs`, …) as a list beside the token ids, each per-sequence field (`group`,
`rewards`, …) as a number. Temperature, types and the batch's key stand in the schema's metadata.
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlbench.data.base import plain
from rlbench.data.base.arrow import list_column, ragged_column, read_own, write_own
from rlbench.data.base.optional import needed
from rlbench.errors import DataError

if TYPE_CHECKING:
    from rlbench.data.batches.batch import TrainBatch

FORMAT = 1
KEY = b"rlbench.batch"
TOKENS = {"prompts": "prompt_token_ids", "responses": "token_ids"}


def write_batch(batch: TrainBatch, path: str | Path) -> Path:
    """Write a Parquet file; see the top of this file. Fields that are None are left out."""
    needed("pyarrow", "to_parquet()")
    import pyarrow as pa

    from rlbench.data.batches.batch import PER_ROW, PER_TOKEN

    columns: dict[str, Any] = {}
    kinds: dict[str, str] = {}
    others: dict[str, Any] = {}
    for field in fields(batch):
        value = getattr(batch, field.name)
        if field.name in TOKENS:
            columns[TOKENS[field.name]], kinds[field.name] = list_column(value), value.values.dtype.str
        elif field.name in (*PER_TOKEN, *PER_ROW):
            if value is None:
                continue
            value = np.asarray(value)
            if value.dtype.kind not in "biuf":
                raise DataError(f"the batch's {field.name} are {value.dtype}: wanted an array of numbers or booleans")
            kinds[field.name] = value.dtype.str
            per_token = field.name in PER_TOKEN
            columns[field.name] = list_column(batch.responses.with_values(value)) if per_token else pa.array(value)
        else:
            others[field.name] = plain.to_plain(value, f"the batch's {field.name}")
    facts = {"format": FORMAT, "key": batch.key, "dtypes": kinds, "others": others}
    return write_own(pa.table(columns), path, KEY, facts)


def read_batch(path: str | Path) -> TrainBatch:
    """Read what `write_batch` wrote."""
    table, facts = read_own(path, KEY, FORMAT, "batch.to_parquet()")
    try:
        batch = _batch(table, facts)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise DataError(f"{path} was changed since batch.to_parquet() wrote it: {error}") from error
    if batch.key != facts["key"]:
        raise DataError(f"{path} was changed since batch.to_parquet() wrote it: its tokens are others")
    return batch


def _batch(table: Any, facts: dict[str, Any]) -> TrainBatch:
    from rlbench.data.batches.batch import PER_TOKEN, TrainBatch

    known = {field.name for field in fields(TrainBatch)}
    found: dict[str, Any] = {name: plain.from_plain(value) for name, value in facts["others"].items()}
    for name, dtype in facts["dtypes"].items():
        if name in TOKENS:
            found[name] = ragged_column(table[TOKENS[name]], np.dtype(dtype))
        elif name in PER_TOKEN:
            column = ragged_column(table[name], np.dtype(dtype))
            if not np.array_equal(column.offsets, found["responses"].offsets):
                raise ValueError(f"{name} is not as long as the token ids")
            found[name] = column.values
        else:
            found[name] = table[name].to_numpy().astype(np.dtype(dtype))
    strange = sorted(set(found) - known)
    if strange:
        raise DataError(f"the file has the fields {', '.join(strange)}: it is of a newer rlbench; update rlbench")
    return TrainBatch(**found)
