"""What `history.plot()` and `rollouts.lengths.plot()` draw: metrics over steps, distributions, runs on one axis.

Everything is bounded, so that a saved notebook stays small: long lines keep the extremes of each stretch, and the
caption says so.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlbench.data.base.column import Column
from rlbench.data.record.history import History, is_number
from rlbench.errors import DataError
from rlbench.notebook.base.inert import one_line
from rlbench.notebook.base.sparkline import blocks, sparkline
from rlbench.notebook.base.units import labelled
from rlbench.notebook.charts.chart import Bars, Chart, Line, Panel
from rlbench.notebook.charts.svg import INK, svg
from rlbench.units import format_number

TELLING = ("reward", "loss", "kl", "entropy", "clip_fraction", "grad_norm")
"""Drawn where no names are given, as far as a run has them."""
SPENT = {"tokens": "tokens", "seconds": "seconds/total"}
"""What can be on the horizontal axis beside the step: the sum, so far, of a metric."""
POINTS, LINES, BINS, SUMMARIES = 2400, 96, 60, 8
"""Points of a whole chart, lines it may have, bins of a histogram, distributions described in figures."""


def history_plot(
    history: History,
    names: Sequence[str] = (),
    *,
    x: str = "step",
    compare: Mapping[str, History] | None = None,
    smooth: float | None = None,
    name: str | None = None,
) -> Chart:
    """Metrics of one or more runs, a panel each; see `History.plot`."""
    own = name or "this"
    everyone = {own: history, **dict(compare or {})}
    for key, run in everyone.items():
        if not isinstance(run, History):
            raise DataError(f"compare: {key!r} is {type(run).__name__}; wanted a history, as in other.history")
    if own in (compare or {}):
        raise DataError(f"{own!r} stands for this run already: history.plot(…, name=…) gives it another name")
    runs = {_label(key): run for key, run in everyone.items()}
    if smooth is not None and not (is_number(smooth) and 1 < smooth < math.inf):
        raise DataError(f"smooth={smooth!r}: a span in steps above 1, or None for none")
    if x != "step" and x not in SPENT:
        raise DataError(f"x={x!r}: wanted 'step', {', '.join(map(repr, SPENT))}")
    if not any(len(run) for run in runs.values()):
        return Chart("", (), "No steps yet: session.train_step(batch) makes the first.")
    chosen = tuple(dict.fromkeys(names)) or _telling(runs)
    if len(chosen) * len(runs) > LINES:
        raise DataError(f"{len(chosen)} metrics of {len(runs)} runs are more than {LINES} lines: name fewer metrics")
    most = max(24, POINTS // (len(chosen) * len(runs) * (1 if smooth is None else 2)))
    whole = {metric: _lines(runs, metric, x, smooth) for metric in chosen}
    x_name = "step" if x == "step" else f"{x} trained"
    panels = tuple(
        Panel(_label(labelled(metric)), x_name, tuple(_thinned(line, most) for line in lines))
        for metric, lines in whole.items()
    )
    notes = [f"moving average over {smooth:g} steps, values faint"] if smooth else []
    longest = max(len(line.x) for lines in whole.values() for line in lines)
    if longest > most:
        notes.append(f"lines of up to {format_number(longest)} points show the extremes of {most // 2} stretches")
    title = f"{', '.join(map(_label, chosen))} over {x_name}"
    return Chart(title, panels, _lines_text(panels, len(runs) > 1), "\n".join(notes))


def column_plot(
    column: Column, *, compare: Mapping[str, Any] | None = None, bins: int | None = None, name: str | None = None
) -> Chart:
    """The distribution of one or more columns; see `Column.plot`."""
    own = name or column.name or "values"
    if own in (compare or {}):
        raise DataError(f"{own!r} stands for these values already: name= gives them another name")
    columns = {_label(own): _valued(column)}
    columns |= {_label(key): _column(key, given, column) for key, given in (compare or {}).items()}
    if len(columns) > LINES:
        raise DataError(f"{len(columns)} distributions are more than {LINES}: compare fewer")
    if bins is not None and (not isinstance(bins, int) or isinstance(bins, bool) or not 1 <= bins <= BINS):
        raise DataError(f"bins={bins!r}: a whole number from 1 to {BINS}")
    values = {key: _finite(key, one) for key, one in columns.items()}
    filled = {key: one for key, one in values.items() if len(one)}
    if not filled:
        return Chart("", (), f"No {own} yet: session.rollout(prompts) gives some.")
    edges = _edges(np.concatenate(list(filled.values())), bins)
    alone = len(columns) == 1
    drawn = tuple(
        _bars(key, columns[key], one, edges, alone, i) for i, (key, one) in enumerate(values.items()) if len(one)
    )
    named = column.name or own
    unit = f", {column.unit}" if column.unit else ""
    panel = Panel("rollouts" if alone else "share, %", named + unit, bars=drawn)
    lines = [f"{bars.name}: {blocks(bars.heights, floor=0)}" for bars in drawn]
    notes = [drawn[0].summary if alone else f"{bars.name}: {bars.summary}" for bars in drawn[:SUMMARIES]]
    notes += [f"{key}: no values" for key in values if key not in filled]
    return Chart(f"{named}{unit}", (panel,), "\n".join(lines), "\n".join(notes))


def lengths_picture(steps: Mapping[int, np.ndarray], edges: np.ndarray, note: str) -> str:
    """Response lengths of several steps as one SVG: the last of them as bars, those before it as outlines.

    Args:
        steps: step -> tokens of each of its responses.
        edges: of the bins.
        note: what is known of the last step, in words.
    """
    bars = tuple(
        Bars(f"step {step}", edges - 0.5, 100 * np.histogram(tokens, edges)[0] / len(tokens), "", hue=i)
        for i, (step, tokens) in enumerate(reversed(list(steps.items())))
    )
    panel = Panel(f"share of responses, % · {note}", "tokens", bars=bars)
    text = "\n".join(f"{one.name}: {blocks(one.heights, floor=0)}" for one in bars)
    return svg(Chart(f"response lengths at {bars[0].name}", (panel,), text), INK)


# -- lines


def _lines(runs: Mapping[str, History], metric: str, x: str, smooth: float | None) -> list[Line]:
    """The metric's line of every run that has it; DataError where none has."""
    lines = []
    for hue, (name, run) in enumerate(runs.items()):
        if metric not in run.names:
            continue
        across, up = _across(name, run, x), run.values(metric)
        kept = np.isfinite(up) & np.isfinite(across)
        if kept.any():
            across, up = across[kept], up[kept]
            lines.append(Line(name, across, up, None if smooth is None else moving_average(up, smooth), hue))
    if not lines:
        _refuse(runs, metric)
    return lines


