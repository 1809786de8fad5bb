"""A value as Python: the expression that gives it again, with the definitions, imports and files that it needs.

Functions and classes of a notebook or of a local module come as their text, with what they refer to; losses, advantages
and other values of rlbench as the call that makes them; arrays, long lists, and whatever has no text (a closure, an
object of some library) as a file beside the script.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
import re
import sys
import types
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from rlbench.data import Prompt, Rollouts, TrainBatch
from rlbench.data.origin import Origin, origin, watch
from rlbench.dispatch import by_value
from rlbench.errors import SessionError
from rlbench.session import script_text
from rlbench.units import format_bytes

INLINE_CHARACTERS = 600
"""A longer literal goes into a file."""
INLINE_NUMBERS = 16
MOST_BYTES = 1 << 30
"""Of all files of a session together: a long run must not fill the disk with what no script will be made of."""
MODULES = ("cloudpickle", "functools", "json", "numpy", "os", "sys", "zlib")
RESERVED = (
    "rb",
    "session",
    "FILES",
    "Path",
    "saved_array",
    "saved_prompts",
    "saved_value",
    "differences",
    "check",
    "stepped",
    "drawn",
    "evaluated",
    *MODULES,
)
"""Names the script itself gives a meaning."""
VALUES_BOUND = {"score": "scored", "join": "joined", "__add__": "joined"}
"""Calls whose value gets a variable: a reward is asked once, and long chains stay short."""
SECRET = re.compile(r"(?i)authorization|api_?key|(?:^|[_-])key$|token(?!iz|s|_ids?)|passw|secret|credential")
SECRET_IN_URL = re.compile(r"(?i)([?&][^=&#]*(?:key|token|passw|secret)[^=&#]*=)[^&#]+")


VARIABLE = "<variable>"
"""`Origin.call` of what a verb gave: `kwargs` has the name of the script's variable."""


class Changed(Exception):
    """What gave a value is not any more what it was, or cannot be written: the value itself is to be kept."""


