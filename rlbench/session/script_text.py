"""The text of a function, a lambda or a class as it was typed, and the names it uses.

Read from the source by its syntax tree, so that cells, scripts and modules are one, and compiled again: a text that is
not that of the code at hand (a module that was edited or loaded anew) is none.
"""

from __future__ import annotations
import __future__

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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
OF_EVERY_CLASS = frozenset(vars(type("_", (), {"__annotations__": {}}))) | {
    "__annotations__",
    "__orig_bases__",
    "__parameters__",
    "__abstractmethods__",
    "_abc_impl",
    "__firstlineno__",
    "__static_attributes__",
    "__doc__",
    "__module__",
    "__qualname__",
    "__classcell__",
}


@dataclass(frozen=True)
class Statement:
    """Source of a definition. `name` it binds; `names` it reads; `expression`: a lambda, which binds none."""

    name: str
    text: str
    names: tuple[str, ...]
    expression: bool = False


def statement_of(value: Any, bound: Any = None) -> Statement | None:
    """The statement a function or class was made by; None where its text is not to be had, or would not make it again.

    So of a closure, of which a second one has other values inside, and of what was changed after its statement.

    Args:
        value: the function or class.
        bound: what the statement's name stands for, where decorators made something else of the function.
    """
    if isinstance(value, type):
        return _class_statement(value)
    inner = inspect.unwrap(value)
    if not isinstance(inner, types.FunctionType) or inner.__code__.co_freevars or set(vars(inner)) - {"__wrapped__"}:
        return None
    found = _parsed(inner.__code__.co_filename)
    if found is None:
        return None
    text, tree = found
    if inner.__name__ == "<lambda>":
        return _lambda_statement(inner, text, tree) if inner is value else None
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == inner.__name__:
            if _first(node) == inner.__code__.co_firstlineno and _makes(node, text, inner, value, bound):
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
    same = [json.loads(line) for line in text.split("\n")[:-1]] == list(rows)
    return text.encode() if same else None


def npy(value: np.ndarray) -> bytes:
    """An array as the content of an .npy file."""
    file = io.BytesIO()
    np.save(file, value, allow_pickle=False)
    return file.getvalue()


# -- whether a statement makes the value at hand


def _makes(node: Definition, text: str, inner: types.FunctionType, value: Any, bound: Any) -> bool:
    added = all(ast.unparse(one).endswith(".method") for one in node.decorator_list)  # ours: gives the function back
    if node.decorator_list and not (added and inner is value and bound is None):
        # the statement binds what the decorators made of it
        if inner.__globals__.get(node.name) is not (value if bound is None else bound):
            return False
    elif inner is not value or bound is not None:  # it was wrapped by a call elsewhere
        return False
    assert not isinstance(node, ast.ClassDef)
    return _same_code(text, inner) and _same_defaults(node.args, inner)


def _same_code(text: str, function: types.FunctionType) -> bool:
    """Whether the text of a file or a cell compiles to the function's code, at its line."""
    code = function.__code__
    return any(
        _equal(one, code)
        for one in _compiled(text, code.co_flags & __future__.annotations.compiler_flag)
        if (one.co_name, one.co_firstlineno) == (code.co_name, code.co_firstlineno)
    )


@functools.lru_cache(maxsize=64)
def _compiled(text: str, flags: int) -> tuple[types.CodeType, ...]:
    """All code in a text. As a whole: what is imported at its top decides how a call in a function is compiled."""
    return tuple(_codes(compile(text, "<text>", "exec", flags, True)))


