"""Why a user's value (a loss, a reward, a function) cannot go to another process: which variable it holds."""

from __future__ import annotations

import dataclasses
import functools
import pickle
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import cloudpickle

from rlbench.traces import LIBRARIES

DEEPEST = 6
ELSEWHERE = "Make or open such a thing inside the function, where it runs, or pass plain values in its place"
"""What to do instead, unless the class of what cannot go says it, as `_SENT_AS`."""
Pickler = Callable[[Any], bytes]


def why_not(what: str, value: Any, error: Exception, to: str, dumps: Pickler = cloudpickle.dumps) -> str:
    """Write the sentence that refuses `value`, the `what` (loss, reward, …) that `dumps` could not pickle."""
    path, last = culprit(value, dumps)
    plain = isinstance(value, list | tuple | dict) or type(value).__module__.startswith("rlbench.")
    name = _called(value) or ("" if plain else f"`{type(value).__name__}`")
    names = [part for part in path if part.startswith("`")]
    has = f"uses {' → '.join(names)}," if names else "is" if last is value else "holds"
    why = "" if path else f" ({type(error).__name__}: {error})"
    subject = f"{what} {name}".rstrip()
    return (
        f"{subject} cannot be sent to {to}: it {has} a {_kind(last)}, which lives in this kernel alone{why}. "
        f"{getattr(type(last), '_SENT_AS', ELSEWHERE)}; engines are untouched"
    )


def is_refusal(error: BaseException) -> bool:
    """Whether an error is one of pickling."""
    text = str(error)
    return isinstance(error, pickle.PicklingError) or "pickle" in text or "serialize" in text


def culprit(value: Any, dumps: Pickler = cloudpickle.dumps) -> tuple[list[str], Any]:
    """The names that lead from `value` to what in it cannot be pickled, and that thing."""
    path: list[str] = []
    for _ in range(DEEPEST):
        following = next(((name, part) for name, part in _parts(value) if not _goes(part, dumps)), None)
        if following is None:
            break
        path.append(following[0])
        value = following[1]
    return path, value


def _goes(value: Any, dumps: Pickler) -> bool:
    try:
        dumps(value)
    except Exception:  # whatever a value's own pickling raises
        return False
    return True


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """What a value holds, by the name a reader knows it by; nothing of values that are not a user's own."""
    if isinstance(value, functools.partial):
        yield _called(value.func), value.func
        yield from ((f"`{name}`", part) for name, part in value.keywords.items())
        yield from ((f"argument {i}", part) for i, part in enumerate(value.args))
    elif isinstance(value, types.MethodType):
        yield from _attributes(value.__self__)
        yield from _parts(value.__func__)
    elif isinstance(value, types.FunctionType):
        yield from ((f"`{name}`", part) for name, part in _used(value))
    elif isinstance(value, type):
        members = (getattr(member, "__func__", member) for member in vars(value).values())
        yield from ((f"`{m.__name__}`", m) for m in members if isinstance(m, types.FunctionType))
        yield from ((f"`{name}`", part) for name, part in vars(value).items() if not name.startswith("__"))
    elif isinstance(value, Mapping):
        yield from ((f"[{name!r}]", part) for name, part in value.items())
    elif isinstance(value, list | tuple | set):
        yield from ((_called(part) or f"[{i}]", part) for i, part in enumerate(value))
    elif not _is_library(type(value)):
        yield from _attributes(value)


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    yield from ((f"`{name}`", part) for name, part in getattr(value, "__dict__", {}).items())
    kind = type(value)
    if not _is_library(kind):
        yield f"`{kind.__name__}`", kind


def _used(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Closures, globals and defaults of a function."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    for name in names_in(function.__code__):
        if name in function.__globals__:
            yield name, function.__globals__[name]
    yield from (("a default", part) for part in function.__defaults__ or ())
    yield from (function.__kwdefaults__ or {}).items()


def names_in(code: types.CodeType) -> Iterator[str]:
    """Yield the globals and attributes that a function's code names, and the code inside it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from names_in(constant)


def _is_library(kind: type) -> bool:
    """Whether a class is not the user's own to look into: Python's, a package's, or a handle of rlbench."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    library = kind.__module__ != "__main__" and (file is None or file.startswith(LIBRARIES))
    return library and not dataclasses.is_dataclass(kind)


def _kind(value: Any) -> str:
    kind = type(value)
    plain = kind.__module__ in ("builtins", "__main__") or kind.__module__.startswith("rlbench.")
    return kind.__name__ if plain else f"{kind.__module__}.{kind.__name__}"


def _called(value: Any) -> str:
    if isinstance(value, functools.partial):
        return _called(value.func)
    name = getattr(value, "__name__", None)
    return f"`{name}`" if isinstance(name, str) else ""
