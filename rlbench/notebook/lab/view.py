"""How a loss lab looks: a row of numbers per loss, where the losses spend their gradient, coefficient against ratio."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlbench.notebook.base.inert import cut, one_line
from rlbench.notebook.base.sparkline import blocks
from rlbench.notebook.cards.card import WARNING, Card, Cell, Grid
from rlbench.notebook.cards.card_view import CardView
from rlbench.notebook.charts.chart import Chart, Line, Panel
from rlbench.notebook.lab.tokens import token_strips
from rlbench.units import format_count, format_number, format_share

DRAWN = 8
"""Losses in a chart: as many as there are hues."""
SIGNS = ("A = +1", "A = −1")
BUCKETS = 8
"""Columns of a table of buckets: there may be a hundred turns."""
NAME, BLOCKS = 40, 40
"""Characters of a loss's name in a chart; blocks of a curve as text."""


def lab_view(lab: Any) -> CardView:
    """The card of a lab, its losses side by side on the tokens, and their coefficients against the ratio."""
    return CardView(lab_card(lab), what_if_chart(lab, *lab.shown_curves), token_strips(lab))


# -- the card


def lab_card(lab: Any) -> Card:
    """The numbers of every loss, the errors of those that failed, and what to know when reading them."""
    batch = lab.batch
    facts = (f"{format_number(len(batch))} sequences", f"{format_count(int(batch.mask.sum()))} tokens trained")
    grids = [_numbers(lab)] if len(lab) else []
    grids += [_parameters(lab.parameters)] if lab.parameters is not None else []
    told = [what for what in ("length", "turn") if len(lab) and len(lab.scored.buckets[what].labels) > 1]
    grids += [_spending(lab, what) for what in told]
    return Card("loss lab", facts, grids, [*(_failure(*one) for one in lab.failed.items()), *_remarks(lab)])


def _numbers(lab: Any) -> Grid:
    """One row per loss: value, size and shares of its coefficients, direction against the first loss's."""
    rows = tuple(_row(lab, i, entry) for i, entry in enumerate(lab.entries.values()))
    cosine = f"cos to {cut(next(iter(lab)), NAME)}"
    head = ("", "value", "|coef|", "clip", "share of + / −", "zero", cosine, "signs differ", "aggregation")
    return Grid(rows, head, frozenset(range(1, 8)))


def _row(lab: Any, i: int, entry: Any) -> tuple[Cell, ...]:
    named = f"{entry.name} ({entry.hash[:4]})" if entry.hash else entry.name
    clip = "–" if entry.clip_fraction is None else format_share(entry.clip_fraction, 1)
    positive, negative, _ = (round(100 * float(share)) for share in entry.shares["advantage"])
    return (
        named,
        format_number(entry.value),
        format_number(entry.norm),
        clip,
        f"{positive} / {negative}",
        format_share(entry.zeros, 1),
        _cosine(float(lab.cosines[i, 0])),
        "–" if i == 0 else format_share(lab.disagreement(entry.name), 1),
        entry.aggregation,
    )


def _parameters(found: Any) -> Grid:
    """One row per loss: its whole gradient, against the first one's."""
    rows = tuple(
        (loss, format_number(float(found.norms[i])), *map(_cosine, (found.cosines[i, 0], found.norm_ratios[i, 0])))
        for i, loss in enumerate(found.losses)
    )
    head = ("", "|grad|", f"cos to {cut(found.losses[0], NAME) if found.losses else ''}", "norm ratio")
    return Grid(rows, head, frozenset(range(1, 4)), "gradients of the parameters; lab.parameters.by_layer()")


def _cosine(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.2f}"


def _spending(lab: Any, what: str) -> Grid:
    """Buckets as columns: the trained tokens' share of each, then every loss's."""
    buckets = lab.scored.buckets[what]
    rows = [("trained tokens", buckets.tokens), *((e.name, e.shares[what]) for e in lab.entries.values())]
    cells = tuple((name, *(format_share(float(share), 1) for share in shares[:BUCKETS])) for name, shares in rows)
    head, more = ("", *buckets.labels[:BUCKETS]), len(buckets.labels) - BUCKETS
    caption = f"share of |coef| by {'length of the response, tokens' if what == 'length' else what}"
    caption += f"; {more} more: lab.by({what!r})" if more > 0 else ""
    return Grid(cells, head, frozenset(range(1, len(head))), caption)


