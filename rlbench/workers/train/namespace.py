"""The namespace of `train.run` and of cells on a rank: globals that stay from call to call; scripts run as a program of
their own and leave their names in it."""

from __future__ import annotations

import ast
import contextlib
import linecache
import os
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlbench.errors import EngineError
from rlbench.workers.train.cell_cut import GATE, with_statements

OF_A_MODULE = ("__name__", "__builtins__", "__file__", "__doc__", "__loader__", "__package__", "__spec__", GATE)
"""Names that belong to a script itself, not to what it leaves behind."""


@dataclass(frozen=True)
class Cell:
    """Text to run on a rank. `args`: what `sys.argv` holds behind the name. `file`: of a script, its whole path."""

    source: str
    args: tuple[str, ...] = ()
    file: str = ""


class Namespace:
    """`names`: globals of the functions and cells a user runs on a rank, where `fixed` ones mean what the rank says."""

    def __init__(self, **fixed: Any) -> None:
        self._fixed = fixed
        self._cells = 0
        self.names: dict[str, Any] = {"__name__": "__rank__", "__builtins__": __builtins__, **fixed}
        self._imported: set[str] = set()  # by scripts, from their own folders

    def run(self, work: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function with this namespace as its globals, which takes what it refers to; or run a cell (a
        string)."""
        if isinstance(work, str):
            return self.run_cell(Cell(work), lambda: None)
        if not callable(work):
            raise EngineError(f"run takes a function or the source of a cell, not {type(work).__name__}.")
        with _program([getattr(work, "__name__", type(work).__name__)]):
            if not isinstance(work, types.FunctionType):
                return work(*args, **kwargs)
            skipped = {"__name__", "__builtins__", *self._fixed}
            self.names.update({name: value for name, value in work.__globals__.items() if name not in skipped})
            bound = types.FunctionType(work.__code__, self.names, work.__name__, work.__defaults__, work.__closure__)
            bound.__kwdefaults__ = work.__kwdefaults__
            return bound(*args, **kwargs)

    def run_cell(self, cell: Cell, statement: Callable[[], None]) -> Any:
        """Run a cell and return the value of its last expression; `statement` is called before each statement."""
        self._cells += 1
        with _program(["cell", *cell.args]):
            return _executed(cell.source, f"<rank cell {self._cells}>", self.names, statement)

    def run_script(self, cell: Cell, statement: Callable[[], None]) -> Any:
        """Run a file as Python runs one, `__main__` beside modules it can import; return its last expression's value.
        What it defines stays in the namespace, as with IPython's `%run`; a `sys.exit(0)` is its end, not an error."""
        main = types.ModuleType("__main__")
        main.__dict__.update(self._fixed, __file__=cell.file, __builtins__=__builtins__)
        rank, size = str(self._fixed["rank"]), str(self._fixed["world_size"])  # as `torchrun` tells a script
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
        try:
            with self._beside(Path(cell.file).parent), _program([cell.file, *cell.args], place, main):
                with contextlib.redirect_stderr(sys.stdout):
                    return _executed(cell.source, cell.file, main.__dict__, statement)
        except SystemExit as end:
            if end.code in (None, 0):
                return None
            raise
        finally:
            left = {name: value for name, value in vars(main).items() if name not in (*OF_A_MODULE, *self._fixed)}
            self.names.update(left)

    @contextlib.contextmanager
    def _beside(self, folder: Path) -> Iterator[None]:
        """Modules of the folder can be imported, and are read anew by each script: they may have been edited."""
        for name in self._imported:
            sys.modules.pop(name, None)
        before = set(sys.modules)
        sys.path.insert(0, str(folder))
        try:
            yield
        finally:
            with contextlib.suppress(ValueError):  # the script took it off itself
                sys.path.remove(str(folder))
            files = {name: getattr(sys.modules[name], "__file__", None) for name in set(sys.modules) - before}
            self._imported = {name for name, file in files.items() if file and folder in Path(file).parents}


def _executed(source: str, name: str, names: dict[str, Any], statement: Callable[[], None]) -> Any:
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)  # for its errors
    tree = ast.parse(source, name)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    names[GATE] = statement
    exec(compile(with_statements(tree), name, "exec"), names)
    if not isinstance(last, ast.Expr):
        return None
    statement()
    return eval(compile(ast.Expression(last.value), name, "eval"), names)


@contextlib.contextmanager
def _program(
    argv: Sequence[str], environment: Mapping[str, str] | None = None, main: types.ModuleType | None = None
) -> Iterator[None]:
    before, main_before = sys.argv, sys.modules["__main__"]
    variables = {name: os.environ.get(name) for name in environment or {}}
    sys.argv, sys.modules["__main__"] = list(argv), main or main_before
    os.environ.update(environment or {})
    try:
        yield
    finally:
        sys.argv, sys.modules["__main__"] = before, main_before
        for name, value in variables.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
