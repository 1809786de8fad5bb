"""How gradients look in a cell: norm by layer as bars and numbers, and by the token's place in its response."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np

from rlbench.data.record.gradients import Gradients
from rlbench.notebook.base.figures import blocks
from rlbench.notebook.base.markup import one_line
from rlbench.notebook.cards.card import WARNING, Card, Grid
from rlbench.notebook.charts.chart import Bars, Chart, Line, Panel
from rlbench.units import format_count, format_number, format_share

ROWS, STACKS, PLACES = 16, 3, 512
"""Rows of the table, stacks of layers in the chart, tokens of a response in the chart."""
WIDTH, NAME = 12, 48
"""Characters of a bar, and of a name."""
LAYER = re.compile(r"^(?P<stack>.*?)\.?(?P<number>\d+)$")


def gradients_card(gradients: Gradients) -> Card:
    """One row per layer and per module outside of the layers, and the norms by layer and by place in the response."""
    rows = gradients.by_layer()
    facts = (f"norm {format_number(gradients.norm)}", f"{format_count(float(gradients.sizes.sum()))} parameters")
    order = sorted(np.argsort(-np.nan_to_num(rows.norms, nan=np.inf), kind="stable")[:ROWS].tolist())
    most = float(np.nan_to_num(rows.norms, posinf=0.0).max(initial=0.0))
    cells = []
    for i in order:
        norm, relative, largest = (float(column[i]) for column in (rows.norms, rows.relative, rows.largest))
        against = "–" if np.isnan(relative) else format_number(relative)
        numbers = format_number(norm), against, format_number(largest), format_share(float(rows.zero_share[i]), 1)
        cells.append((one_line(rows.names[i], NAME), _bar(norm, most), *numbers))
    head = ("", "", "|grad|", "|grad| / |weights|", "largest", "zero")
    caption = f"the {len(cells)} largest of {len(rows)}" if len(cells) < len(rows) else ""
    grid = Grid(cells, head, frozenset(range(2, 6)), caption)
    hint = "before clipping, all ranks together · by_layer() · by_module(depth) · table() · channels() for the rollouts"
    notes = []
    if gradients.broken:
        count = int(gradients.nonfinite.sum())
        shown = ", ".join(one_line(name, NAME) for name in gradients.broken[:3])
        shown += " …" if len(gradients.broken) > 3 else ""
        notes.append(f"{WARNING}{count} entries are NaN or infinite, in {shown}: a step with them is skipped")
    for i, tokens in enumerate(gradients.tokens):  # what their own numbers spread over
        lead = "tokens" if len(gradients.tokens) == 1 else f"tokens of batch {i}"
        said = [f"|∂L/∂log-prob| {_spread(np.abs(tokens.coefficient))}"]
        if tokens.hidden is not None:
            said.append(f"|∂L/∂hidden| {_spread(tokens.hidden)}")
        notes.append(f"{lead}: {' · '.join(said)}")
    return Card("gradients", facts, [grid], [*notes, hint], gradients_chart(gradients))


def _spread(values: np.ndarray) -> str:
    median, most = (format_number(float(v)) for v in (np.median(values), values.max())) if len(values) else ("–", "–")
    return f"median {median}, largest {most}"


def _bar(value: float, most: float) -> str:
    """A bar of whole and half strokes; at least a trace of what is not 0."""
    if not np.isfinite(value) or most <= 0:
        return "✕" if not np.isfinite(value) else ""
    halves = max(round(2 * WIDTH * value / most), 1 if value > 0 else 0)
    return "━" * (halves // 2) + "╸" * (halves % 2)


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
        if layer := LAYER.match(name):
            stacks.setdefault(layer["stack"], {})[int(layer["number"])] = float(np.nan_to_num(norm, posinf=0.0))
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
