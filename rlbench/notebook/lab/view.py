"""How a loss lab looks: a row of numbers per loss, where the losses spend their gradient, coefficient against ratio."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from rlbench.notebook.base.markup import cut, one_line
from rlbench.notebook.cards.card import WARNING, Card, Grid
from rlbench.notebook.charts.chart import Chart, Line, Panel, lines_text
from rlbench.notebook.lab.tokens import token_strips
from rlbench.units import format_count, format_number, format_share

DRAWN = 8
"""Losses in a chart: as many as there are hues."""
SIGNS = ("A = +1", "A = −1")
BUCKETS = 8
"""Columns of a table of buckets: there may be a hundred turns."""
NAME = 40
"""Characters of a loss's name in a chart."""


def lab_view(lab: Any) -> Card:
    """The card of a lab, its losses side by side on the tokens, and their coefficients against the ratio."""
    return replace(lab_card(lab), chart=what_if_chart(lab, *lab.curves()), detail=token_strips(lab))


def lab_card(lab: Any) -> Card:
    """The numbers of every loss, the errors of those that failed, and what to know when reading them."""
    batch = lab.batch
    facts = (f"{format_number(len(batch))} sequences", f"{format_count(int(batch.mask.sum()))} tokens trained")
    grids = [_numbers(lab)] if len(lab) else []
    grids += [_parameters(lab.parameters)] if lab.parameters is not None else []
    told = [what for what in ("length", "turn") if len(lab) and len(lab.scored.buckets[what].labels) > 1]
    grids += [_spending(lab, what) for what in told]
    notes = []
    for name, error in lab.failed.items():  # the user's line also where the message is long
        line = str(getattr(error, "user_line", ""))
        parts = one_line(str(error).removesuffix(line).strip(), 240), line
        notes.append(f"{WARNING}{one_line(name, NAME)} has no numbers: {' · '.join(filter(None, parts))}")
    return Card("loss lab", facts, grids, [*notes, *_remarks(lab)])


def _numbers(lab: Any) -> Grid:
    """One row per loss: value, size and shares of its coefficients, direction against the first loss's."""
    rows = []
    for i, entry in enumerate(lab.entries.values()):
        name = f"{entry.name} ({entry.hash[:4]})" if entry.hash else entry.name
        clip = "–" if entry.clip_fraction is None else format_share(entry.clip_fraction, 1)
        positive, negative, _ = (round(100 * float(share)) for share in entry.shares["advantage"])
        spent = f"{positive} / {negative}", format_share(entry.zeros, 1)
        differ = "–" if i == 0 else format_share(lab.disagreement(entry.name), 1)
        beside = _cosine(float(lab.cosines[i, 0])), differ
        numbers = format_number(entry.value), format_number(entry.norm), clip
        rows.append((name, *numbers, *spent, *beside, entry.aggregation))
    cosine = f"cos to {cut(next(iter(lab)), NAME)}"
    head = ("", "value", "|coef|", "clip", "share of + / −", "zero", cosine, "signs differ", "aggregation")
    return Grid(rows, head, frozenset(range(1, 8)))


def _parameters(found: Any) -> Grid:
    """One row per loss: its whole gradient, against the first one's."""
    rows = [
        (loss, format_number(float(found.norms[i])), *map(_cosine, (found.cosines[i, 0], found.norm_ratios[i, 0])))
        for i, loss in enumerate(found.losses)
    ]
    head = ("", "|grad|", f"cos to {cut(found.losses[0], NAME) if found.losses else ''}", "norm ratio")
    return Grid(rows, head, frozenset(range(1, 4)), "gradients of the parameters; lab.parameters.by_layer()")


def _cosine(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.2f}"


def _spending(lab: Any, what: str) -> Grid:
    """Buckets as columns: the trained tokens' share of each, then every loss's."""
    buckets = lab.scored.buckets[what]
    rows = [("trained tokens", buckets.tokens), *((e.name, e.shares[what]) for e in lab.entries.values())]
    cells = [(name, *(format_share(float(share), 1) for share in shares[:BUCKETS])) for name, shares in rows]
    head, more = ("", *buckets.labels[:BUCKETS]), len(buckets.labels) - BUCKETS
    caption = f"share of |coef| by {'length of the response, tokens' if what == 'length' else what}"
    caption += f"; {more} more: lab.by({what!r})" if more > 0 else ""
    return Grid(cells, head, frozenset(range(1, len(head))), caption)


def _remarks(lab: Any) -> list[str]:
    if not len(lab):
        return []
    found = []
    if lab.scored.on_policy:
        found.append("every ratio to the old policy is 1: no clip range acts here. lab.what_if() shows where it would")
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
    return [*found, "coef = ∂L/∂log-prob of a token, aggregated; negative: a step makes the token more likely"]


def what_if_chart(
    lab: Any, curves: Mapping[str, Any], failed: Mapping[str, Exception], losses_too: bool = False
) -> Chart:
    """One token's coefficient (and loss) against its ratio new/old; a panel for each sign of the advantage."""
    shown = dict(list(curves.items())[:DRAWN])
    notes = [f"{one_line(n, NAME)}: no curve of one token: {one_line(error, 200)}" for n, error in failed.items()]
    if not shown:
        return Chart("", (), "No curves: no loss could be evaluated on one token.", "\n".join(notes))
    panels = []
    for what in ("coefficient", "loss") if losses_too else ("coefficient",):
        for i, sign in enumerate(SIGNS):
            lines = tuple(
                Line(one_line(name, NAME), curve.ratios, getattr(curve, what)[i], hue=hue)
                for hue, (name, curve) in enumerate(shown.items())
            )
            panels.append(Panel(f"{what}, {sign}", "ratio", lines))
    old, _ = lab.typical_token()
    probability = format_number(float(np.exp(old)))
    notes.insert(0, f"one token alone, of old probability {probability}, weight 1; negative: it becomes more likely")
    if len(curves) > DRAWN:
        notes.append(f"the first {DRAWN} of {len(curves)} losses; lab.curves() has all")
    shown_as = {f"{panel.y} · {line.name}": line for panel in panels for line in panel.lines}
    return Chart("coefficient against ratio r", tuple(panels), lines_text(shown_as), "\n".join(notes))
