"""What stands in a prompt beside its text travels as the bytes of a file: how those are read, whatever they hold."""

from __future__ import annotations

import base64
import binascii
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from rlbench.errors import DataError

MOST_BYTES = 32 * 2**20
"""Of one encoded image or sound; videos have a bound of their own."""
FETCH_SECONDS = 20.0
DATA_URL = re.compile(r"data:([\w.+-]+/[\w.+-]+)?(?:;[\w-]+=[\w.-]+)*;base64,", re.ASCII)


@dataclass(frozen=True)
class EncodedMedia:
    """An image, a sound or a video: `data` as a file has it, `digest` its SHA-256 in hex. Two are equal when their
    bytes are."""

    data: bytes = field(compare=False, repr=False)
    digest: str


def held_bytes(value: Any, what: str, fetch: bool, example: str, most: int | None = None) -> bytes | None:
    """Return the bytes that a value names or holds: bytes, a path, an address, `{"bytes": …, "path": …}`; None of
    another. `example`: the media type that a message gives, as "image/png"; `most`: bytes that are read, None:
    MOST_BYTES. Raises DataError where they cannot be read."""
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    if isinstance(value, Mapping) and ("bytes" in value or "path" in value):
        held = value.get("bytes") if value.get("bytes") is not None else value.get("path")
        if held is not None:
            return held_bytes(held, what, fetch, example, most)
    if isinstance(value, Mapping) and value.get("url") is not None:
        return held_bytes(value["url"], what, fetch, example, most)
    if isinstance(value, str):
        return _of_address(value, what, fetch, example, most or MOST_BYTES)
    return _of_file(value, what, most or MOST_BYTES) if isinstance(value, Path) else None


def check_size(data: bytes, what: str, most: int | None = None) -> None:
    """Refuse a file of more bytes than `most`, None: MOST_BYTES."""
    most = most or MOST_BYTES
    if len(data) > most:
        raise DataError(f"{what} has {len(data):,} bytes; at most {most:,} are read: make it smaller")


def of_base64(text: str, what: str) -> bytes:
    """Return what base64 holds; DataError of what is none."""
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:  # ValueError: a letter beyond ASCII
        raise DataError(f"{what} is no base64: {error}") from None


def _of_address(address: str, what: str, fetch: bool, example: str, most: int) -> bytes:
    if address.startswith("data:"):
        if (head := DATA_URL.match(address)) is None:
            raise DataError(f"{what}: its data URL {address[:40]!r}… has no base64 part: data:{example};base64,…")
        return of_base64(address[head.end() :], f"{what}: its data URL")
    scheme = urlsplit(address).scheme.lower() if "://" in address[:32] else ""
    if scheme in ("http", "https"):
        if not fetch:
            raise DataError(
                f"{what} is at {address[:80]!r}, and nothing remote is read unless asked: give its bytes, or "
                "rb.data.load(…, fetch_images=True)"
            )
        return _fetched(address, what, most)
    if scheme not in ("", "file"):
        raise DataError(f"{what} is at {address[:80]!r}: wanted a path, a data URL or an http address")
    return _of_file(Path(unquote(urlsplit(address).path)) if scheme else Path(address), what, most)


def _of_file(path: Path, what: str, most: int) -> bytes:
    try:
        facts = path.expanduser().stat()
        if not stat.S_ISREG(facts.st_mode):
            raise DataError(f"{what}: {path} is no plain file")
        if facts.st_size > most:
            raise DataError(f"{what}: {path} has {facts.st_size:,} bytes; at most {most:,} are read")
        return path.expanduser().read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a null byte in the name
        raise DataError(f"{what}: {str(path)[:80]!r} cannot be read: {type(error).__name__}: {error}") from None


def _fetched(address: str, what: str, most: int) -> bytes:
    from urllib.request import Request, urlopen

    try:
        with urlopen(Request(address, headers={"User-Agent": "rlbench"}), timeout=FETCH_SECONDS) as answer:
            return bytes(answer.read(most + 1))
    except (OSError, ValueError) as error:
        raise DataError(f"{what}: {address[:80]} cannot be read: {type(error).__name__}: {error}") from error
