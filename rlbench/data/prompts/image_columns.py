"""Images and sounds of rows in a table: their files, and the response tokens at which observed ones begin."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlbench.data.base.drawing import needed
from rlbench.data.prompts.images import EncodedImage, PlacedImage
from rlbench.data.prompts.sounds import EncodedSound

AT = "_at"


def image_columns(name: str, rows: Sequence[Sequence[EncodedImage] | None]) -> dict[str, Any]:
    """Return two Arrow columns: NAME, list<binary>, the files; NAME_at, list<int32>, null for an image of a prompt."""
    arrow = needed("pyarrow", "to_parquet()")
    files = [None if own is None else [image.data for image in own] for own in rows]
    places = [None if own is None else [getattr(image, "at", None) for image in own] for own in rows]
    return {
        name: arrow.array(files, arrow.list_(arrow.large_binary())),
        name + AT: arrow.array(places, arrow.list_(arrow.int32())),
    }


def read_images(table: Any, name: str) -> list[tuple[EncodedImage, ...]]:
    """Return the images of each row; () where a row, or the table, has none. Equal files become one object.

    Raises DataError for what is no image, ValueError for places that are not as many as the images.
    """
    if name not in table.column_names:
        return [()] * len(table)
    rows = table[name].to_pylist()
    held = {data: EncodedImage.from_any(data) for data in {data for row in rows for data in row or ()}}
    if name + AT not in table.column_names:
        return [tuple(held[data] for data in row or ()) for row in rows]
    return [
        tuple(
            held[data] if at is None else PlacedImage.of(held[data], at)
            for data, at in zip(row or (), places or (), strict=True)
        )
        for row, places in zip(rows, table[name + AT].to_pylist(), strict=True)
    ]


def sound_column(rows: Sequence[Sequence[EncodedSound] | None]) -> Any:
    """Return an Arrow column, list<binary>: the files of each row's sounds."""
    arrow = needed("pyarrow", "to_parquet()")
    files = [None if own is None else [sound.data for sound in own] for own in rows]
    return arrow.array(files, arrow.list_(arrow.large_binary()))


def read_sounds(table: Any, name: str) -> list[tuple[EncodedSound, ...]]:
    """Return the sounds of each row; () where a row, or the table, has none. Equal files become one object."""
    rows = table[name].to_pylist() if name in table.column_names else [None] * len(table)
    held = {data: EncodedSound.from_any(data) for data in {data for row in rows for data in row or ()}}
    return [tuple(held[data] for data in row or ()) for row in rows]
