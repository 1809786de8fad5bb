"""Images, videos and sounds of rows in a table: their files, and the response tokens at which observed ones begin."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from rlbench.data.base.drawing import needed
from rlbench.data.prompts.encoded import EncodedMedia
from rlbench.data.prompts.images import EncodedImage, PlacedImage
from rlbench.data.prompts.placing import Media, MediaKind
from rlbench.data.prompts.videos import EncodedVideo

AT, SAMPLING = "_at", "_sampling"


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


def media_columns(name: str, rows: Sequence[Sequence[EncodedMedia] | None]) -> dict[str, Any]:
    """Return an Arrow column NAME, list<binary>, the files of each row's sounds or videos; where any video's frames are
    chosen otherwise than its checkpoint does, NAME_sampling too, list<string>, those options as JSON."""
    arrow = needed("pyarrow", "to_parquet()")
    files = [None if own is None else [one.data for one in own] for own in rows]
    asked = [None if own is None else [_sampling(one) for one in own] for own in rows]
    columns = {name: arrow.array(files, arrow.list_(arrow.large_binary()))}
    if any(own is not None and any(own) for own in asked):
        columns[name + SAMPLING] = arrow.array(asked, arrow.list_(arrow.string()))
    return columns


def read_media(table: Any, name: str, kind: MediaKind[Media]) -> list[tuple[Media, ...]]:
    """Return the sounds or videos of each row; () where a row, or the table, has none. Equal ones become one object."""
    rows = table[name].to_pylist() if name in table.column_names else [None] * len(table)
    asked = table[name + SAMPLING].to_pylist() if name + SAMPLING in table.column_names else [None] * len(rows)
    told = [
        [(data, options) for data, options in zip(own or (), more or [None] * len(own or ()), strict=True)]
        for own, more in zip(rows, asked, strict=True)
    ]
    held = {
        one: kind.read(_with_options(*one), f"the {kind.name}", False) for one in {one for own in told for one in own}
    }
    return [tuple(held[one] for one in own) for own in told]


def _sampling(one: EncodedMedia) -> str | None:
    asked = one.sampling.asked if isinstance(one, EncodedVideo) else {}
    return json.dumps(asked) if asked else None


def _with_options(data: bytes, options: str | None) -> Any:
    return {"video": data, **json.loads(options)} if options else data
