"""Curves over steps as a chart, from plain numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlbench.notebook.base.sparkline import sparkline
from rlbench.notebook.charts.chart import Chart, Line, Panel


class Curves(Chart):
    """One line per name over a common horizontal axis.

    Args:
        series: name -> values, or name -> list of (x, value). None and NaN leave a gap.
        y, x: what the axes show.
        bounds: of the vertical axis; default: those of the values.
    """

    def __init__(
        self,
        series: Mapping[str, Sequence[float] | Sequence[tuple[float, float]]],
        y: str = "",
        x: str = "step",
        bounds: tuple[float, float] | None = None,
    ) -> None:
        points = {name: found for name, values in series.items() if (found := _points(values))}
        columns = {name: np.array(found).T for name, found in points.items()}
        lines = tuple(Line(name, at, values, hue=i) for i, (name, (at, values)) in enumerate(columns.items()))
        width = max(map(len, points), default=0)
        text = [f"{name:<{width}}  {sparkline([v for _, v in found])}" for name, found in points.items()]
        panels = (Panel(y, x, lines, limits=bounds),) if lines else ()
        super().__init__(f"{y} over {x}" if y else "", panels, "\n".join(text))


def _points(values: Sequence[Any]) -> list[tuple[float, float]]:
    """Values as (x, value), without what is missing (None) or not finite: it has no place on the axis."""
    pairs = [v if isinstance(v, tuple) else (i + 1, v) for i, v in enumerate(values)]
    return [(float(x), float(v)) for x, v in pairs if v is not None and math.isfinite(v)]
