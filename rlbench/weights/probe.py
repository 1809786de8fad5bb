"""What both sides of a sync compute log-probs of: sequences of unlikely tokens, and a picture where the model sees."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

PROBE_ROWS, PROBE_TOKENS, PROBE_PIXELS = 2, 12, 56
PROBE_OPTIONS = {"packing": False, "head": "plain"}
"""Of the pass on the ranks: what every causal model can compute; whether it can run packed is another question."""
SEED = 20261121


@dataclass(frozen=True)
class Probe:
    """`tokens`: of each sequence; `images`: the files of the pictures in each, () where no model sees."""

    tokens: list[list[int]]
    images: tuple[tuple[bytes, ...], ...] = ()

    @classmethod
    def of(cls, info: Mapping[str, Any]) -> Probe:
        """Return that of a replica; `picture_tokens` in its info: a sequence that holds the picture."""
        picture = info.get("picture_tokens")
        return cls.of_rows([*probe_tokens(int(info["vocab_size"])), *([picture] if picture else [])], bool(picture))

    @classmethod
    def of_rows(cls, tokens: list[list[int]], pictured: bool) -> Probe:
        """Return that of these sequences, the last of which holds the picture where `pictured`."""
        return cls(tokens, (*((),) * (len(tokens) - 1), (probe_picture(),)) if pictured else ())


def probe_tokens(vocab_size: int) -> list[list[int]]:
    """Return fixed pseudo-random token ids: unlikely text, on which a wrong weight shows at once."""
    return np.random.default_rng(SEED).integers(0, vocab_size, (PROBE_ROWS, PROBE_TOKENS)).tolist()


@cache
def probe_picture() -> bytes:
    """Return a PNG of pseudo-random colours, on which a wrong weight of the tower shows."""
    side = PROBE_PIXELS
    pixels = np.random.default_rng(SEED).integers(0, 256, (side, 3 * side), np.uint8)
    lines = np.concatenate([np.zeros((side, 1), np.uint8), pixels], axis=1)  # each begins with its filter, none

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)  # 8 bits of red, green and blue
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(lines.tobytes())) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body
