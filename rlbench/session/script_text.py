"""The text of a function, a lambda or a class as it was typed, and the names it uses.

Read from the source by its syntax tree, so that cells, scripts and modules are one.
"""

from __future__ import annotations

import ast
import functools
import inspect
import io
import json
import linecache
import symtable
import sys
import textwrap
import types
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Statement:
    """Source of a definition. `name` it binds; `names` it reads; `expression`: a lambda, which binds none."""

    name: str
    text: str
    names: tuple[str, ...]
    expression: bool = False


def statement_of(value: Any) -> Statement | None:
    """The statement a function or class was made by; None where its text is not to be had, or would not make it again.

    So of a closure, of which a second one has other values inside.
    """
    if isinstance(value, type):
        return _class_statement(value)
    inner = inspect.unwrap(value)
    if not isinstance(inner, types.FunctionType) or inner.__code__.co_freevars:
        return None
    found = _parsed(inner.__code__.co_filename)
    if found is None:
        return None
    text, tree = found
    first = inner.__code__.co_firstlineno
    if inner.__name__ == "<lambda>":
        return _lambda_statement(inner.__code__, text, tree)
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if node.name == inner.__name__ and first == _first(node):
            return _statement(node, text)
    return None


def globals_of(value: Any) -> dict[str, Any]:
    """What the names of a function or of a class's methods stand for."""
    if not isinstance(value, type):
        return dict(inspect.unwrap(value).__globals__)
    known = dict(vars(sys.modules[value.__module__])) if value.__module__ in sys.modules else {}
    for method in _methods(value):
        known |= method.__globals__
    return known


def json_lines(rows: Sequence[dict[str, Any]]) -> bytes | None:
    """One JSON object per line; None where a value is no JSON or would come back as another."""
    try:
        text = "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows)
    except (TypeError, ValueError):
        return None
    same = [json.loads(line) for line in text.splitlines()] == list(rows)
    return text.encode() if same else None


def npy(value: np.ndarray) -> bytes:
    """An array as the content of an .npy file."""
    file = io.BytesIO()
    np.save(file, value, allow_pickle=False)
    return file.getvalue()


def _class_statement(cls: type) -> Statement | None:
    found: tuple[str, ast.Module] | None = None
    for method in _methods(cls):
        found = found or _parsed(method.__code__.co_filename)
    if found is None:
        try:
            found = _parsed(inspect.getfile(cls))
        except (OSError, TypeError):
            return None
    if found is None or "<locals>" in cls.__qualname__:
        return None
    text, tree = found
    made = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == cls.__name__]
    return _statement(made[-1], text) if made else None


def _lambda_statement(code: types.CodeType, text: str, tree: ast.Module) -> Statement | None:
    """The lambda whose body the code was compiled from; None where two on the same place could be meant."""
    at = {(line, column) for line, _, column, _ in code.co_positions() if line is not None and column is not None}
    starts = sorted(place for place in at if place[0] > 0)
    fits = [
        node for node in ast.walk(tree)
        if isinstance(node, ast.Lambda) and node.lineno >= code.co_firstlineno
        and any((node.body.lineno, node.body.col_offset) == place for place in starts)
    ]  # fmt: skip
    if len(fits) != 1:
        return None
    source = ast.get_source_segment(text, fits[0])
    return None if source is None else Statement("", source, _names(fits[0], f"({source})"), True)


def _statement(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef, text: str) -> Statement:
    source = textwrap.dedent("\n".join(text.splitlines()[_first(node) - 1 : node.end_lineno]))
    return Statement(node.name, source, _names(node, source))


def _first(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> int:
    return min([node.lineno, *(one.lineno for one in node.decorator_list)])


def _names(node: ast.AST, text: str) -> tuple[str, ...]:
    """Names that are read from the module, in the order they stand; not parameters and local names."""
    read = [one for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Load)]
    ordered = dict.fromkeys(one.id for one in sorted(read, key=lambda n: (n.lineno, n.col_offset)))
    outside = _of_module(symtable.symtable(text, "<statement>", "exec"))
    return tuple(name for name in ordered if name in outside)


def _of_module(table: symtable.SymbolTable) -> set[str]:
    """Names that a text reads from the module it stands in."""
    top = table.get_type() == "module"
    own = {one.get_name() for one in table.get_symbols() if one.is_referenced() and (top or one.is_global())}
    return own.union(*map(_of_module, table.get_children()))


def _methods(cls: type) -> list[types.FunctionType]:
    found = []
    for member in vars(cls).values():
        member = getattr(member, "__func__", member)
        if isinstance(member, types.FunctionType) and member.__module__ == cls.__module__:
            found.append(member)
    return found


def _parsed(filename: str) -> tuple[str, ast.Module] | None:
    text = "".join(linecache.getlines(filename))
    return _tree(text) if text else None


@functools.lru_cache(maxsize=64)
def _tree(text: str) -> tuple[str, ast.Module] | None:
    try:
        return text, ast.parse(text)
    except SyntaxError:  # a cell with magics
        return None
