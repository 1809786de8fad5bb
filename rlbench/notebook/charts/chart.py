"""A chart, as plain values, and its forms: interactive, drawn for where a notebook is only read, and text."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from rlbench.notebook.base.figures import sparkline

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
    summary: str = ""
    cut: np.ndarray | None = None
    hue: int = 0

    def outline(self) -> tuple[np.ndarray, np.ndarray]:
        """x and y of its outline, from the ground up and down to it."""
        return np.repeat(self.edges, 2), np.concatenate([[0.0], np.repeat(self.heights, 2), [0.0]])

    def stacked(self) -> tuple[np.ndarray, np.ndarray]:
        """Heights of what is whole and of what was truncated."""
        cut = np.zeros_like(self.heights) if self.cut is None else self.cut
        return self.heights - cut, cut


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


@dataclass(frozen=True, eq=False)
class Chart:
    """Panels with a title, and as `text` for a reader without pictures; `caption`: what was left out or computed."""

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
        return any(bool(b.stacked()[1].any()) for panel in self.panels for b in panel.bars)

    def __repr__(self) -> str:
        return "\n".join(filter(None, [self.title, self.text, self.caption]))

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        from rlbench.notebook.charts.svg import page

        bundle = {"text/plain": repr(self), "text/html": page(self)}
        if self.panels:
            drawn = json.loads(self.figure.to_json(validate=False))
            bundle[PLOTLY] = drawn | {"config": {"displaylogo": False, "responsive": True}}
        return bundle


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
        lines: list[Line] = []
        for name, values in series.items():
            pairs = [v if isinstance(v, tuple) else (i + 1, v) for i, v in enumerate(values)]
            points = [(float(at), float(v)) for at, v in pairs if v is not None and math.isfinite(v)]
            if points:
                across, up = np.array(points).T
                lines.append(Line(name, across, up, hue=len(lines)))
        panels = (Panel(y, x, tuple(lines), limits=bounds),) if lines else ()
        super().__init__(f"{y} over {x}" if y else "", panels, lines_text({line.name: line for line in lines}))


def lines_text(lines: Mapping[str, Line]) -> str:
    """Each line by name as blocks, with its first and last value."""
    width = max(map(len, lines), default=0)
    return "\n".join(f"{name:<{width}}  {sparkline(line.shown.tolist())}" for name, line in lines.items())
