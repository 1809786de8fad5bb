"""What the code on a page of documentation names, looked up in the package without running it."""

from __future__ import annotations

import ast
import builtins
import functools
import importlib
import importlib.util
import inspect
import re
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import rlbench as rb
from rlbench.errors import Suggesting

BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
FENCED = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
SPAN = re.compile(r"`([^`\n]+)`")
OPTIONS = ("options", "sampling", "config")
"""What the package's own functions call `**options`."""
OTHERS = ("optimizer", "schedule", "track")
"""Verbs that hand theirs on to a function of others'."""
UNKNOWN = object()
"""What a name holds whose type nothing says: nothing is asked of it."""


@dataclass(frozen=True)
class Instance:
    """Some object of a class.

    Attributes:
        kind: The class.
    """

    kind: type


def usual_names() -> dict[str, Any]:
    """What names mean on every page, as README.md's first cells make them."""
    from rlbench.session.training.session_trainer import SessionTrainer

    kinds = {"session": rb.Session, "rollouts": rb.Rollouts, "batch": rb.TrainBatch, "trainer": SessionTrainer}
    others = dict.fromkeys(("prompts", "reward", "unseen", "model", "rows"), UNKNOWN)
    return {"rb": rb, "rlbench": rb, **{name: Instance(kind) for name, kind in kinds.items()}, **others}


def blocks(page: Path) -> Iterator[tuple[int, ast.Module]]:
    """Give each block of Python on a page, and the line of the page that it begins behind."""
    text = page.read_text(encoding="utf-8")
    for block in BLOCK.finditer(text):
        yield text[: block.start()].count("\n") + 1, ast.parse(block.group(1).replace("…", "..."), page.name)


def spans(page: Path) -> Iterator[ast.expr]:
    """Give each code in a page's text that is an expression of Python with an attribute or a call, and no file."""
    for span in SPAN.finditer(FENCED.sub("", page.read_text(encoding="utf-8"))):
        try:
            tree = ast.parse(span.group(1).replace("…", "..."), mode="eval").body
        except SyntaxError:
            continue
        if isinstance(tree, ast.Call | ast.Attribute | ast.Subscript) and not span.group(1).endswith(".py"):
            yield tree


def names_made(tree: ast.AST) -> set[str]:
    """Give the names that a piece of code imports, assigns or defines, parameters among them."""
    names: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
                names.add(name)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.alias(name=name, asname=other):
                names.add((other or name).split(".")[0])
    return names


def names_missing(tree: ast.Module, known: set[str]) -> list[str]:
    """Give the names that a block reads, and neither makes nor knows; a row of data by itself shows a form alone."""
    known = known | names_made(tree) | set(dir(builtins))
    statements = [node for node in tree.body if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Dict)]
    return sorted({node.id for each in statements for node in ast.walk(each) if isinstance(node, ast.Name)} - known)