def _codes(code: types.CodeType) -> list[types.CodeType]:
    inside = [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return inside + [deeper for one in inside for deeper in _codes(one)]


def _equal(one: types.CodeType, other: types.CodeType) -> bool:
    plain = ("co_code", "co_names", "co_varnames", "co_freevars", "co_cellvars", "co_argcount", "co_kwonlyargcount")
    if any(getattr(one, name) != getattr(other, name) for name in plain) or len(one.co_consts) != len(other.co_consts):
        return False
    return all(
        _equal(a, b)
        if isinstance(a, types.CodeType) and isinstance(b, types.CodeType)
        else type(a) is type(b) and repr(a) == repr(b)
        for a, b in zip(one.co_consts, other.co_consts, strict=True)
    )


def _same_defaults(arguments: ast.arguments, function: types.FunctionType) -> bool:
    """Whether the text of the defaults gives those the function has: literals, or names that still stand for them."""
    given = [*zip(arguments.defaults, function.__defaults__ or (), strict=False)]
    names = [argument.arg for argument in arguments.kwonlyargs]
    kept = function.__kwdefaults__ or {}
    by_name = zip(names, arguments.kw_defaults, strict=True)
    given += [(node, kept[name]) for name, node in by_name if node is not None and name in kept]
    if len(arguments.defaults) != len(function.__defaults__ or ()):
        return False
    return all(_gives(node, value, function.__globals__) for node, value in given)


def _gives(node: ast.expr, value: Any, known: Mapping[str, Any]) -> bool:
    if isinstance(node, ast.Name):
        return known.get(node.id, node) is value
    try:
        literal = ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError):
        return False
    return type(literal) is type(value) and repr(literal) == repr(value)


def _class_statement(cls: type) -> Statement | None:
    if "<locals>" in cls.__qualname__:
        return None
    found: tuple[str, ast.Module] | None = None
    for method in _methods(cls):
        found = found or _parsed(method.__code__.co_filename)
    if found is None:
        try:
            found = _parsed(inspect.getfile(cls))
        except (OSError, TypeError):
            return None
    if found is None:
        return None
    text, tree = found
    made = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == cls.__name__]
    return _statement(made[-1], text) if made and _is_class(made[-1], text, cls) else None


def _is_class(node: ast.ClassDef, text: str, cls: type) -> bool:
    """Whether the class still is what its statement says: the same methods, constants and no more."""
    own = [method for method in _methods(cls) if method.__qualname__.startswith(cls.__qualname__)]
    if not all(_same_code(text, method) for method in own):
        return False
    bound: set[str] = set()
    for one in node.body:
        targets = one.targets if isinstance(one, ast.Assign) else [one.target] if isinstance(one, ast.AnnAssign) else []
        names = [target.id for target in targets if isinstance(target, ast.Name)]
        bound |= set(names) | ({one.name} if isinstance(one, Definition) else set())
        value = getattr(one, "value", None)
        if isinstance(one, ast.Assign | ast.AnnAssign) and value is not None and not node.decorator_list:
            literal = _literal(value)
            if literal is not None and any(repr(vars(cls).get(name)) != literal for name in names):
                return False
    return bool(node.decorator_list) or not set(vars(cls)) - bound - OF_EVERY_CLASS


def _literal(node: ast.expr) -> str | None:
    try:
        return repr(ast.literal_eval(node))
    except (ValueError, TypeError, SyntaxError):
        return None


def _lambda_statement(function: types.FunctionType, text: str, tree: ast.Module) -> Statement | None:
    """The lambda whose body the code was compiled from; None where two on the same place could be meant."""
    code = function.__code__
    starts = {(line, column) for line, _, column, _ in code.co_positions() if line is not None and column is not None}
    fits = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Lambda)
        and node.lineno >= code.co_firstlineno
        and (node.body.lineno, node.body.col_offset) in starts
    ]
    source = ast.get_source_segment(text, fits[0]) if len(fits) == 1 else None
    if source is None or not _same_code(text, function) or not _same_defaults(fits[0].args, function):
        return None
    return Statement("", source, _names(fits[0], f"({source})"), True)


# -- reading


def _statement(node: Definition, text: str) -> Statement:
    source = _source(node, text)
    return Statement(node.name, source, _names(node, source))


def _source(node: Definition, text: str) -> str:
    return textwrap.dedent("\n".join(text.split("\n")[_first(node) - 1 : node.end_lineno]))


def _first(node: Definition) -> int:
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
    linecache.checkcache(filename)  # a file that was edited since it was read
    text = "".join(linecache.getlines(filename))
    return _tree(text) if text else None


@functools.lru_cache(maxsize=64)
def _tree(text: str) -> tuple[str, ast.Module] | None:
    try:
        return text, ast.parse(text)
    except SyntaxError:  # a cell with magics
        return None