def _failure(name: str, error: Exception) -> str:
    """Name a loss's error, and the user's line even where the message is long."""
    line = str(getattr(error, "user_line", ""))
    parts = one_line(str(error).removesuffix(line).strip(), 240), line
    return f"{WARNING}{one_line(name, NAME)} has no numbers: {' · '.join(filter(None, parts))}"


def _remarks(lab: Any) -> list[str]:
    if not len(lab):
        return []
    found = []
    if lab.scored.on_policy:
        found.append(
            "every ratio to the old policy is 1, as in a batch's first step: no clip range acts here. lab.what_if() "
            "shows where it would"
        )
    bonus = [name for name, entry in lab.entries.items() if entry.entropy_coefficients is not None]
    if bonus:
        found.append(f"{', '.join(bonus)}: the entropy term acts beside these coefficients, see lab.table()")
    leaky = [name for name, entry in lab.entries.items() if entry.leaks]
    if leaky:
        found.append(
            f"{WARNING}{', '.join(leaky)}: untrained tokens (tool output, padding) get a gradient, too: a step would "
            "train on them. Clear them first: torch.where(inputs.mask, …, 0)"
        )
    if lab.bound is not None:
        found.append(f"lab[{next(iter(lab))!r}].step() takes the step with that loss")
    return [
        *found,
        "coef = ∂L/∂log-prob of a token, aggregated; negative: a step makes the token more likely",
    ]


# -- what if the ratio were r


def what_if_chart(
    lab: Any, curves: Mapping[str, Any], failed: Mapping[str, Exception], losses_too: bool = False
) -> Chart:
    """One token's coefficient (and loss) against its ratio new/old; a panel for each sign of the advantage."""
    shown = dict(list(curves.items())[:DRAWN])
    notes = [f"{one_line(n, NAME)}: no curve of one token: {one_line(error, 200)}" for n, error in failed.items()]
    if not shown:
        return Chart("", (), "No curves: no loss could be evaluated on one token.", "\n".join(notes))
    panels = [
        _panel(what, i, shown) for what in ("coefficient", *(["loss"] if losses_too else [])) for i in range(len(SIGNS))
    ]
    old, _ = lab.typical_token(max(float(curve.ratios.max()) for curve in shown.values()))
    probability = format_number(float(np.exp(old)))
    notes.insert(0, f"one token alone, of old probability {probability}, weight 1; negative: it becomes more likely")
    if len(curves) > DRAWN:
        notes.append(f"the first {DRAWN} of {len(curves)} losses; lab.curves() has all")
    return Chart("coefficient against ratio r", tuple(panels), _text(panels), "\n".join(notes))


def _panel(what: str, sign: int, curves: Mapping[str, Any]) -> Panel:
    lines = tuple(
        Line(one_line(name, NAME), curve.ratios, getattr(curve, what)[sign], hue=hue)
        for hue, (name, curve) in enumerate(curves.items())
    )
    return Panel(f"{what}, {SIGNS[sign]}", "ratio", lines)


def _text(panels: Sequence[Panel]) -> str:
    """Each curve as blocks, with its values at both ends and, where the grid has it, at ratio 1."""
    rows = [(f"{panel.y} · {line.name}", line) for panel in panels for line in panel.lines]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {_curve_text(line)}" for name, line in rows)


def _curve_text(line: Line) -> str:
    kept = np.linspace(0, len(line.x) - 1, min(BLOCKS, len(line.x))).astype(int)
    ends = f"{format_number(float(line.y[0]))} {blocks(line.y[kept])} {format_number(float(line.y[-1]))}"
    at_one = np.flatnonzero(np.abs(line.x - 1) < 1e-6)
    return ends + (f", at 1: {format_number(float(line.y[at_one[0]]))}" if len(at_one) else "")
