"""What the cells of a table hold: what is missing, what a table format filled in, and texts that are none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlbench.errors import DataError

MISSING_KINDS = ("NAType", "NaTType")
"""Types of pandas that say a value is missing, beside a float that is no number."""


def is_missing(value: Any) -> bool:
    """Whether a cell holds nothing: null, NaN, or pandas' own words for it."""
    if value is None or type(value).__name__ in MISSING_KINDS:
        return True
    return isinstance(value, float | np.floating) and bool(np.isnan(value))


def is_frame(value: Any) -> bool:
    """Whether a value is a data frame, as pandas has them."""
    return hasattr(value, "columns") and hasattr(value, "to_dict")


def frame_rows(frame: Any) -> list[dict[str, Any]]:
    """Return a data frame's rows; what is missing is None, and whole numbers that pandas made floats, because some are
    missing, are whole again. DataError for a column that is there twice."""
    check_once(list(map(str, frame.columns)), "the data frame")
    rows: list[dict[str, Any]] = frame.to_dict("records")
    for name in frame.columns:
        lacking = [is_missing(row[name]) for row in rows]
        if not any(lacking):
            continue
        there = [row[name] for row, gone in zip(rows, lacking, strict=True) if not gone]
        whole = all(isinstance(value, float) and value.is_integer() for value in there)
        for row, gone in zip(rows, lacking, strict=True):
            row[name] = None if gone else int(row[name]) if whole else row[name]
    return rows


def check_once(columns: Sequence[str], what: str) -> None:
    """Refuse a table with two columns of one name, of which one would be lost."""
    if twice := [name for name, count in Counter(columns).items() if count > 1]:
        raise DataError(f"{what} has the column {twice[0]!r} more than once: rename or drop one")


def check_name(row: Mapping[Any, Any], name: str) -> None:
    """Refuse a row that has a column of this name under one that differs by spaces or capitals, which nobody reads."""
    for column in () if name in row else row:
        if isinstance(column, str) and column != name and column.strip().casefold() == name:
            raise DataError(f"it has no column {name!r} but {column!r}: rename it")


def without_nulls(value: Any) -> Any:
    """Return what a cell holds without the keys that are null, which Arrow fills in because other rows have them, at
    every depth; arrays of objects become lists."""
    if getattr(getattr(value, "dtype", None), "kind", "") == "O":
        value = value.tolist()
    if isinstance(value, Mapping):
        return {key: without_nulls(held) for key, held in value.items() if held is not None}
    return [without_nulls(held) for held in value] if isinstance(value, list | tuple) else value


def check_text(value: Any) -> None:
    """Refuse a text, at any depth, that is no Unicode: half of a pair that stands alone, as a cut "\\ud83d" of JSON."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            seen = ascii(value[max(0, error.start - 20) : error.start + 1])
            raise DataError(
                f"its text is no Unicode: a lone surrogate stands at character {error.start} ({seen}), half of a pair "
                "that was cut, which no tokenizer takes"
            ) from None
    elif isinstance(value, Mapping):
        for held in value.values():
            check_text(held)
    elif isinstance(value, list | tuple) and not (value and isinstance(value[0], int)):
        for held in value:
            check_text(held)
