"""The cards of what was done in a session: its verbs, and the script made of them."""

from __future__ import annotations

import time
from typing import Any

from rlbench.data.record.verbs import given_text
from rlbench.notebook.cards.card import WARNING, Card, Cell, Grid, Pair
from rlbench.units import format_number, format_seconds

SHOWN = 20
METRICS = ("loss", "reward", "kl", "grad_norm")
LEFT_OUT_SHOWN = 8


def verbs_card(verbs: Any) -> Card:
    """The last verbs of a session: with what, how long, what came of it."""
    if not len(verbs):
        return Card("no verbs yet")
    rows = tuple(_row(one) for one in verbs.records[-SHOWN:])
    grid = Grid(rows, ("verb", "at", "took", "with", "what came of it"), frozenset({2}))
    left = len(verbs) - len(rows)
    notes = ([f"{left} earlier verbs are not shown"] if left else []) + [
        "verbs.source(verbs[-1]) is the code it used; verbs.to_pandas() a table; session.export_script(path) a script"
    ]
    return Card(f"{len(verbs)} verb{'' if len(verbs) == 1 else 's'}", (), [grid], notes)


def exported_card(exported: Any) -> Card:
    """The script that was written, how to run it, and what is not in it."""
    rows: list[tuple[Cell, ...]] = [("path", str(exported.path)), ("run it", f"python {exported.path.name}")]
    left = exported.left_out
    rows += [("left out" if i == 0 else "", line) for i, line in enumerate(left[:LEFT_OUT_SHOWN])]
    if len(left) > LEFT_OUT_SHOWN:
        rows.append(("", f"and {len(left) - LEFT_OUT_SHOWN} more, named in the script"))
    note = "at its end it prints its numbers beside those seen here"
    return Card(
        "script",
        (f"{exported.cells} cell{'' if exported.cells == 1 else 's'}",),
        [Grid(tuple(rows), labels=True)],
        [note],
    )


def _row(one: dict[str, Any]) -> tuple[Cell, ...]:
    clock = time.strftime("%H:%M:%S", time.localtime(one["time"]))
    found = [Pair(name, format_number(one["metrics"][name])) for name in METRICS if name in one["metrics"]]
    if one["outcome"] != "done":
        came: str = f"{WARNING}{one['outcome']}: {one['said']}"
    else:
        came = " · ".join(map(str, found))
    return one["verb"], clock, format_seconds(one["seconds"]), given_text(one["args"]), came
