"""Arrow tables: ragged columns in and out, and the Parquet files of rollouts and batches, which must be ours."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlbench.data.base.drawing import needed
from rlbench.data.base.files import written_aside
from rlbench.data.base.ragged import Ragged, offsets_of
from rlbench.errors import DataError

OWN_KEYS = {"rollouts": b"rlbench.rollouts", "batch": b"rlbench.batch"}
"""Where a file of ours has its facts, in the schema's metadata, by what it holds."""


def write_own(table: Any, path: str | Path, kind: str, facts: dict[str, Any]) -> Path:
    """Write a table to Parquet, whole or not at all, with what belongs to all of it as JSON."""
    parquet = needed("pyarrow.parquet", "to_parquet()")
    marked = table.replace_schema_metadata({OWN_KEYS[kind]: json.dumps(facts).encode()})
    with written_aside(path) as aside:
        parquet.write_table(marked, aside, compression="zstd")
    return Path(path).expanduser()


def read_table(path: Path, call: str) -> Any:
    """Read a Parquet file for `call`, which an error names."""
    parquet = needed("pyarrow.parquet", call)
    from pyarrow import ArrowException

    try:
        names = parquet.read_schema(path).names
        if twice := [name for i, name in enumerate(names) if name in names[:i]]:
            raise DataError(f"{path} has the column {twice[0]!r} more than once: rename or drop one")
        return parquet.read_table(path, partitioning=None)
    except ArrowException as error:
        raise DataError(f"{path} is no Parquet file that can be read: {error}") from None


def read_own(path: str | Path, kind: str, newest: int) -> tuple[Any, dict[str, Any]]:
    """Return the table and the facts of a file that `write_own` wrote, of format `newest` at most."""
    path = Path(path).expanduser()
    if not path.is_file():
        raise DataError(f"no file {path}")
    table = read_table(path, "from_parquet()")
    about = (table.schema.metadata or {}).get(OWN_KEYS[kind])
    if about is None:
        columns = ", ".join(table.column_names[:8])
        raise DataError(f"{path} was not written by {kind}.to_parquet(): it holds the columns {columns}")
    facts = json.loads(about)
    if facts["format"] > newest:
        raise DataError(f"{path} has format {facts['format']}; this rlbench reads up to {newest}: update rlbench")
    return table, facts


def list_column(rows: Ragged, nulls: int = 0, kind: Any = None) -> Any:
    """Ragged rows as a list column, then so many nulls, without a Python object per number.

    `kind`: Arrow's type of a value; None: the values' own.
    """
    import pyarrow as pa

    offsets = np.concatenate([rows.offsets, np.full(nulls, rows.offsets[-1])])
    absent = np.zeros(len(offsets) - 1, bool)
    absent[len(rows) :] = True
    return pa.LargeListArray.from_arrays(
        pa.array(offsets, pa.int64()), pa.array(rows.values, kind), mask=pa.array(absent) if nulls else None
    )


def wide_columns(
    columns: Mapping[str, np.ndarray], rows: Ragged, nulls: int = 0
) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """Numbers (tokens, …) by name beside the values of `rows`, as list columns `column/NAME`, a token's one after
    another, then so many nulls; and the facts by which `read_wide` takes them back."""
    lists, facts = {}, {}
    for name, value in columns.items():
        lists[f"column/{name}"], facts[name] = wide_column(rows.with_values(value), nulls)
    return lists, facts


def wide_column(rows: Ragged, nulls: int = 0) -> tuple[Any, list[Any]]:
    """Ragged rows of (tokens, …) as a list column, a token's numbers one after another, and the facts by which
    `read_wide_column` takes them back."""
    shape = rows.values.shape[1:]
    flat = Ragged(rows.values.reshape(-1), rows.offsets * math.prod(shape))
    return list_column(flat, nulls), [rows.values.dtype.str, list(shape)]


def read_wide_column(column: Any, facts: Sequence[Any]) -> Ragged:
    """Return the rows that `wide_column` wrote. Raises ValueError where they are not as they were."""
    kind, shape = facts
    flat = ragged_column(column, np.dtype(kind))
    return Ragged(flat.values.reshape(-1, *shape), flat.offsets // math.prod(shape))


def read_wide(table: Any, facts: Mapping[str, Sequence[Any]]) -> dict[str, np.ndarray]:
    """Return the columns that `wide_columns` wrote. Raises KeyError or ValueError where one is not as it was."""
    return {name: read_wide_column(table[f"column/{name}"], one).values for name, one in facts.items()}


def ragged_column(column: Any, dtype: Any) -> Ragged:
    """A list column as ragged rows of `dtype`. Raises ValueError where a row or a value is null."""
    import pyarrow as pa

    chunks = [chunk for chunk in column.chunks if len(chunk)]
    flat = [chunk.flatten() for chunk in chunks]
    if any(part.null_count for part in (*chunks, *flat)):
        raise ValueError("a list or a number in it is missing")
    values = [part.to_numpy(zero_copy_only=False) for part in flat]
    lengths = [pa.compute.list_value_length(chunk).to_numpy(zero_copy_only=False) for chunk in chunks]
    return Ragged(
        np.concatenate(values).astype(dtype) if values else np.zeros(0, dtype),
        offsets_of(np.concatenate(lengths).astype(np.int64) if lengths else []),
    )
