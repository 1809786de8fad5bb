"""Arrow tables of our own files: ragged columns in and out, and opening a file that must be one of ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from rlbench.data.base.files import written_aside
from rlbench.data.base.optional import needed
from rlbench.data.base.ragged import Ragged, offsets_of
from rlbench.errors import DataError


def write_own(table: Any, path: str | Path, key: bytes, facts: dict[str, Any]) -> Path:
    """Write a table to Parquet, whole or not at all, with what belongs to all of it as JSON under `key`."""
    parquet = needed("pyarrow.parquet", "to_parquet()")
    marked = table.replace_schema_metadata({key: json.dumps(facts).encode()})
    with written_aside(path) as aside:
        parquet.write_table(marked, aside, compression="zstd")
    return Path(path).expanduser()


def read_table(path: Path, call: str) -> Any:
    """Read a Parquet file for `call`, which an error names."""
    parquet = needed("pyarrow.parquet", call)
    from pyarrow import ArrowException

    try:
        return parquet.read_table(path, partitioning=None)
    except ArrowException as error:
        raise DataError(f"{path} is no Parquet file that can be read: {error}") from None


def read_own(path: str | Path, key: bytes, newest: int, writer: str) -> tuple[Any, dict[str, Any]]:
    """Return the table and the facts of a file that `write_own` wrote for `writer`, of format `newest` at most."""
    path = Path(path).expanduser()
    if not path.is_file():
        raise DataError(f"no file {path}")
    table = read_table(path, "from_parquet()")
    about = (table.schema.metadata or {}).get(key)
    if about is None:
        raise DataError(f"{path} was not written by {writer}: it holds the columns {', '.join(table.column_names[:8])}")
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