class Renderer:
    """Gives expressions, and gathers what they need; one for each statement.

    Args:
        folder: where files are kept; they are named by their content, so that equal ones are kept once.
        variable: the name of the script's variable that holds what an origin says, or None where there is none.
        bind: gives a value of a kind (`scored`, `joined`) a variable: its origin, the kind, its expression.
        session: what the name `session` stands for.

    Attributes:
        imports: lines. defines: (name, text), in the order they are needed. files: names in `folder`.
    """

    def __init__(
        self,
        folder: Path,
        variable: Callable[[Origin], str | None],
        session: Any = None,
        bind: Callable[[Origin, str, str], str] | None = None,
    ) -> None:
        self.folder, self.variable, self.session, self.bind = folder, variable, session, bind
        self._names: dict[str, Any] = {}
        self.imports: list[str] = []
        self.defines: list[tuple[str, str]] = []
        self.files: list[str] = []
        self._defining: list[Any] = []

    def expression(self, value: Any) -> str:
        """An expression that gives an equal value.

        Raises:
            SessionError: it cannot be written at all.
        """
        if isinstance(value, Origin):
            return self._made(value)
        found = origin(value)
        if found is not None:
            try:
                return self._made(found)
            except (Changed, SessionError, RecursionError):
                return self._file(value)
        if value is self.session and value is not None:
            return "session"
        text = self._plain(value) or self._own(value) or self._code(value)
        return text if text is not None and len(text) <= INLINE_CHARACTERS else self._file(value)

    def call(self, name: str, args: Iterable[Any], kwargs: dict[str, Any]) -> str:
        """A call's text."""
        given = [*map(self.expression, args), *(f"{key}={self.named(key, one)}" for key, one in kwargs.items())]
        return f"{name}({', '.join(given)})"

    def named(self, name: str, value: Any) -> str:
        """A value that goes by a name: a secret stays out of the script, which asks the environment for it."""
        if isinstance(value, str) and value and SECRET.search(name):
            self._need("import os")
            return f"os.environ[{re.sub(r'[^A-Z0-9]+', '_', name.upper())!r}]"
        return self.expression(value)

    def whole(self, value: Any) -> str:
        """The value kept as it is, whatever made it."""
        return self._file(value)

    def prompts(self, asked: list[Prompt]) -> str:
        """Prompts: a list of short texts, else a file with one JSON object per line."""
        plain = all(isinstance(p.content, str) and p.label is None and not p.meta for p in asked)
        inline = repr([p.content for p in asked])
        if plain and len(inline) <= INLINE_CHARACTERS:
            return inline
        rows = script_text.json_lines([dataclasses.asdict(p) for p in asked])
        if rows is None:  # a label that is no JSON
            return self._file(asked)
        return f"saved_prompts({self._keep(rows, 'prompts', 'jsonl')!r})"

    # -- what a value is

    def _made(self, made: Origin) -> str:
        """The calls that gave a value. Raises Changed where they would not give it again."""
        known = self.variable(made)
        if known is not None:
            return known
        if made.call == VARIABLE:
            raise Changed("it is of another session")
        if any(mark and mark != marked(one) for mark, one in zip(made.marks, made.given(), strict=False)):
            raise Changed("a function it was made with, or what that refers to, is another one now")
        text = self._calls(made)
        kind = VALUES_BOUND.get(made.call.rpartition(".")[2])
        return text if kind is None or self.bind is None else self.bind(made, kind, text)

    def _calls(self, made: Origin) -> str:
        kwargs = dict(made.kwargs)
        if made.call == "__getitem__":
            return f"{self.expression(made.of)}[{self._index(made.args[0])}]"
        if made.call == "__add__":
            return f"({self.expression(made.of)} + {self.expression(made.args[0])})"
        if made.of is None:
            module, _, name = made.call.rpartition(".")
            return self.call(self._imported(module, name), made.args, kwargs)
        return self.call(f"{self.expression(made.of)}.{made.call}", made.args, kwargs)

    def _index(self, index: Any) -> str:
        if isinstance(index, slice):
            parts = [index.start, index.stop] + ([index.step] if index.step is not None else [])
            return ":".join("" if part is None else repr(int(part)) for part in parts)
        return self.expression(index)

    def _plain(self, value: Any) -> str | None:
        if type(value) is str:
            return repr(SECRET_IN_URL.sub(r"\1LEFT-OUT", value))
        if value is None or type(value) in (bool, int, bytes):
            return repr(value)
        if isinstance(value, np.generic):
            return self._plain(value.item())
        if type(value) is float:
            return repr(value) if math.isfinite(value) else f'float("{value}")'
        if isinstance(value, slice):
            return repr(value)
        if isinstance(value, np.ndarray) and _is_short(value):
            self._need("import numpy")
            return f"numpy.array([{', '.join(map(self.expression, value))}], {value.dtype.name!r})"
        if type(value) in (list, tuple, set, frozenset) and len(value) <= INLINE_CHARACTERS // 3:
            return self._several(value)
        if type(value) is dict and len(value) <= INLINE_CHARACTERS // 5:
            items = [f"{self.expression(k)}: {self.named(k if type(k) is str else '', v)}" for k, v in value.items()]
            return "{" + ", ".join(items) + "}"
        return None

    def _several(self, values: Any) -> str:
        inside = ", ".join(map(self.expression, values))
        if isinstance(values, list):
            return f"[{inside}]"
        if isinstance(values, tuple):
            return f"({inside},)" if len(values) == 1 else f"({inside})"
        return f"{type(values).__name__}([{inside}])"

    def _own(self, value: Any) -> str | None:
        """A value of rlbench: the call that makes it."""
        kind = type(value)
        if isinstance(value, functools.partial) and kind is functools.partial:
            self._need("import functools")
            return self.call("functools.partial", [value.func, *value.args], dict(value.keywords))
        if not kind.__module__.startswith("rlbench.") or not dataclasses.is_dataclass(value) or isinstance(value, type):
            return None
        if isinstance(value, Rollouts | TrainBatch):
            return None
        decorated = getattr(value, "fn", None)
        if isinstance(decorated, types.FunctionType) and decorated.__globals__.get(decorated.__name__) is value:
            statement = script_text.statement_of(decorated, value)
            return statement.name if statement is not None and self._define(value, statement, decorated) else None
        given = {
            field.name: getattr(value, field.name)
            for field in dataclasses.fields(value)
            if field.init and not _is_default(field, getattr(value, field.name))
        }
        return self.call(self._imported(kind.__module__, kind.__qualname__), [], given)

    def _code(self, value: Any) -> str | None:
        """A function or a class: its own text, or where it is imported from."""
        if isinstance(value, types.ModuleType):
            self._need(f"import {value.__name__}")
            return value.__name__
        if not isinstance(value, types.FunctionType | type) or not by_value.is_own(value):
            module, name = str(getattr(value, "__module__", "")), str(getattr(value, "__qualname__", ""))
            there = name and module != "__main__" and _at(module, name) is value
            return self._imported(module, name) if there else None
        statement = script_text.statement_of(value)
        if statement is None:
            return None
        if statement.expression:  # a lambda stands where it is used
            return f"({statement.text})" if self._gather(statement, script_text.globals_of(value)) else None
        return statement.name if self._define(value, statement, value) else None

    # -- definitions

    def _define(self, value: Any, statement: script_text.Statement, code: Any) -> bool:
        """Put a definition, and before it what it names, into `defines`; False where it cannot be.

        `code`: the function or class of the statement; `value`: what its name stands for, the same but for decorators.
        """
        if not self._takes(statement.name, value):
            return False
        if any(value is one for one in self._defining) or (statement.name, statement.text) in self.defines:
            return True
        self._defining.append(value)
        try:
            if not self._gather(statement, script_text.globals_of(code)):
                return False
        finally:
            self._defining.pop()
        if (statement.name, statement.text) not in self.defines:
            self.defines.append((statement.name, statement.text))
        return True

    def _gather(self, statement: script_text.Statement, known: dict[str, Any]) -> bool:
        """What a statement names of its module, defined under the names it uses; False where one name is taken."""
        for name in statement.names:
            if name not in known or name == statement.name:
                continue
            value = known[name]
            if isinstance(value, types.ModuleType):
                if name == "rb" and value.__name__ == "rlbench":
                    continue
                if by_value.is_local(value) or not (name == value.__name__ in MODULES or self._takes(name, value)):
                    return False  # a local module goes along by value, as it is now
                self._need(f"import {value.__name__}" + ("" if value.__name__ == name else f" as {name}"))
                continue
            if value is self.session and name == "session":
                continue
            if not self._takes(name, value):
                return False
            text = self.named(name, value)
            if text != name:
                self._alias(name, text)
        return True

    def _takes(self, name: str, value: Any) -> bool:
        """Whether a name of the script may stand for this value: it is nobody else's."""
        if name in RESERVED or (name in self._names and self._names[name] is not value):
            return False
        self._names[name] = value
        return True

    def _alias(self, name: str, text: str) -> None:
        line = (name, f"{name} = {text}")
        if line not in self.defines:
            self.defines.append(line)

    def _imported(self, module: str, name: str) -> str:
        """The name of something that can be imported; the public one, where rlbench has one."""
        if module == "builtins":
            return name
        for public in ("", "rl", "data", "envs", "rewards"):
            if module.startswith("rlbench.") and _public(public, name) is _at(module, name):
                return ".".join(part for part in ("rb", public, name) if part)
        self._need(f"import {module}")
        return f"{module}.{name}"

    def _need(self, line: str) -> None:
        if line not in self.imports:
            self.imports.append(line)

    # -- files

    def _file(self, value: Any) -> str:
        if isinstance(value, Rollouts | TrainBatch):
            kind = type(value).__name__
            self._need_room(kind, 8 * len(value.responses.values))  # before it is written: less than it will be
            aside = self.folder / f".{kind}.parquet"
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            value.to_parquet(aside)
            name = self._keep(aside.read_bytes(), kind.lower(), "parquet")
            aside.unlink()
            return f"rb.{kind}.from_parquet(FILES / {name!r})"
        if isinstance(value, np.ndarray) and value.dtype != object:
            return f"saved_array({self._keep(script_text.npy(value), 'array', 'npy')!r})"
        blob = by_value.dumps(value, "a value", "a script", SessionError)
        return f"saved_value({self._keep(blob, _short_name(value), 'pkl')!r})"

    def _keep(self, content: bytes, name: str, suffix: str) -> str:
        file = f"{name}-{hashlib.sha256(content).hexdigest()[:10]}.{suffix}"
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not (self.folder / file).exists():
            self._need_room(name, len(content))
            aside = self.folder / f".{file}"
            aside.write_bytes(content)
            aside.rename(self.folder / file)
        if file not in self.files:
            self.files.append(file)
        return file

    def _need_room(self, what: str, size: int) -> None:
        there = sum(file.stat().st_size for file in self.folder.iterdir()) if self.folder.exists() else 0
        if there + size > MOST_BYTES:
            raise SessionError(
                f"{what} of {format_bytes(size)} is not kept for a script: the session has {format_bytes(there)}, "
                f"and {format_bytes(MOST_BYTES)} are the most"
            )


