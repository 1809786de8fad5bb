"""The component of a rank that runs a user's code: methods of the module, functions, cells of a notebook, scripts."""

from __future__ import annotations

import contextlib
import re
import rlcompleter
from collections.abc import Callable
from typing import Any

import cloudpickle

from rlbench.dispatch import context
from rlbench.errors import EngineError, MethodError, nearest
from rlbench.nn import callable_names
from rlbench.strategies.ranks.control import issued_collectives
from rlbench.user_code import user_code
from rlbench.workers.train.cell_cut import Cut
from rlbench.workers.train.namespace import Cell
from rlbench.workers.train.parts import RankParts

MOST = 20_000  # characters of a result's text
NAMES = 300
PART_INSTEAD_OF_CALL = ("got mixed torch.Tensor and DTensor", "'weight' must be 2-D")  # FSDP2's shards, FSDP1's rows
_DOTTED = re.compile(r"[\w.]*$")


class Cells:
    """Verbs of a built rank; all but `complete_names` are collective."""

    def __init__(self, parts: RankParts) -> None:
        self._parts, self._namespace, self._control = parts, parts.namespace, parts.strategy.control

    def call_method(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], tokens: int | None = None) -> Any:
        """Run a method of the user's module. A result that is the module itself (`train()`) becomes None.

        `tokens`: of the rows that arguments are slices of; None: nothing is split.
        """
        module = self._parts.module
        names = callable_names(type(module))
        if name not in names:
            raise MethodError(f"the module has no method {name!r}{nearest(name, names)}.")
        self._parts.residency.need("weights")
        try:
            with self._slices(tokens):
                result = self._parts.of_the_user(lambda: getattr(module, name)(*args, **kwargs))
        except RuntimeError as error:
            if any(said in str(error) for said in PART_INSTEAD_OF_CALL):
                raise EngineError(
                    f"{name} used a submodule or parameter whose shards are not gathered ({error}); go "
                    "through self(...), not self.forward(...) or a part of the model."
                ) from error
            raise
        return None if result is module else result

    def run(self, fn_blob: bytes, args: tuple[Any, ...], kwargs: dict[str, Any], tokens: int | None = None) -> Any:
        """Run a function (or, as a string, a cell) in the rank's namespace; see `Namespace.run`, and `call_method`."""
        with self._slices(tokens):
            return self._parts.of_the_user(lambda: self._namespace.run(cloudpickle.loads(fn_blob), args, kwargs))

    def _slices(self, tokens: int | None) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if tokens is None else self._parts.policy.slices(tokens)

    def run_cell(self, cell: Cell, rank: int | None = None) -> str | None:
        """Run a cell in the rank's namespace, on all ranks or one `rank` alone; return its last expression's `repr`, or
        None. A stop ends it on every rank before the same statement, or one like it."""
        value = self._together(rank, lambda statement: self._namespace.run_cell(cell, statement))
        if value is None:
            return None
        text = repr(value)
        return text if len(text) <= MOST else f"{text[:MOST]}… (+{len(text) - MOST:,} characters)"

    def run_script(self, cell: Cell, rank: int | None = None) -> Any:
        """Run a script, see `Namespace.run_script`; the value of its last expression. Otherwise as `run_cell`."""
        return self._together(rank, lambda statement: self._namespace.run_script(cell, statement))

    def _together(self, rank: int | None, run: Callable[[Callable[[], None]], Any]) -> Any:
        """What `run` gives; it calls its argument before each statement, by which all ranks stop at the same one."""
        own, group, call = self._control.rank, self._parts.group, context.current()
        ranks = list(range(self._control.world_size)) if rank is None else [rank]
        if own not in ranks:
            return None
        group.forget_board()
        board = group.board(call.call_id) if len(ranks) > 1 else None
        with Cut(board, own, ranks, call.stop_requested, issued_collectives) as cut:
            return self._parts.of_the_user(lambda: run(cut.statement))

    def complete_names(self, text: str) -> list[str]:
        """Names of the namespace, or attributes of one of its objects, that continue `text`. Never blocks."""
        dotted = _DOTTED.search(text)
        completer = rlcompleter.Completer(self._namespace.names)
        matches: set[str] = set()
        with contextlib.suppress(Exception), user_code():  # an attribute that raises is no completion
            found = (completer.complete(dotted[0] if dotted else "", state) for state in range(NAMES))
            matches.update(match.rstrip("() ") for match in found if match is not None)
        return sorted(matches)
