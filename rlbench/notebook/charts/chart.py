"""A chart: what is drawn, as plain values, and its three forms: interactive, drawn, and as text.

JupyterLab shows the plotly form; where a notebook is only read (GitHub, nbconvert, no extension) the drawing in
`text/html` is shown; a terminal and a diff get the text. All three say the same numbers.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

PLOTLY = "application/vnd.plotly.v1+json"


@dataclass(frozen=True, eq=False)
class Line:
    """One run's values: `x`, `y` and, where smoothed, `trend`, each (points,) and finite; `hue`: which colour."""

    name: str
    x: np.ndarray
    y: np.ndarray
    trend: np.ndarray | None = None
    hue: int = 0

    @property
    def shown(self) -> np.ndarray:
        """What a reader is to follow: the trend, where there is one."""
        return self.y if self.trend is None else self.trend


@dataclass(frozen=True, eq=False)
class Bars:
    """A histogram: `heights` (bins,) between `edges` (bins + 1,), of which `cut` (bins,) were truncated."""

    name: str
    edges: np.ndarray
    heights: np.ndarray
    summary: str
    cut: np.ndarray | None = None
    hue: int = 0


@dataclass(frozen=True, eq=False)
class Panel:
    """One pair of axes: lines over `x`, or bars (the first filled, the others as outlines).

    `limits`: of the vertical axis, in place of those of the values.
    """

    y: str
    x: str
    lines: tuple[Line, ...] = ()
    bars: tuple[Bars, ...] = ()
    limits: tuple[float, float] | None = None

    def bounds(self) -> tuple[tuple[float, float], tuple[float, float]]:
        """Lowest and highest of x and of y, with some room; never of no width."""
        if self.bars:
            across = np.concatenate([b.edges for b in self.bars])
            high = max(float(b.heights.max()) for b in self.bars)
            return (float(across.min()), float(across.max())), (0.0, 1.05 * high or 1.0)
        across = np.concatenate([line.x for line in self.lines])
        up = np.concatenate([line.y for line in self.lines])
        return _widened(across, 0.0), self.limits or _widened(up, 0.05)


@dataclass(frozen=True, eq=False)
class Chart:
    """Panels with a title and a caption. `.figure` is the plotly figure, to be changed or written elsewhere.

    `text`: the same for a reader without pictures. `caption`: lines that say what was left out or computed.
    """

    title: str
    panels: tuple[Panel, ...]
    text: str
    caption: str = ""

    @cached_property
    def figure(self) -> Any:
        """The chart as a `plotly.graph_objects.Figure`."""
        from rlbench.notebook.charts.plotly import figure

        return figure(self)

    @property
    def svg(self) -> str:
        """The chart as one SVG element, in colours that are legible on light and dark ground."""
        from rlbench.notebook.charts.svg import svg

        return svg(self)

    @property
    def names(self) -> dict[str, int]:
        """What is drawn, by name, with its hue."""
        lines = {line.name: line.hue for panel in self.panels for line in panel.lines}
        return lines | {bars.name: bars.hue for panel in self.panels for bars in panel.bars}

    @property
    def truncated(self) -> bool:
        """Whether some bars have a truncated part, which the key then has to name."""
        return any(b.cut is not None and bool(b.cut.any()) for panel in self.panels for b in panel.bars)

    def __repr__(self) -> str:
        return "\n".join(filter(None, [self.title, self.text, self.caption]))

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        from rlbench.notebook.charts.svg import page

        bundle = {"text/plain": repr(self), "text/html": page(self)}
        if self.panels:
            drawn = json.loads(self.figure.to_json(validate=False))
            bundle[PLOTLY] = drawn | {"config": {"displaylogo": False, "responsive": True}}
        return bundle


def outlined(bars: Bars) -> tuple[np.ndarray, np.ndarray]:
    """The outline of a histogram as x and y, from the ground up and down to it."""
    return np.repeat(bars.edges, 2), np.concatenate([[0.0], np.repeat(bars.heights, 2), [0.0]])


def ticks(low: float, high: float, least: int = 3) -> list[float]:
    """Round numbers from `low` to `high`, at least `least` of them, as far apart as possible (1, 2 or 5 times 10^n)."""
    size = 10.0 ** math.ceil(math.log10(high - low))
    while True:
        for step in (size, size / 2, size / 5):
            first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
            if last - first + 1 >= least:
                return [k * step + 0.0 for k in range(first, last + 1)]
        size /= 10


def _widened(values: np.ndarray, room: float) -> tuple[float, float]:
    low, high = float(values.min()), float(values.max())
    if high <= low:
        half = max(abs(low) * 0.1, 0.5)
        return low - half, high + half
    return low - room * (high - low), high + room * (high - low)