def marked(value: Any) -> str:
    """What identifies an argument of a call: of code and of objects, what they are made of; "" of plain data."""
    plain = (str, int, float, bool, bytes, list, tuple, dict, slice, np.ndarray, np.generic, Origin, type(None))
    if isinstance(value, plain) or type(value).__module__.startswith("rlbench.data"):
        return ""
    try:
        return by_value.identity(value)
    except Exception:  # whatever the objects it refers to raise: it is compared with itself alone
        return f"object {id(value)}"


def _is_default(field: dataclasses.Field[Any], value: Any) -> bool:
    if field.default is not dataclasses.MISSING:
        return type(field.default) is type(value) and bool(field.default == value)
    if field.default_factory is not dataclasses.MISSING:
        return bool(np.all(field.default_factory() == value))
    return False


def _public(room: str, name: str) -> Any:
    module = sys.modules.get(f"rlbench.{room}" if room else "rlbench")
    return vars(module).get(name) if module is not None else None


def _is_short(value: np.ndarray) -> bool:
    return value.ndim == 1 and value.size <= INLINE_NUMBERS and value.dtype.kind in "biuf"


def _at(module: str, qualname: str) -> Any:
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        found = getattr(found, part, None)
    return found


def _short_name(value: Any) -> str:
    name = getattr(value, "__name__", None) or type(value).__name__
    return "".join(c if c.isalnum() else "-" for c in str(name))[:32].strip("-") or "value"


watch(marked)
