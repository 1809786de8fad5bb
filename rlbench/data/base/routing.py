"""The experts that tokens took in the layers of a mixture of experts, as a sampler's routers chose them.

A row per sequence, int16 (prompt and response tokens, layers, top_k); `UNKNOWN` where nothing was computed, as of the
token drawn last.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlbench.data.base.ragged import Ragged, offsets_of
from rlbench.errors import BuildError, DataError

UNKNOWN = -1
FAMILIES = ("mixtral", "olmoe", "qwen2_moe", "qwen3_moe")
"""The `model_type` of models whose routers can be given experts: a softmax over all, then its top k."""


def check_family(option: str, path: str, family: str) -> None:
    """Refuse a model whose routers cannot be given experts; `option`: what asks for that."""
    if family not in FAMILIES:
        raise BuildError(
            f"{option}=True: {path!r} is a {family!r} model, whose routers, if it has any, cannot be given experts; "
            f"those of {', '.join(FAMILIES)} can. Leave it out"
        )


def routing_rows(rows: Sequence[np.ndarray | None], lengths: Sequence[int] | np.ndarray) -> Ragged | None:
    """Join rows (tokens, layers, top_k) of sequences of these lengths, UNKNOWN behind the end of each; None where there
    is none."""
    held = [row for row in rows if row is not None]
    if not held:
        return None
    offsets = offsets_of(lengths)
    values = np.full((int(offsets[-1]), *held[0].shape[1:]), UNKNOWN, np.int16)
    for row, start, end in zip(rows, offsets[:-1], offsets[1:], strict=True):
        if row is not None:
            own = row[: end - start]
            values[start : start + len(own)] = own
    return Ragged(values, offsets)


def join_routing(parts: Sequence[Ragged | None], lengths: Sequence[np.ndarray]) -> Ragged | None:
    """Join the rows of several values with sequences of these lengths; UNKNOWN where one has none."""
    widths = {part.values.shape[1:] for part in parts if part is not None}
    if len(widths) > 1:
        raise DataError(f"join: experts of models with other layers: {' and '.join(map(str, sorted(widths)))}")
    rows: list[np.ndarray | None] = []
    for part, own in zip(parts, lengths, strict=True):
        rows += [None] * len(own) if part is None else list(part)
    return routing_rows(rows, np.concatenate(lengths))
