"""Curves over steps, drawn as one inline SVG and, for terminals and diffs, as text."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rlbench.notebook.chart_svg import DASHES
from rlbench.notebook.markup import box, escape
from rlbench.notebook.palette import HUES
from rlbench.notebook.sparkline import sparkline
from rlbench.units import format_number

WIDTH, HEIGHT = 560, 220
LEFT, RIGHT, TOP, BOTTOM = 44, 120, 24, 28


class Curves:
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
        points = {name: _points(values) for name, values in series.items()}
        self.series = {name: found for name, found in points.items() if found}
        self.y, self.x = y, x
        self.bounds = bounds or self._value_bounds()

    def __repr__(self) -> str:
        width = max((len(name) for name in self.series), default=0)
        lines = [f"{self.y} over {self.x}"] if self.y else []
        lines += [f"{name:<{width}}  {sparkline([v for _, v in points])}" for name, points in self.series.items()]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        lines = "".join(self._line(i, name, points) for i, (name, points) in enumerate(self.series.items()))
        label = escape(repr(self).replace("\n", "; "))
        return box(
            f'<svg role="img" aria-label="{label}" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
            f'style="max-width:100%;font-size:11px;fill:currentColor">{self._axes()}{lines}</svg>'
        )

    def _value_bounds(self) -> tuple[float, float]:
        values = [v for points in self.series.values() for _, v in points] or [0.0, 1.0]
        low, high = min(values), max(values)
        return (low, high) if high > low else (low - 0.5, high + 0.5)

    def _place(self, x: float, value: float) -> tuple[float, float]:
        ends = [p for points in self.series.values() for p, _ in points] or [0.0, 1.0]
        span = max(ends) - min(ends) or 1.0
        low, high = self.bounds
        across = LEFT + (x - min(ends)) / span * (WIDTH - LEFT - RIGHT)
        up = TOP + (1 - (min(max(value, low), high) - low) / (high - low)) * (HEIGHT - TOP - BOTTOM)
        return round(across, 1), round(up, 1)

    def _axes(self) -> str:
        low, high = self.bounds
        parts = []
        for k in range(5):
            value = low + (high - low) * k / 4
            _, up = self._place(0, value)
            parts.append(
                f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{up}" y2="{up}" stroke="currentColor" opacity=".15"/>'
                f'<text x="{LEFT - 6}" y="{up + 4}" text-anchor="end">{format_number(float(value))}</text>'
            )
        ends = [p for points in self.series.values() for p, _ in points] or [0.0]
        for x in sorted({min(ends), (min(ends) + max(ends)) / 2, max(ends)}):
            across, _ = self._place(x, low)
            parts.append(f'<text x="{across}" y="{HEIGHT - 10}" text-anchor="middle">{x:g}</text>')
        parts.append(f'<text x="{WIDTH - RIGHT + 8}" y="{HEIGHT - 10}" opacity=".7">{escape(self.x)}</text>')
        parts.append(f'<text x="{LEFT}" y="{TOP - 10}" opacity=".7">{escape(self.y)}</text>')
        return "".join(parts)

    def _line(self, i: int, name: str, points: list[tuple[float, float]]) -> str:
        hue, dash = HUES[i % len(HUES)].light, DASHES[i % len(DASHES)]
        placed = " ".join(f"{a},{b}" for a, b in (self._place(x, v) for x, v in points))
        key = TOP + 22 + 16 * i
        style = f'fill="none" stroke="{hue}" stroke-width="2" stroke-dasharray="{dash}"'
        return (
            f'<polyline points="{placed}" {style}/>'
            f'<line x1="{WIDTH - RIGHT + 8}" x2="{WIDTH - RIGHT + 28}" y1="{key}" y2="{key}" {style}/>'
            f'<text x="{WIDTH - RIGHT + 33}" y="{key + 4}">{escape(name)}</text>'
        )


def _points(values: Sequence[Any]) -> list[tuple[float, float]]:
    """Values as (x, value); what is not there (None) or not finite leaves a gap, as it has no place on the axis."""
    pairs = [v if isinstance(v, tuple) else (i + 1, v) for i, v in enumerate(values)]
    return [(float(x), float(v)) for x, v in pairs if v is not None and math.isfinite(v)]
