"""The namespace of `train.run` and of cells that run on a rank: globals that stay from call to call."""

from __future__ import annotations

import ast
import linecache
import types
from collections.abc import Callable
from typing import Any

from rlbench.errors import EngineError
from rlbench.workers.cell_cut import GATE, with_statements


class Namespace:
    """Globals of the functions and cells a user runs on a rank. `given` names always mean what the rank
    says."""

    def __init__(self, **given: Any) -> None:
        self._given = given
        self._cells = 0
        self._globals: dict[str, Any] = {"__name__": "__rank__", "__builtins__": __builtins__, **given}

    def run(self, work: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function with this namespace as its globals, or run a cell (a string) and return its last
        value.

        What the function itself refers to is put into the namespace; what it assigns by `global` stays there.
        """
        if isinstance(work, str):
            return self.run_cell(work, lambda: None)
        if not isinstance(work, types.FunctionType):
            if callable(work):
                return work(*args, **kwargs)
            raise EngineError(f"run takes a function or the source of a cell, not {type(work).__name__}.")
        skipped = {"__name__", "__builtins__", *self._given}
        self._globals.update({name: value for name, value in work.__globals__.items() if name not in skipped})
        bound = types.FunctionType(
            work.__code__, self._globals, work.__name__, work.__defaults__, work.__closure__
        )
        bound.__kwdefaults__ = work.__kwdefaults__
        return bound(*args, **kwargs)

    @property
    def names(self) -> dict[str, Any]:
        """What the next function or cell finds."""
        return self._globals

    def run_cell(self, source: str, statement: Callable[[], None]) -> Any:
        """Run a cell and return the value of its last expression; `statement` is called before each statement.

        A function that an earlier cell defined calls this cell's.
        """
        self._cells += 1
        name = f"<rank cell {self._cells}>"
        linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)  # for its errors
        tree = ast.parse(source, name)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        self._globals[GATE] = statement
        exec(compile(with_statements(tree), name, "exec"), self._globals)
        if not isinstance(last, ast.Expr):
            return None
        statement()
        return eval(compile(ast.Expression(last.value), name, "eval"), self._globals)