def _across(name: str, run: History, x: str) -> np.ndarray:
    if x == "step":
        return run.values("step") if "step" in run.names else np.arange(1.0, len(run) + 1)
    if SPENT[x] not in run.names:
        raise DataError(f"x={x!r}: the steps of {name!r} do not say {SPENT[x]!r}; x='step' works")
    return np.nancumsum(run.values(SPENT[x]))


def moving_average(values: np.ndarray, span: float) -> np.ndarray:
    """Exponential moving average of `span` values: weight 2 / (span + 1) for each new one, unbiased at the start."""
    keep = 1 - 2 / (span + 1)
    total = weight = 0.0
    found = np.empty(len(values))
    for i, value in enumerate(values.tolist()):
        total, weight = total * keep + value, weight * keep + 1
        found[i] = total / weight
    return found


def _thinned(line: Line, most: int) -> Line:
    """At most `most` points: of each stretch of points the lowest and the highest, and both ends of the line."""
    if len(line.x) <= most:
        return line
    borders = np.linspace(0, len(line.x), most // 2).astype(int)
    kept = {0, len(line.x) - 1}
    for low, high in itertools.pairwise(borders):
        stretch = line.y[low:high]
        kept |= {int(low + stretch.argmin()), int(low + stretch.argmax())}
    rows = np.array(sorted(kept))
    return Line(line.name, line.x[rows], line.y[rows], None if line.trend is None else line.trend[rows], line.hue)


def _telling(runs: Mapping[str, History]) -> tuple[str, ...]:
    there = {metric for run in runs.values() for metric in run.names}
    found = tuple(metric for metric in TELLING if metric in there)
    return found or tuple(sorted(there - {"step", "version"}))[: len(TELLING)]


def _refuse(runs: Mapping[str, History], metric: str) -> None:
    """Say that no run has a metric to draw, with the nearest there is."""
    for run in runs.values():
        if len(run):
            run.values(metric)
    raise DataError(f"no run has a finite {metric!r} in any step: see history.names")


def _lines_text(panels: Sequence[Panel], several: bool) -> str:
    rows = [(f"{panel.y} · {line.name}" if several else panel.y, line) for panel in panels for line in panel.lines]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {sparkline(line.shown.tolist())}" for name, line in rows)


# -- distributions


def _column(name: str, given: Any, like: Column) -> Column:
    if isinstance(given, Column):
        return _valued(given)
    values = np.asarray(given)
    if values.ndim != 1 or values.dtype.kind not in "biuf":
        raise DataError(
            f"compare: {name!r} is {type(given).__name__}; wanted one number per completion, as in other.{like.name}"
        )
    return Column.of(values, like.name, like.unit)


def _valued(column: Column) -> Column:
    """The column without NaN: completions whose scoring failed have no reward."""
    missing = np.isnan(column)
    if not missing.any():
        return column
    cut = None if column.truncated is None else column.truncated[~missing]
    return Column.of(np.asarray(column)[~missing], column.name, column.unit, cut)


def _finite(name: str, column: Column) -> np.ndarray:
    values = np.asarray(column, np.float64).ravel()
    if not np.isfinite(values).all():
        raise DataError(f"{name!r}: value {int(np.flatnonzero(~np.isfinite(values))[0])} is not finite")
    return values


def _edges(values: np.ndarray, bins: int | None) -> np.ndarray:
    """Borders of the bins: around whole numbers where those are few, else by the values' spread."""
    low, high = float(values.min()), float(values.max())
    whole = bool((values == np.round(values)).all())
    if bins is None and whole and high - low < BINS:
        return np.arange(low - 0.5, high + 1.0)
    if high == low:
        return np.array([low - 0.5, low + 0.5])
    count = bins or min(BINS, max(8, math.ceil(2 * len(values) ** (1 / 3))))
    if whole:  # bins of equally many whole numbers: else a comb appears that the values do not have
        size = math.ceil((high - low + 1) / count)
        return low - 0.5 + size * np.arange(math.ceil((high - low + 1) / size) + 1)
    return np.linspace(low, high, count + 1)


def _bars(name: str, column: Column, values: np.ndarray, edges: np.ndarray, alone: bool, hue: int) -> Bars:
    heights = np.histogram(values, edges)[0].astype(float)
    cut = None
    if alone and column.truncated is not None:
        cut = np.histogram(values[column.truncated], edges)[0].astype(float)
    scaled = heights if alone else 100 * heights / len(values)
    return Bars(name, edges, scaled, column.described(), cut, hue)


def _label(name: str) -> str:
    """Make a name inert, and short enough to leave room for the others."""
    return one_line(name, 60)
