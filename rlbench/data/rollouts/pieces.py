"""What each token looks like as text, read from a tokenizer's own file: light enough for a kernel that only looks.

The pieces of a completion join to its text exactly where the tokenizer says which bytes a token stands for (byte-level
BPE, sentencepiece with or without byte fallback, which is nearly all of them).
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rlbench.errors import DataError

TEXT, SPECIAL, PART, NUMBER = "text", "special", "part", "id"


class Piece(NamedTuple):
    """One token as text.

    `kind`: "text"; "special" (`<|end|>`; which of these a text keeps: `decoding`); "part" (some bytes of a character
    that a later token completes: `text` is empty, `shown` names the bytes); "id" (no tokenizer known: `shown` is the
    number). `shown` is what to draw.
    """

    text: str
    kind: str
    shown: str


class Pieces:
    """Pieces of token ids, for one tokenizer; `readable`: whether there is one, else every piece is its number.

    `raw`: token id -> its bytes, and whether it is special; None where the id is none of the tokenizer's.
    """

    def __init__(self, raw: Callable[[int], tuple[bytes, bool] | None] | None) -> None:
        self.readable = raw is not None
        self._raw = lru_cache(maxsize=None)(raw or (lambda token: None))

    def __call__(self, ids: Iterable[int] | np.ndarray) -> list[Piece]:
        """One piece per id, in order. A character over several tokens stands with the last of them."""
        pieces: list[Piece] = []
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for token in ids.tolist() if isinstance(ids, np.ndarray) else ids:
            raw, special = self._raw(token) or (None, False)
            if special or raw is None or (raw and not 0x80 <= raw[0] < 0xC0):  # it continues no character: end it here
                _close(pieces, decoder)
            if raw is None:
                pieces.append(Piece("", NUMBER, str(token)))
            elif special:
                pieces.append(Piece("", SPECIAL, raw.decode("utf-8", "replace")))
            elif (text := decoder.decode(raw)) or not raw:
                pieces.append(Piece(text, TEXT, text))
            else:
                pieces.append(Piece("", PART, raw.hex(" ").upper()))
        _close(pieces, decoder)
        return pieces


def _close(pieces: list[Piece], decoder: codecs.IncrementalDecoder) -> None:
    """A character that was begun and will not be completed is U+FFFD, as in the decoded text."""
    rest = decoder.decode(b"", final=True)
    decoder.reset()
    if rest and pieces:
        pieces[-1] = Piece(pieces[-1].text + rest, TEXT, pieces[-1].text + rest)


UNREADABLE = Pieces(None)
"""For rollouts whose tokenizer is not known: numbers."""


def pieces_of(tokenizer: str) -> Pieces:
    """The pieces of a tokenizer: a folder with `tokenizer.json`, or the hub id of a model in the local cache.

    Nothing is downloaded; `UNREADABLE` where there is none.
    """
    file = tokenizer_file(tokenizer)
    return UNREADABLE if file is None else _loaded(str(file), file.stat().st_mtime_ns)


def tokenizer_file(tokenizer: str) -> Path | None:
    """Where its `tokenizer.json` lies on this machine; None if nowhere."""
    if not tokenizer:
        return None
    file = Path(tokenizer).expanduser() / "tokenizer.json"
    if file.is_file():
        return file
    if file.parent.is_dir() or tokenizer.startswith(("/", ".", "~")):
        return None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(tokenizer, "tokenizer.json")
    except HFValidationError:  # a folder that has gone since, relative to where the engine ran
        return None
    return Path(cached) if isinstance(cached, str) else None


@lru_cache(maxsize=8)
def _loaded(file: str, _changed: int) -> Pieces:
    from tokenizers import Tokenizer  # the Rust library alone; transformers would bring torch

    try:
        tokenizer = Tokenizer.from_file(file)
    except Exception as error:  # the library raises bare Exception
        raise DataError(f"{file} is no tokenizer that can be read here: {error}") from error
    return Pieces(_bytes_of(tokenizer))


def _bytes_of(tokenizer: Any) -> Callable[[int], tuple[bytes, bool] | None]:
    """A function from token id to its bytes, by what the tokenizer's decoder does to them."""
    tokens = tokenizer.get_added_tokens_decoder()
    added = {i: (token.content.encode("utf-8", "replace"), token.special) for i, token in tokens.items()}
    decoder = b"" if tokenizer.decoder is None else tokenizer.decoder.__getstate__()
    steps = set(re.findall(rb'"type":\s*"(\w+)"', decoder))
    own = _byte_level if b"ByteLevel" in steps else _sentencepiece if steps & {b"Metaspace", b"ByteFallback"} else None

    def raw(token: int) -> tuple[bytes, bool] | None:
        if token in added:
            return added[token]
        stored = tokenizer.id_to_token(token)
        if stored is None:
            return None
        text = own(stored) if own else tokenizer.decode([token], skip_special_tokens=False).encode("utf-8", "replace")
        return text, False

    return raw


def _byte_level(stored: str) -> bytes:
    table = _byte_table()
    if all(c in table for c in stored):
        return bytes(table[c] for c in stored)
    return stored.encode("utf-8", "replace")


@lru_cache(maxsize=1)
def _byte_table() -> dict[str, int]:
    """The printable stand-ins of GPT-2 for bytes, back to the bytes."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in shown]
    return {chr(b): b for b in shown} | {chr(256 + i): b for i, b in enumerate(rest)}


def _sentencepiece(stored: str) -> bytes:
    if len(stored) == 6 and stored.startswith("<0x") and stored.endswith(">"):
        return bytes([int(stored[3:5], 16)])
    return stored.replace("▁", " ").encode("utf-8", "replace")