@dataclass
class Reader:
    """Looks up what code names, and keeps what is wrong.

    Attributes:
        names: What each name holds: an object of the package, an `Instance`, or `UNKNOWN`.
        options: Names that `**options` of verbs, engines and trainers take.
        wrong: What is not there, one line each.
    """

    names: dict[str, Any]
    options: frozenset[str]
    wrong: list[str] = field(default_factory=list)

    def read(self, tree: ast.AST) -> None:
        """Look at a piece of code, statement by statement in its order."""
        for node in ast.iter_child_nodes(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
                inner = Reader({**self.names, **dict.fromkeys(names_made(node), UNKNOWN)}, self.options, self.wrong)
                inner.read(node)
                self.names[getattr(node, "name", "")] = UNKNOWN
            elif isinstance(node, ast.expr):
                self.value(node)
            else:
                self.read(node)
        match tree:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                self.names[name] = Reader(self.names, self.options).value(value)
            case ast.Import(names=aliases):
                for alias in aliases:
                    name = alias.asname or alias.name.split(".")[0]
                    self.names[name] = imported(alias.name if alias.asname else name)
            case ast.ImportFrom(module=str(module), names=aliases):
                for alias in aliases:
                    value = self.attribute(imported(module), alias.name, f"{module}:{alias.name}")
                    self.names[alias.asname or alias.name] = value
            case ast.For(target=target) | ast.withitem(optional_vars=ast.expr() as target):
                self.names |= dict.fromkeys(names_made(target) - self.names.keys(), UNKNOWN)

    def value(self, tree: ast.expr) -> Any:
        """Give what an expression is, as far as can be told, and note what is wrong inside of it."""
        match tree:
            case ast.Name(id=name):
                return self.names.get(name, UNKNOWN)
            case ast.Attribute(value=owner, attr=name):
                return self.attribute(self.value(owner), name, ast.unparse(tree))
            case ast.Call(func=function, args=arguments, keywords=keywords):
                functions = self.value(function)
                for argument in arguments:
                    self.value(argument)
                for keyword in keywords:
                    self.value(keyword.value)
                return self.call(functions, keywords, ast.unparse(function))
        self.read(tree)
        return UNKNOWN

    def attribute(self, owner: Any, name: str, text: str) -> Any:
        """Give an attribute of what was found, or note that it is not there."""
        owner = owner[0] if isinstance(owner, tuple) else owner
        if not isinstance(owner, Instance | type | types.ModuleType):
            return UNKNOWN
        kinds = family(owner.kind) if isinstance(owner, Instance) else [owner]
        owners = [kind for kind in kinds if hasattr(kind, name)]
        if owners:
            first = inspect.getattr_static(owners[0], name) if isinstance(owner, Instance) else getattr(owner, name)
            if callable(first) or isinstance(first, classmethod | staticmethod):
                return tuple(getattr(kind, name) for kind in owners)
            return returned(first.fget) if isinstance(first, property) else first
        if isinstance(owner, types.ModuleType):
            if importlib.util.find_spec(f"{owner.__name__}.{name}"):
                return importlib.import_module(f"{owner.__name__}.{name}")
        elif any(name in inspect.get_annotations(each) or hands_on(each) for each in bases(kinds)):
            return UNKNOWN  # a field, or a method of the user's own module
        self.wrong.append(f"{text}: {getattr(kinds[0], '__name__', kinds[0])} has no {name!r}")
        return UNKNOWN

    def call(self, functions: Any, keywords: list[ast.keyword], text: str) -> Any:
        """Hold the keywords of a call to the signatures that it may have, and give what it returns."""
        if not isinstance(functions, tuple):
            return UNKNOWN
        parameters = {name: each for one in functions for name, each in inspect.signature(one).parameters.items()}
        rest = [each.name for each in parameters.values() if each.kind is each.VAR_KEYWORD]
        free = bool(rest) and (rest[0] not in OPTIONS or functions[0].__name__ in OTHERS)
        accepted = parameters.keys() | (self.options if rest else set())
        for keyword in keywords:
            if not free and keyword.arg is not None and keyword.arg not in accepted:
                self.wrong.append(f"{text}(…) takes no {keyword.arg}=")
        return Instance(functions[0]) if isinstance(functions[0], type) else returned(functions[0])


def imported(module: str) -> Any:
    """Import a module of the package; of others nothing is asked."""
    return importlib.import_module(module) if module.split(".")[0] == "rlbench" else UNKNOWN


def family(kind: type) -> list[type]:
    """Give a class and those made of it: a verb says it returns the first, and may return any."""
    below: list[type] = kind.__subclasses__()
    return [kind, *(each for one in below for each in family(one))]


def hands_on(kind: type) -> bool:
    """Say whether a class asks another object for attributes that it has not."""
    return "__getattr__" in vars(kind) and kind is not Suggesting


def bases(kinds: list[type]) -> Iterator[type]:
    """Give all bases of classes, themselves first."""
    for kind in kinds:
        yield from kind.__mro__ if isinstance(kind, type) else ()


@functools.cache
def returned(function: Callable[..., Any] | None) -> Any:
    """Give the class that a function of the package says it returns, where it says one class."""
    if function is None:
        return UNKNOWN
    function = inspect.unwrap(function)
    kind = inspect.signature(function).return_annotation
    if isinstance(kind, str) and kind.isidentifier():
        kind = vars(sys.modules[function.__module__]).get(kind) or imported_for_types(function.__module__, kind)
    return Instance(kind) if isinstance(kind, type) and kind.__module__.startswith("rlbench.") else UNKNOWN


def imported_for_types(module: str, name: str) -> Any:
    """Give what a module imports for its annotations alone, `None` if nothing."""
    for node in ast.walk(ast.parse(inspect.getsource(sys.modules[module]))):
        if isinstance(node, ast.ImportFrom) and node.module and name in {alias.name for alias in node.names}:
            return getattr(importlib.import_module(node.module), name, None)
    return None
