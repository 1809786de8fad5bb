"""Where ranks that run the same cell can be stopped: at a statement, all after the same collective. A rank that is
asked to stop holds at its next statement, says how many collectives it has issued, and waits; who has issued fewer goes
on until it is level. Once all hold with the same number, all stop. Ranks meet in the engine's TCP store, as the process
group itself must not be waited in."""

from __future__ import annotations

import ast
import json
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from rlbench.errors import Stopped

if TYPE_CHECKING:
    from torch.distributed import Store

GATE = "__rlbench_statement__"  # what each statement of a cell calls first
POLL_S = 0.02
TELL_S = 0.1
LOST_S = 60.0
"""How long a rank holds, or goes on to be level, before it stops wherever the others are."""


class Cut:
    """One rank's part in stopping one cell; `board`: the store that all `ranks` that run it write to, None for one
    alone; `issued`: collectives this rank has issued so far."""

    def __init__(
        self,
        board: Store | None,
        rank: int,
        ranks: list[int],
        stop_requested: Callable[[], bool],
        issued: Callable[[], int],
    ) -> None:
        self._board, self._rank, self._ranks = board, rank, ranks
        self._stop_requested, self._issued = stop_requested, issued
        self._until = 0
        self._held_since: float | None = None
        self._over = threading.Event()
        self._holding = False
        self._teller: threading.Thread | None = None

    def __enter__(self) -> Cut:
        if self._board is not None and len(self._ranks) > 1:
            self._teller = threading.Thread(target=self._tell_while_stopping, name="rlbench cut", daemon=True)
            self._teller.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        if self._teller is not None:
            self._teller.join()
            self._tell("done")  # a rank that ended its cell holds nobody up

    def statement(self) -> None:
        """Called before each statement of the cell. Raises Stopped where all ranks can stop."""
        if self._over.is_set() or not self._stop_requested():
            return
        if self._teller is None:
            self._end()
        if self._held_since is None:
            self._held_since = time.monotonic()
        self._check_lost()
        if self._issued() < self._until:
            return
        mine = self._issued()
        self._holding = True
        self._tell("held")
        while True:
            others = self._others()
            highest = max((count for _, count in others), default=mine)
            if highest > mine:  # somebody waits in a collective for this rank
                self._until, self._holding = highest, False
                self._tell("runs")
                return
            level = [state == "done" or (state == "held" and count == mine) for state, count in others]
            if len(level) == len(self._ranks) - 1 and all(level):
                self._end()
            self._check_lost()
            time.sleep(POLL_S)

    def _end(self, where: str = "on every rank after the same collective") -> None:
        self._over.set()
        raise Stopped(f"the cell was stopped between two statements, {where}")

    def _check_lost(self) -> None:
        if self._held_since is not None and time.monotonic() - self._held_since > LOST_S:
            self._end(f"after {LOST_S:g} s in which the ranks did not meet: another may wait in a collective")

    def _tell_while_stopping(self) -> None:
        """A rank that is inside a statement, perhaps in a collective, says from here how far it is."""
        while not self._over.wait(TELL_S):
            if self._stop_requested() and not self._holding:
                self._tell("runs")

    def _tell(self, state: str) -> None:
        if self._board is not None:
            self._board.set(str(self._rank), json.dumps([state, self._issued()]))

    def _others(self) -> list[tuple[str, int]]:
        """What each other rank that has spoken said last: its state, its count of collectives."""
        assert self._board is not None
        keys = [str(rank) for rank in self._ranks if rank != self._rank]
        return [tuple(json.loads(self._board.get(key))) for key in keys if self._board.check([key])]


def with_statements(tree: ast.Module) -> ast.Module:
    """The same program with a call of `GATE` before each statement, also in its loops and functions."""
    _Gates().visit(tree)
    tree.body = _gated(tree.body)
    return ast.fix_missing_locations(tree)


class _Gates(ast.NodeTransformer):
    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        if isinstance(node, ast.Module | ast.ClassDef):
            return node  # a class body's names become attributes; a module is done last
        for name in ("body", "orelse", "finalbody"):
            body = getattr(node, name, None)
            if isinstance(body, list) and body and isinstance(body[0], ast.stmt):
                setattr(node, name, _gated(body))
        return node


def _gated(body: list[ast.stmt]) -> list[ast.stmt]:
    gated: list[ast.stmt] = []
    for i, statement in enumerate(body):
        is_future = isinstance(statement, ast.ImportFrom) and statement.module == "__future__"
        first_text = i == 0 and isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        if not first_text and not isinstance(statement, ast.Global | ast.Nonlocal) and not is_future:
            call = ast.Call(ast.Name(GATE, ast.Load()), [], [])
            gated.append(ast.copy_location(ast.Expr(ast.copy_location(call, statement)), statement))
        gated.append(statement)
    return gated
