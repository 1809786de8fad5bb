"""What `history.plot()` and `rollouts.lengths.plot()` draw, bounded, so that a saved notebook stays small."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rlbench.data.base.column import Column
from rlbench.data.record.history import History, is_number
from rlbench.data.record.metric_names import is_evaluated_reward
from rlbench.errors import DataError
from rlbench.notebook.base.figures import blocks, labelled
from rlbench.notebook.base.markup import one_line
from rlbench.notebook.charts.chart import Bars, Chart, Line, Panel, lines_text
from rlbench.notebook.charts.svg import svg
from rlbench.units import format_number

TELLING = ("reward", "loss", "kl", "entropy", "clip_fraction", "grad_norm")
"""Drawn where no names are given, as far as a run has them; behind them the rewards of evaluations."""
SPENT = {"tokens": "tokens", "seconds": "seconds/total"}
"""What can be on the horizontal axis beside the step: the sum, so far, of a metric."""
EVALUATED, POINTS, LINES, BINS, SUMMARIES = 6, 2400, 96, 60, 8
"""Evaluations among what is drawn where no names are given, points of a whole chart, lines it may have, bins of a
histogram, distributions described in figures."""


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
    shown = {f"{p.y} · {line.name}" if len(runs) > 1 else p.y: line for p in panels for line in p.lines}
    return Chart(title, panels, lines_text(shown), "\n".join(notes))


def column_plot(
    column: Column, *, compare: Mapping[str, Any] | None = None, bins: int | None = None, name: str | None = None
) -> Chart:
    """The distribution of one or more columns; see `Column.plot`."""
    own = name or column.name or "values"
    if own in (compare or {}):
        raise DataError(f"{own!r} stands for these values already: name= gives them another name")
    columns = {_label(key): _column(key, one, column) for key, one in ({own: column} | dict(compare or {})).items()}
    if len(columns) > LINES:
        raise DataError(f"{len(columns)} distributions are more than {LINES}: compare fewer")
    if bins is not None and (not isinstance(bins, int) or isinstance(bins, bool) or not 1 <= bins <= BINS):
        raise DataError(f"bins={bins!r}: a whole number from 1 to {BINS}")
    filled = [np.asarray(one, np.float64) for one in columns.values() if len(one)]
    if not filled:
        return Chart("", (), f"No {own} yet: session.rollout(prompts) gives some.")
    edges = _edges(np.concatenate(filled), bins)
    alone = len(columns) == 1
    drawn = tuple(_bars(key, one, edges, alone, i) for i, (key, one) in enumerate(columns.items()) if len(one))
    named = column.name or own
    unit = f", {column.unit}" if column.unit else ""
    panel = Panel("rollouts" if alone else "share, %", named + unit, bars=drawn)
    lines = [f"{bars.name}: {blocks(bars.heights, floor=0)}" for bars in drawn]
    notes = [drawn[0].summary if alone else f"{bars.name}: {bars.summary}" for bars in drawn[:SUMMARIES]]
    notes += [f"{key}: no values" for key, one in columns.items() if not len(one)]
    return Chart(f"{named}{unit}", (panel,), "\n".join(lines), "\n".join(notes))


def reliability_plot(evaluation: Any) -> Chart:
    """Accuracy over confidence of a reward model's pairs, beside the diagonal; see `PairEvaluation.reliability`."""
    bins = evaluation.reliability
    at = np.array([b.confidence for b in bins])
    seen = Line("accuracy", at, np.array([b.accuracy for b in bins]))
    ideal = Line("calibrated", np.array([0.5, 1.0]), np.array([0.5, 1.0]), hue=1)
    panel = Panel("accuracy", "confidence", (seen, ideal), limits=(0.0, 1.0))
    lines = [
        f"confidence {b.confidence:.2f}: accuracy {b.accuracy:.2f} of {format_number(b.pairs)} pairs" for b in bins
    ]
    return Chart("accuracy over confidence", (panel,), "\n".join(lines))


def lengths_picture(steps: Mapping[int, np.ndarray], edges: np.ndarray, note: str) -> str:
    """Response lengths of several steps, step -> tokens of each, as one SVG: the last as bars, others as outlines."""
    bars = tuple(
        Bars(f"step {step}", edges - 0.5, 100 * np.histogram(tokens, edges)[0] / len(tokens), hue=i)
        for i, (step, tokens) in enumerate(reversed(list(steps.items())))
    )
    panel = Panel(f"share of responses, % · {note}", "tokens", bars=bars)
    text = "\n".join(f"{one.name}: {blocks(one.heights, floor=0)}" for one in bars)
    return svg(Chart(f"response lengths at {bars[0].name}", (panel,), text))


def _lines(runs: Mapping[str, History], metric: str, x: str, smooth: float | None) -> list[Line]:
    """The metric's line of every run that has it; DataError where none has."""
    lines = []
    for hue, (name, run) in enumerate(runs.items()):
        if metric not in run.names:
            continue
        across, up = _across(name, run, x), run.values(metric)
        if metric in run.begin:
            across, up = np.append(0.0, across), np.append(run.begin[metric], up)
        finite = np.isfinite(up) & np.isfinite(across)
        if finite.any():
            across, up = across[finite], up[finite]
            lines.append(Line(name, across, up, None if smooth is None else moving_average(up, smooth), hue))
    if not lines:
        for run in filter(len, runs.values()):
            run.values(metric)  # names the nearest there is
        raise DataError(f"no run has a finite {metric!r} in any step: see history.names")
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
    return replace(line, x=line.x[rows], y=line.y[rows], trend=None if line.trend is None else line.trend[rows])


def _telling(runs: Mapping[str, History]) -> tuple[str, ...]:
    there = {metric for run in runs.values() for metric in run.names}
    evaluated = sorted(metric for metric in there if is_evaluated_reward(metric))[:EVALUATED]
    found = (*(metric for metric in TELLING if metric in there), *evaluated)
    return found or tuple(sorted(there - {"step", "version"}))[: len(TELLING)]


def _column(name: str, given: Any, like: Column) -> Column:
    """The column without NaN: completions whose scoring failed have no reward."""
    values = np.asarray(given)
    if values.ndim != 1 or values.dtype.kind not in "biuf":
        wanted = f"one number per completion, as in other.{like.name}"
        raise DataError(f"compare: {name!r} is {type(given).__name__}; wanted {wanted}")
    known = ~np.isnan(values)
    if np.isinf(values).any():
        raise DataError(f"{name!r}: value {int(np.flatnonzero(np.isinf(values))[0])} is not finite")
    if not isinstance(given, Column):
        return Column.of(values[known], like.name, like.unit)
    return Column.of(values[known], given.name, given.unit, None if given.truncated is None else given.truncated[known])


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


def _bars(name: str, column: Column, edges: np.ndarray, alone: bool, hue: int) -> Bars:
    values, cut = np.asarray(column), None
    heights = np.histogram(values, edges)[0].astype(float)
    if alone and column.truncated is not None:
        cut = np.histogram(values[column.truncated], edges)[0].astype(float)
    return Bars(name, edges, heights if alone else 100 * heights / len(values), column.described(), cut, hue)


def _label(name: str) -> str:
    """Make a name inert, and short enough to leave room for the others."""
    return one_line(name, 60)
