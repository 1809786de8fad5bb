"""How gradients look in a cell: norm by layer as bars and numbers, and by the token's place in its response."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np

from rlbench.data.record.gradients import Gradients
from rlbench.notebook.base.inert import one_line
from rlbench.notebook.base.sparkline import blocks
from rlbench.notebook.cards.card import WARNING, Card, Grid
from rlbench.notebook.cards.card_view import CardView
from rlbench.notebook.charts.chart import Bars, Chart, Line, Panel
from rlbench.units import format_count, format_number, format_share

ROWS, STACKS, PLACES = 16, 3, 512
"""Rows of the table, stacks of layers in the chart, tokens of a response in the chart."""
WIDTH, NAME = 12, 48
"""Characters of a bar, and of a name."""
LAYER = re.compile(r"^(?P<stack>.*?)\.?(?P<number>\d+)$")


def gradients_view(gradients: Gradients) -> CardView:
    """The card of gradients, and their norms by layer and by place in the response."""
    return CardView(gradients_card(gradients), gradients_chart(gradients))


def gradients_card(gradients: Gradients) -> Card:
    """One row per layer and per module outside of the layers, the largest first where there are many."""
    rows = gradients.by_layer()
    facts = (f"norm {format_number(gradients.norm)}", f"{format_count(float(gradients.sizes.sum()))} parameters")
    order = sorted(np.argsort(-np.nan_to_num(rows.norms, nan=np.inf), kind="stable")[:ROWS].tolist())
    most = float(np.nan_to_num(rows.norms, posinf=0.0).max(initial=0.0))
    cells = tuple(
        (
            one_line(rows.names[i], NAME),
            _bar(float(rows.norms[i]), most),
            format_number(float(rows.norms[i])),
            "–" if np.isnan(rows.relative[i]) else format_number(float(rows.relative[i])),
            format_number(float(rows.largest[i])),
            format_share(float(rows.zero_share[i]), 1),
        )
        for i in order
    )
    head = ("", "", "|grad|", "|grad| / |weights|", "largest", "zero")
    caption = f"the {len(cells)} largest of {len(rows)}" if len(cells) < len(rows) else ""
    grid = Grid(cells, head, frozenset(range(2, 6)), caption)
    hint = "before clipping, all ranks together · by_layer() · by_module(depth) · table() · channels() for the rollouts"
    return Card("gradients", facts, [grid], [*_warnings(gradients), *_token_notes(gradients), hint])


def _warnings(gradients: Gradients) -> list[str]:
    broken = gradients.broken
    if not broken:
        return []
    count = int(gradients.nonfinite.sum())
    shown = ", ".join(one_line(name, NAME) for name in broken[:3]) + (" …" if len(broken) > 3 else "")
    return [f"{WARNING}{count} entries are NaN or infinite, in {shown}: a step with them is skipped"]


def _token_notes(gradients: Gradients) -> list[str]:
    """What the tokens' own numbers spread over."""
    notes = []
    for i, tokens in enumerate(gradients.tokens):
        lead = "tokens" if len(gradients.tokens) == 1 else f"tokens of batch {i}"
        said = [f"|∂L/∂log-prob| {_spread(np.abs(tokens.coefficient))}"]
        if tokens.hidden is not None:
            said.append(f"|∂L/∂hidden| {_spread(tokens.hidden)}")
        notes.append(f"{lead}: {' · '.join(said)}")
    return notes


def _spread(values: np.ndarray) -> str:
    if not len(values):
        return "–"
    return f"median {format_number(float(np.median(values)))}, largest {format_number(float(values.max()))}"


def _bar(value: float, most: float) -> str:
    """A bar of whole and half strokes; at least a trace of what is not 0."""
    if not np.isfinite(value) or most <= 0:
        return "✕" if not np.isfinite(value) else ""
    halves = max(round(2 * WIDTH * value / most), 1 if value > 0 else 0)
    return "━" * (halves // 2) + "╸" * (halves % 2)


# -- the chart


def gradients_chart(gradients: Gradients) -> Chart:
    """A panel of bars for each stack of layers, and a line for the places in the responses."""
    panels = [*_stacks(gradients), *_places(gradients)]
    if not panels:
        return Chart("", (), "")
    drawn = [(panel.y, panel.bars[0].heights if panel.bars else panel.lines[0].y) for panel in panels]
    lines = [f"{name}: {blocks(norms, floor=0.0)} to {format_number(float(norms.max()))}" for name, norms in drawn]
    return Chart("gradient norms", tuple(panels), "\n".join(lines))


def _stacks(gradients: Gradients) -> Iterator[Panel]:
    rows = gradients.by_layer()
    stacks: dict[str, dict[int, float]] = {}
    for name, norm in zip(rows.names, rows.norms, strict=True):
        found = LAYER.match(name)
        if found is not None:
            stacks.setdefault(found["stack"], {})[int(found["number"])] = float(np.nan_to_num(norm, posinf=0.0))
    for stack, layers in list(stacks.items())[:STACKS]:
        if len(layers) < 2:
            continue
        heights = np.array([layers.get(i, 0.0) for i in range(max(layers) + 1)])
        edges = np.arange(len(heights) + 1) - 0.5
        name = one_line(stack, NAME)
        yield Panel(f"|grad|, {name}", "layer", bars=(Bars(name, edges, heights, ""),))


def _places(gradients: Gradients) -> Iterator[Panel]:
    lines = []
    for i, tokens in enumerate(gradients.tokens[:8]):
        means = tokens.by_position()[:PLACES]
        if len(means) > 1 and np.isfinite(means).all():
            name = "mean of the tokens" if len(gradients.tokens) == 1 else f"tokens of batch {i}"
            lines.append(Line(name, np.arange(len(means)), means, hue=(2 + i) % 8))
    if lines:
        hidden = all(tokens.hidden is not None for tokens in gradients.tokens)
        yield Panel("|∂L/∂hidden|" if hidden else "|∂L/∂log-prob|", "token of the response", tuple(lines))
