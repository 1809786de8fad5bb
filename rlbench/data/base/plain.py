"""Prompts, labels and options as JSON and back, exactly: what JSON has no form for is marked, the rest is refused."""

from __future__ import annotations

import base64
import io
import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from rlbench.errors import DataError

MARK = "__rlbench__"


def to_plain(value: Any, what: str) -> Any:
    """Return a value made of JSON's types; `what` names it in an error, as "prompt 3: label".

    Tuples, bytes, numpy scalars and arrays, numbers that are not finite, mappings whose keys are not text, and images
    (PIL; stored as PNG) become `{"__rlbench__": kind, …}`.
    """
    if value is None or isinstance(value, str | bool) or type(value) is int:
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {MARK: "float", "value": repr(value)}
    if isinstance(value, list):
        return [to_plain(v, what) for v in value]
    if isinstance(value, tuple):
        return {MARK: "tuple", "value": [to_plain(v, what) for v in value]}
    if isinstance(value, Mapping):
        if MARK not in value and all(type(key) is str for key in value):
            return {key: to_plain(v, what) for key, v in value.items()}
        return {MARK: "dict", "value": [[to_plain(k, what), to_plain(v, what)] for k, v in value.items()]}
    if isinstance(value, bytes):
        return {MARK: "bytes", "value": base64.b64encode(value).decode()}
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufcSU":
        data = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()
        kind = "array" if isinstance(value, np.ndarray) else "scalar"
        return {MARK: kind, "dtype": value.dtype.str, "shape": list(value.shape), "value": data}
    if type(value).__module__.startswith("PIL."):
        stream = io.BytesIO()
        value.save(stream, format="PNG")
        return {MARK: "image", "value": base64.b64encode(stream.getvalue()).decode()}
    raise DataError(
        f"{what} holds a {type(value).__name__}, which cannot be written so that it reads back the same: "
        "use text, numbers, lists, dicts, numpy arrays or images"
    )


def from_plain(value: Any) -> Any:
    """What `to_plain` was given."""
    if isinstance(value, list):
        return [from_plain(v) for v in value]
    if not isinstance(value, dict):
        return value
    if MARK not in value:
        return {key: from_plain(v) for key, v in value.items()}
    kind, stored = value[MARK], value["value"]
    if kind == "float":
        return float(stored)
    if kind == "tuple":
        return tuple(from_plain(stored))
    if kind == "dict":
        return {from_plain(k): from_plain(v) for k, v in stored}
    if kind not in ("bytes", "array", "scalar", "image"):
        raise DataError(f"a value of unknown kind {kind!r}: the file is of a newer rlbench; update rlbench to read it")
    data = base64.b64decode(stored)
    if kind == "bytes":
        return data
    if kind == "image":
        from PIL import Image

        image = Image.open(io.BytesIO(data), formats=["PNG"])
        image.load()
        return image
    array = np.frombuffer(data, np.dtype(str(value["dtype"]))).reshape(value["shape"]).copy()
    return array if kind == "array" else array[()]


def dumps(value: Any, what: str) -> str:
    """`to_plain` as one line of JSON, ASCII alone (so that any text survives)."""
    return json.dumps(to_plain(value, what), separators=(",", ":"), allow_nan=False)


def loads(text: str) -> Any:
    """What `dumps` was given."""
    return from_plain(json.loads(text))
