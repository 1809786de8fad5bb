"""The verbs of a rank that run a cell of a notebook, or a script: `%%ranks`, `%ranks`."""

from __future__ import annotations

import contextlib
import re
import rlcompleter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from rlbench.dispatch import context
from rlbench.strategies.ranks.control import issued_collectives
from rlbench.user_code import user_code
from rlbench.workers.train.cell_cut import Cut
from rlbench.workers.train.namespace import Cell

if TYPE_CHECKING:
    from rlbench.workers.train.rank import TrainRank

MOST = 20_000
"""Characters of a result's text."""
NAMES = 300
_DOTTED = re.compile(r"[\w.]*$")


class CellVerbs:
    """What `TrainRank` inherits: run_cell, run_script, complete_names."""

    def run_cell(self, cell: Cell, rank: int | None = None) -> str | None:
        """Run a cell in the rank's namespace; the `repr` of its last expression, None where there is none.

        Args:
            cell: its text. Names stay from cell to cell, and are those of `train.run`.
            rank: run it on this one alone; the others do nothing, so it must not ask them for a collective.

        Raises:
            Stopped: somebody asked to stop; every rank ended before the same statement, or one like it.
        """
        me = cast("TrainRank", self)
        value = self._together(rank, lambda statement: me._namespace.run_cell(cell, statement))
        if value is None:
            return None
        text = repr(value)
        return text if len(text) <= MOST else f"{text[:MOST]}… (+{len(text) - MOST:,} characters)"

    def run_script(self, cell: Cell, rank: int | None = None) -> Any:
        """Run a script, see `Namespace.run_script`; the value of its last expression. Otherwise as `run_cell`."""
        me = cast("TrainRank", self)
        return self._together(rank, lambda statement: me._namespace.run_script(cell, statement))

    def _together(self, rank: int | None, run: Callable[[Callable[[], None]], Any]) -> Any:
        """What `run` gives; it calls its argument before each statement, by which all ranks stop at the same one."""
        me = cast("TrainRank", self)
        me._built()
        ranks = list(range(me.world_size)) if rank is None else [rank]
        if me.rank not in ranks:
            return None
        call = context.current()
        me._group.forget_board()
        board = me._group.board(call.call_id) if len(ranks) > 1 else None
        with Cut(board, me.rank, ranks, call.stop_requested, issued_collectives) as cut:
            return me.in_namespace(lambda: run(cut.statement))

    def complete_names(self, text: str) -> list[str]:
        """Names of the namespace, or attributes of one of its objects, that continue `text`. Never blocks."""
        me = cast("TrainRank", self)
        if not me._methods:
            return []
        found = _DOTTED.search(text)
        asked = found[0] if found else ""
        completer = rlcompleter.Completer(me._namespace.names)
        matches: list[str] = []
        with contextlib.suppress(Exception), user_code():  # an attribute that raises is no completion
            for state in range(NAMES):
                match = completer.complete(asked, state)
                if match is None:
                    break
                matches.append(match.rstrip("() "))
        return sorted(set(matches))
