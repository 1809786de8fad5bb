"""A training batch as one Parquet file that gives the same batch back, to the last bit.

One row per sequence: `prompt_token_ids`, `token_ids` and each per-token field as lists, each per-sequence field as a
number; a column (tokens, K) as K numbers a token, one after another, in the list `column/NAME`; `images` as lists of
their bytes, `images_at` beside them (`data.prompts.image_columns`), `videos` and `sounds` likewise; `routing`, the
experts of each token of prompt and response, layer by layer; `verdict/HEAD`, what a pair says of that head.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from rlbench.data.base.arrow import (
    list_column,
    ragged_column,
    read_own,
    read_wide,
    read_wide_column,
    wide_column,
    wide_columns,
    write_own,
)
from rlbench.data.base.drawing import needed
from rlbench.data.batches.batch import PER_ROW, PER_TOKEN, TrainBatch
from rlbench.data.batches.verdicts import Verdicts
from rlbench.data.prompts.image_columns import image_columns, media_columns, read_images, read_media
from rlbench.data.prompts.placing import KINDS
from rlbench.errors import DataError

FORMAT = 1
LISTED = ("videos", "sounds")
TOKENS = {"prompts": "prompt_token_ids", "responses": "token_ids"}


def write_batch(batch: TrainBatch, path: str | Path) -> Path:
    """Write a batch; fields that are None are left out."""
    columns: dict[str, Any] = {}
    dtypes: dict[str, str] = {}
    for name in (*TOKENS, *PER_TOKEN, *PER_ROW):
        if (value := getattr(batch, name)) is None:
            continue
        rows: Any = batch.responses.with_values(value) if name in PER_TOKEN else value
        dtype = rows.dtype if name in PER_ROW else rows.values.dtype
        if dtype.kind not in "biuf":
            raise DataError(f"the batch's {name} are {dtype}: wanted numbers or booleans")
        dtypes[name], columns[TOKENS.get(name, name)] = dtype.str, rows if name in PER_ROW else list_column(rows)
    if batch.images is not None:
        columns |= image_columns("images", batch.images)
    for name in LISTED:
        if (held := getattr(batch, name)) is not None:
            columns |= media_columns(name, held)
    if batch.verdicts is not None:
        columns |= {f"verdict/{name}": batch.verdicts.values[:, i] for i, name in enumerate(batch.verdicts.heads)}
    wide, of_columns = wide_columns(batch.columns, batch.responses)
    facts = {"format": FORMAT, "dtypes": dtypes, "columns": of_columns, "key": batch.key}
    facts |= {"temperature": batch.temperature, "reshaped_by": batch.reshaped_by}
    if batch.verdicts is not None:
        facts["heads"] = batch.verdicts.heads
    if batch.routing is not None:
        wide["routing"], facts["routing"] = wide_column(batch.routing)
    return write_own(needed("pyarrow", "to_parquet()").table(columns | wide), path, "batch", facts)


def read_batch(path: str | Path) -> TrainBatch:
    """Read what `write_batch` wrote."""
    table, facts = read_own(path, "batch", FORMAT)
    try:
        fields: dict[str, Any] = {"temperature": facts["temperature"], "reshaped_by": tuple(facts["reshaped_by"])}
        for name, kind in facts["dtypes"].items():
            dtype, column = np.dtype(kind), table[TOKENS.get(name, name)]
            fields[name] = column.to_numpy().astype(dtype) if name in PER_ROW else ragged_column(column, dtype)
            if name in PER_TOKEN:
                if not np.array_equal(fields[name].offsets, fields["responses"].offsets):
                    raise ValueError(f"{name} is not as long as the token ids")
                fields[name] = fields[name].values
        if "images" in table.column_names:
            fields["images"] = tuple(read_images(table, "images"))
        for name in LISTED:
            if name in table.column_names:
                fields[name] = tuple(read_media(table, name, KINDS[name]))
        if heads := tuple(facts.get("heads", ())):
            said = [table[f"verdict/{name}"].to_numpy().astype(np.float32) for name in heads]
            fields["verdicts"] = Verdicts(heads, np.stack(said, axis=1))
        if "routing" in facts:
            fields["routing"] = read_wide_column(table["routing"], facts["routing"])
        batch = TrainBatch(**fields, columns=read_wide(table, facts.get("columns", {})))
    except (KeyError, TypeError, ValueError, AttributeError, DataError) as error:
        raise DataError(f"{path} was changed since batch.to_parquet() wrote it: {error}") from error
    if batch.key != facts["key"]:
        raise DataError(f"{path} was changed since batch.to_parquet() wrote it: its tokens are others")
    return batch
