"""Whose line raised: errors in a user's code show one line of it; `rb.last_traceback()` gives all that lies around."""

from __future__ import annotations

import contextlib
import linecache
import os
import re
import site
import sys
import sysconfig
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from rlbench.errors import RLBenchError

E = TypeVar("E", bound=RLBenchError)
LIBRARIES = tuple(
    path.rstrip(os.sep) + os.sep
    for path in (
        *(sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")),
        site.getusersitepackages(),
        os.path.dirname(os.path.abspath(__file__)),  # rlbench itself; a user's own project may be called so, too
    )
)
NONE_YET = "no error in your code so far: neither on the ranks, nor in a loss or a reward of this kernel"
_FRAME = re.compile(r'^  File "(?P<file>[^"]+)", line (?P<line>\d+)(?:, in (?P<name>.*))?$')


@dataclass(frozen=True)
class UserLine:
    """One line of a user's code. `source` is empty where the process that raised does not have the text."""

    file: str
    line: int
    function: str
    source: str

    def __str__(self) -> str:
        source = self.source or linecache.getline(self.file, self.line).strip()
        name = "" if self.function.startswith("<") and self.function != "<lambda>" else f"{self.function}, "
        return f"{name}{place(self.file)}, line {self.line}" + (f":   {source}" if source else "")


class Traceback(str):
    """A traceback that shows as it is, at the end of a cell too."""

    def __repr__(self) -> str:
        return str(self) or NONE_YET


_last = Traceback()


def last_traceback() -> Traceback:
    """Return the whole traceback of the last error in this kernel, of which a cell shows your own line alone."""
    return _last


def remember(text: str) -> str:
    """Make `text` what `last_traceback()` gives; returns it with the source of cells that only this kernel has."""
    global _last
    _last = Traceback(with_sources(text))
    return str(_last)


def user_error(kind: type[E], said: str, error: BaseException, after: str = "") -> E:
    """Make an error of ours of one that a user's code raised here: what is said, the user's line, what comes after."""
    line = str(user_line(error) or "")
    shown = kind(said + (f"\n  {line}" if line else "") + after)
    shown.user_line = line
    shown.full_traceback = remember("".join(traceback.format_exception(error)))
    return shown


def user_line(error: BaseException) -> UserLine | None:
    """The innermost line of the user's own code that an error went through; None where it went through none."""
    if isinstance(error, SyntaxError) and error.filename and not is_library(error.filename):
        return UserLine(error.filename, error.lineno or 0, "<module>", (error.text or "").strip())
    return _innermost(traceback.extract_tb(error.__traceback__))


def calling_line() -> UserLine | None:
    """The innermost line of the user's own code that is being executed by this thread."""
    return _innermost(traceback.extract_stack())


def _innermost(frames: Iterable[traceback.FrameSummary]) -> UserLine | None:
    last = next((frame for frame in reversed(list(frames)) if not is_library(frame.filename)), None)
    return None if last is None else UserLine(last.filename, last.lineno or 0, last.name, last.line or "")


def ipython() -> Any:
    """The IPython shell of this process; None in a plain script."""
    module = sys.modules.get("IPython")
    return None if module is None else module.get_ipython()


def place(file: str) -> str:
    """What a reader calls a file: the cell by its number, a path below the current folder, else the whole path."""
    named = getattr(getattr(ipython(), "compile", None), "format_code_name", lambda _: None)(file)
    if named is not None:
        number = re.search(r"\d+", str(named[1]))
        return f"cell {number.group()}" if number else f"cell {named[1]}"
    if "ipykernel_" in file or file.startswith("<ipython-input"):
        return "a cell of an earlier kernel"
    with contextlib.suppress(ValueError):  # another drive
        near = os.path.relpath(file)
        return file if file.startswith("<") or near.startswith(os.pardir) else near
    return file


def with_sources(text: str) -> str:
    """A traceback with the lines of cells put in: a rank knows their names and numbers alone."""
    lines = text.rstrip().splitlines()
    found: list[str] = []
    for number, line in enumerate(lines):
        frame = _FRAME.match(line)
        if frame is None:
            found.append(line)
            continue
        following = lines[number + 1] if number + 1 < len(lines) else ""
        where = place(frame["file"])
        found.append(line.replace(frame["file"], where, 1) if where.startswith("cell ") else line)
        if not following.startswith("    "):
            source = linecache.getline(frame["file"], int(frame["line"])).strip()
            found += [f"    {source}"] if source else []
    return "\n".join(found)


def joined(parts: Iterable[tuple[str, str]]) -> str:
    """Tracebacks under what they are of, each text once: ranks that fail alike are named together."""
    by_text: dict[str, list[str]] = {}
    for label, text in parts:
        by_text.setdefault(text.rstrip(), []).append(label)
    return "\n\n".join(f"{', '.join(labels)}:\n{text}" for text, labels in by_text.items())


def is_library(file: str) -> bool:
    """Whether a frame of this file is not the user's: installed, Python's own, or ours."""
    return file.startswith((*LIBRARIES, "<frozen "))


def user_stacklevel() -> int:
    """The `stacklevel` by which a `warnings.warn` of the caller shows the user's line, the first outside rlbench."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] == "rlbench":
        level, frame = level + 1, frame.f_back
    return level
