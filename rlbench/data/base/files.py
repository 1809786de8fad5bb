"""Files appear whole or not at all: written aside, then renamed."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rlbench.errors import DataError


@contextmanager
def written_aside(path: str | Path) -> Iterator[Path]:
    """A path beside `path` to write to; it takes the place of `path` at the end, and goes away on an error."""
    target = Path(path).expanduser()
    if not target.parent.is_dir():
        raise DataError(f"no folder {target.parent}: make it first, or give another path")
    if target.is_dir():
        raise DataError(f"{target} is a folder: give the path of a file")
    aside = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        yield aside
        os.replace(aside, target)
    finally:
        aside.unlink(missing_ok=True)


def write_text(path: str | Path, text: str) -> Path:
    """Write a text as UTF-8; what is no character (a lone surrogate) becomes "?"."""
    with written_aside(path) as aside:
        aside.write_text(text, encoding="utf-8", errors="replace", newline="\n")
    return Path(path).expanduser()
