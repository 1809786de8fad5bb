"""The card of a plan of memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlbench.notebook.cards.card import WARNING, Card, Grid
from rlbench.units import format_bytes, format_count


def plan_card(plan: Any) -> Card:
    """Who holds how much in which phase, against what there is."""
    request = plan.request
    devices = request.devices
    facts = [f"{format_count(plan.parameters)} parameters"]
    if plan.trained != plan.parameters:
        facts.append(f"{format_count(plan.trained)} trained")
    facts += [str(devices), plan.headline]
    name = "one device" if devices.gpus else "the host"
    grids = [_grid(plan.device, plan.phases, name, devices.nbytes)]
    if plan.host:
        grids.append(_grid(plan.host, plan.phases, "host memory", devices.host))
    notes = [f"{WARNING}{problem}" for problem in plan.problems]
    if not plan.fits:
        change = plan.change
        notes.append(
            f"{WARNING}{change}" if change else f"{WARNING}nothing that rlbench offers makes it fit: more devices"
        )
    return Card(f"plan {request.path.rpartition('/')[2]}", facts, grids, [*notes, *plan.notes])


def _grid(uses: Any, planned: Sequence[str], where: str, limit: int | None) -> Grid:
    phases = [phase for phase in planned if any(use.phases.get(phase) for use in uses)]
    rows: list[list[str]] = []
    role = ""
    for use in uses:
        shown = use.role if use.role != role else ""
        role = use.role
        rows.append([shown, use.owner, *(_bytes(use.phases.get(phase, 0)) for phase in phases)])
    totals = [sum(use.phases.get(phase, 0) for use in uses) for phase in phases]
    rows.append(["all", where, *map(format_bytes, totals)])
    if limit is not None:
        left = [limit - total for total in totals]
        rows.append(["left", f"of {format_bytes(limit)}", *(_left(n) for n in left)])
    return Grid(rows, ("", where, *phases), frozenset(range(2, 2 + len(phases))))


def _bytes(nbytes: int) -> str:
    return format_bytes(nbytes) if nbytes else ""


def _left(nbytes: int) -> str:
    return format_bytes(nbytes) if nbytes >= 0 else f"{WARNING}-{format_bytes(-nbytes)}"
