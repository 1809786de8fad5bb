"""What a record says of a user's code: its name, its hash, its text, and the text of the helpers it calls."""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
import re
import types
import weakref
from collections.abc import Iterator
from typing import Any

from rlbench.data import TrainBatch
from rlbench.data.record.origin import makers
from rlbench.dispatch.by_value import identity, is_local, is_own
from rlbench.sendable import names_in

MOST = 16_000
"""Characters of text in one record; the rest is counted."""


def described(fn: Any) -> dict[str, str]:
    """Return `name`, `hash` and `source` ("" where nobody has the text) of a user's function, class or value."""
    name = fn if isinstance(fn, str) else getattr(fn, "__name__", None) or _cut(repr(fn), 200)
    return {"name": str(name), "hash": hash_of(fn), "source": source(fn)}


def hash_of(fn: Any) -> str:
    """Return 12 hexadecimal digits that change with its code and whatever it refers to; "" where it has no pickle."""
    try:
        return identity(fn)
    except Exception:  # whatever the objects it refers to raise: a record is not the place to fail
        return ""


def of_makers(batch: TrainBatch) -> dict[str, dict[str, str]]:
    """Return what is known of the `reward` and the `advantage` that made a batch (`described`), as it was when first
    asked for: what they use may be edited since, and did not make this batch."""
    if batch not in _of_makers:
        _of_makers[batch] = {part: described(fn) for part, fn in makers(batch).items()}
    return _of_makers[batch]


def of_batch(batch: TrainBatch) -> dict[str, str]:
    """Return the same as `reward_name`, `reward_hash`, `reward_source`, and so of the advantage."""
    return {f"{part}_{key}": value for part, told in of_makers(batch).items() for key, value in told.items()}


_of_makers: weakref.WeakKeyDictionary[TrainBatch, dict[str, dict[str, str]]] = weakref.WeakKeyDictionary()


def source(fn: Any) -> str:
    """Return the text of `fn` as it was typed (of a value, its `repr`), then of the user's own helpers it uses."""
    if isinstance(fn, str):
        return fn
    code = list(_reached(fn))
    texts = list(dict.fromkeys(text for one in code if (text := _text(one))))
    if not code or code[0] is not _bare(fn):
        texts.insert(0, repr(fn))
    return _cut("\n\n".join(texts), MOST)


def _bare(fn: Any) -> Any:
    """The function or class itself, without what is wrapped around it."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    if inspect.ismethod(fn):
        fn = fn.__func__
    return inspect.unwrap(fn) if callable(fn) else fn


def _reached(fn: Any) -> Iterator[Any]:
    """`fn`, or the class of a value, where it is a user's own, and the functions and classes of theirs it refers to."""
    first = _bare(fn)
    if not isinstance(first, types.FunctionType | type):
        first = type(first)
    waiting, seen = [first], set()
    while waiting:
        one = waiting.pop(0)
        if id(one) in seen or not is_own_code(one):
            continue
        seen.add(id(one))
        yield one
        waiting += [_bare(value) for value in _referred(one)]


def is_own_code(value: Any) -> bool:
    """Whether it is a function or a class of the notebook or of a local module."""
    return isinstance(value, types.FunctionType | type) and is_own(value)


def _referred(value: Any) -> Iterator[Any]:
    """What a function's code, or a class's methods, name among their globals and closures."""
    if isinstance(value, type):
        for member in vars(value).values():
            member = member.__func__ if isinstance(member, staticmethod | classmethod) else member
            if isinstance(member, types.FunctionType):
                yield from _referred(member)
        yield from (base for base in value.__bases__ if base is not object)
        return
    names = list(names_in(value.__code__))
    for name in names:
        found = value.__globals__.get(name)
        if isinstance(found, types.ModuleType) and is_local(found):
            yield from (vars(found)[used] for used in names if used in vars(found))
        elif found is not None:
            yield found
    for cell in value.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not assigned yet
            continue


def _text(value: Any) -> str:
    try:
        text = inspect.getsource(value).rstrip()
        name = value.__name__
        # a file that was edited and not reloaded has other lines there now: rather no text than a wrong one
        return text if name == "<lambda>" or re.search(rf"\b(def|class)\s+{re.escape(name)}\b", text) else ""
    except (OSError, TypeError):  # a notebook's module has no file: its functions know their cell, its classes do not
        return _class_text(value) if isinstance(value, type) else ""


def _class_text(cls: type) -> str:
    """The statement of a class, from the cell that its first method was compiled in."""
    methods = (member for member in vars(cls).values() if isinstance(member, types.FunctionType))
    lines = next((found for m in methods if (found := linecache.getlines(m.__code__.co_filename))), [])
    text = "".join(lines)
    try:
        tree = ast.parse(text)
    except SyntaxError:  # a cell with magics
        return ""
    made = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == cls.__name__]
    return (ast.get_source_segment(text, made[-1]) or "") if made else ""


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]}… (+{len(text) - most:,} characters)"
