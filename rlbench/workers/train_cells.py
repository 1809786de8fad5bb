"""The verbs of a rank that run a cell of a notebook: `%%ranks`."""

from __future__ import annotations

import contextlib
import re
import rlcompleter
from typing import TYPE_CHECKING, cast

from rlbench.dispatch import context
from rlbench.strategies.control import issued_collectives
from rlbench.workers.cell_cut import Cut

if TYPE_CHECKING:
    from rlbench.workers.train_rank import TrainRank

MOST = 20_000
"""Characters of a result's text."""
NAMES = 300
_DOTTED = re.compile(r"[\w.]*$")


class CellVerbs:
    """What `TrainRank` inherits: run_cell, complete_names."""

    def run_cell(self, source: str, rank: int | None = None) -> str | None:
        """Run a cell in the rank's namespace; the `repr` of its last expression, None where there is none.

        Args:
            source: its text. Names stay from cell to cell, and are those of `train.run`.
            rank: run it on this one alone; the others do nothing, so it must not ask them for a collective.

        Raises:
            Stopped: somebody asked to stop; every rank ended before the same statement, or one like it.
        """
        me = cast("TrainRank", self)
        me._built()
        ranks = list(range(me.world_size)) if rank is None else [rank]
        if me.rank not in ranks:
            return None
        call = context.current()
        me._group.forget_board()
        board = me._group.board(call.call_id) if len(ranks) > 1 else None
        with Cut(board, me.rank, ranks, call.stop_requested, issued_collectives) as cut:
            value = me.in_namespace(lambda: me._namespace.run_cell(source, cut.statement))
        if value is None:
            return None
        text = repr(value)
        return text if len(text) <= MOST else f"{text[:MOST]}… (+{len(text) - MOST:,} characters)"

    def complete_names(self, text: str) -> list[str]:
        """Names of the namespace, or attributes of one of its objects, that continue `text`. Never blocks."""
        me = cast("TrainRank", self)
        if not me._methods:
            return []
        found = _DOTTED.search(text)
        asked = found[0] if found else ""
        completer = rlcompleter.Completer(me._namespace.names)
        matches: list[str] = []
        with contextlib.suppress(Exception):  # an attribute that raises when it is looked at: no completion
            for state in range(NAMES):
                match = completer.complete(asked, state)
                if match is None:
                    break
                matches.append(match.rstrip("() "))
        return sorted(set(matches))
