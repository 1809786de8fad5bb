"""What both sides of a sync compute log-probs of: sequences of unlikely tokens, and a picture where the model sees, a
sound where it hears."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

PROBE_TOKENS, PROBE_PIXELS = 12, 56
SOUND_RATE = 16_000
PROBE_OPTIONS = {"packing": False, "head": "plain", "threads": 1}
"""Of the pass on the ranks: what every causal model can compute; whether it can run packed is another question.
Replicas of the same host apply and prove meanwhile, so it takes a part of the threads: in a small model one."""
SEED = 20261121


@dataclass(frozen=True)
class Probe:
    """`tokens`: of each sequence; `media`: the files of the pictures or sounds in each, () where there are none."""

    tokens: list[list[int]]
    media: tuple[tuple[Any, ...], ...] = ()

    @classmethod
    def of(cls, info: Mapping[str, Any]) -> Probe:
        """Return that of a replica; `media_tokens` in its info: a sequence that holds the picture, or the sound, as
        `media_kind` says."""
        shown = info.get("media_tokens")
        rows = [*probe_tokens(int(info["vocab_size"])), *([shown] if shown else [])]
        return cls.of_rows(rows, str(info["media_kind"]) if shown else "")

    @classmethod
    def of_rows(cls, tokens: list[list[int]], kind: str) -> Probe:
        """Return that of these sequences, the last of which holds the picture where `kind` is "image", the sound where
        it is "audio"."""
        held = {"": (), "image": (probe_picture(),), "audio": (probe_sound(),)}[kind]
        return cls(tokens, (*((),) * (len(tokens) - 1), held) if held else ())

    @property
    def kind(self) -> str:
        """What its last sequence holds, as `of_rows` takes it."""
        held = self.media[-1] if self.media else ()
        return {(): "", (probe_picture(),): "image"}.get(held, "audio")


def probe_tokens(vocab_size: int) -> list[list[int]]:
    """Return one sequence of pseudo-random token ids, always the same: unlikely text, on which a wrong weight shows at
    once. A second sequence shows none that one does not (docs/performance.md), and each token costs both sides."""
    return [np.random.default_rng(SEED).integers(0, vocab_size, PROBE_TOKENS).tolist()]


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


@cache
def probe_sound() -> bytes:
    """Return a WAV file of pseudo-random samples, a quarter of a second, on which a wrong weight of the tower shows."""
    samples = np.random.default_rng(SEED).integers(-8000, 8000, SOUND_RATE // 4).astype("<i2").tobytes()
    shape = struct.pack("<IHHIIHH", 16, 1, 1, SOUND_RATE, 2 * SOUND_RATE, 2, 16)  # PCM, one channel, 16 bits
    body = b"WAVEfmt " + shape + b"data" + struct.pack("<I", len(samples)) + samples
    return b"RIFF" + struct.pack("<I", len(body)) + body
