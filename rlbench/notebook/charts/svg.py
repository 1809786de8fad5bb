"""A chart as SVG: what stays of it where nothing interactive runs. Text is escaped, colours suit both themes."""

from __future__ import annotations

import base64
import math
from dataclasses import dataclass

import numpy as np

from rlbench.monitor.view import shortened
from rlbench.notebook.base.markup import box, escape
from rlbench.notebook.base.palette import VERMILLION, hue_of
from rlbench.notebook.charts.chart import Bars, Chart, Line, Panel
from rlbench.units import format_number

WIDTH, WIDE_HEIGHT, SMALL_HEIGHT = 680, 240, 150
LEFT, RIGHT, TOP, BOTTOM = 48, 14, 24, 24
KEY_HEIGHT, PER_LETTER = 20, 6.2
INK = "#808080"
"""Legible on white and on black: an image knows nothing of the text around it."""
DASHES = ("", "6 3", "2 3", "8 3 2 3")
TRUNCATED = f'fill="{VERMILLION.light}" fill-opacity=".3" stroke="{VERMILLION.light}"'
"""Also outlined, so that it differs without colour."""


@dataclass(frozen=True)
class Frame:
    """Where a panel lies in the drawing, in pixels, and which values its edges stand for."""

    left: float
    top: float
    width: float
    height: float
    x: tuple[float, float]
    y: tuple[float, float]

    def across(self, x: float | np.ndarray) -> np.ndarray:
        """Pixels from the left."""
        low, high = self.x
        return np.round(self.left + (np.asarray(x) - low) / (high - low) * self.width, 1)

    def up(self, y: float | np.ndarray) -> np.ndarray:
        """Pixels from the top; what lies beyond the edges is drawn at them."""
        low, high = self.y
        return np.round(self.top + np.clip(1 - (np.asarray(y) - low) / (high - low), 0, 1) * self.height, 1)

    def polyline(self, x: np.ndarray, y: np.ndarray, look: str) -> str:
        """A line through points."""
        points = " ".join(f"{a:g},{b:g}" for a, b in zip(self.across(x), self.up(y), strict=True))
        return f'<polyline points="{points}" {look}/>'


def page(chart: Chart) -> str:
    """The drawing as an image, with its caption, for an output cell."""
    caption = "\n".join(f'<div class="q">{escape(line)}</div>' for line in chart.caption.splitlines())
    if not chart.panels:
        return box(f'<div class="q">{escape(chart.text)}</div>', caption)
    return box(image(svg(chart), _label(chart), f'width="{WIDTH}" style="max-width:100%"'), caption)


def image(drawing: str, label: str, size: str) -> str:
    """An SVG as an image: GitHub, and JupyterLab in notebooks it does not trust, take inline drawings out."""
    data = base64.b64encode(drawing.encode()).decode()
    return f'<img alt="{label}" {size} src="data:image/svg+xml;base64,{data}"/>'


def svg(chart: Chart) -> str:
    """The drawing alone; its label is the chart's text."""
    columns = 1 if len(chart.panels) == 1 else 2
    wide, tall = WIDTH / columns, WIDE_HEIGHT if columns == 1 else SMALL_HEIGHT
    key, begin = _key(chart)
    height = begin + -(-len(chart.panels) // columns) * tall
    drawn = "".join(
        _panel(panel, (i % columns) * wide, begin + (i // columns) * tall, wide, tall)
        for i, panel in enumerate(chart.panels)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{_label(chart)}" color="{INK}" '
        f'viewBox="0 0 {WIDTH} {height:g}" width="{WIDTH}" height="{height:g}" font-family="system-ui, sans-serif" '
        f'style="max-width:100%;height:auto;font-size:11px;font-variant-numeric:tabular-nums" fill="currentColor">'
        f"{key}{drawn}</svg>"
    )


def _label(chart: Chart) -> str:
    return escape("; ".join(repr(chart).splitlines()))


def _panel(panel: Panel, left: float, top: float, width: float, height: float) -> str:
    frame = Frame(left + LEFT, top + TOP, width - LEFT - RIGHT, height - TOP - BOTTOM, *_bounds(panel))
    marks = "".join(_line(frame, line) for line in panel.lines)
    marks += "".join(_bars(frame, bars, outline=i > 0) for i, bars in enumerate(panel.bars))
    last = "" if len(panel.lines) != 1 else format_number(float(panel.lines[0].shown[-1]))
    return (
        f'<text x="{frame.left:g}" y="{top + 14:g}" font-weight="600">{escape(panel.y)}</text>'
        f'<text x="{frame.left + frame.width:g}" y="{top + 14:g}" text-anchor="end">{last}</text>'
        f"{_axes(frame, panel.x)}{marks}"
    )


def _bounds(panel: Panel) -> tuple[tuple[float, float], tuple[float, float]]:
    """Lowest and highest of x and of y, with some room; never of no width."""
    if panel.bars:
        across = np.concatenate([b.edges for b in panel.bars])
        high = max(float(b.heights.max()) for b in panel.bars)
        return (float(across.min()), float(across.max())), (0.0, 1.05 * high or 1.0)
    across, up = (np.concatenate([getattr(line, axis) for line in panel.lines]) for axis in ("x", "y"))
    return _widened(across, 0.0), panel.limits or _widened(up, 0.05)


def _widened(values: np.ndarray, room: float) -> tuple[float, float]:
    low, high = float(values.min()), float(values.max())
    spare = room * (high - low) if high > low else max(abs(low) * 0.1, 0.5)
    return low - spare, high + spare


def _axes(frame: Frame, name: str) -> str:
    right, bottom = frame.left + frame.width, frame.top + frame.height
    parts = []
    for value in ticks(*frame.y):
        up = frame.up(value)
        parts.append(
            f'<line x1="{frame.left:g}" x2="{right:g}" y1="{up}" y2="{up}" stroke="currentColor" opacity=".14"/>'
            f'<text x="{frame.left - 6:g}" y="{up + 4:g}" text-anchor="end">{format_number(float(value))}</text>'
        )
    for value in ticks(*frame.x):
        if frame.across(value) < right - PER_LETTER * (len(name) + 3):  # the name stands at the end
            place = f'x="{frame.across(value)}" y="{bottom + 14:g}" text-anchor="middle"'
            parts.append(f"<text {place}>{format_number(float(value))}</text>")
    parts.append(
        f'<line x1="{frame.left:g}" x2="{right:g}" y1="{bottom:g}" y2="{bottom:g}" stroke="currentColor" opacity=".4"/>'
        f'<text x="{right:g}" y="{bottom + 14:g}" text-anchor="end">{escape(name)}</text>'
    )
    return "".join(parts)


def ticks(low: float, high: float, least: int = 3) -> list[float]:
    """Round numbers from `low` to `high`, at least `least` of them, as far apart as possible (1, 2 or 5 times 10^n)."""
    size = 10.0 ** math.ceil(math.log10(high - low))
    while True:
        for step in (size, size / 2, size / 5):
            first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
            if last - first + 1 >= least:
                return [k * step + 0.0 for k in range(first, last + 1)]
        size /= 10


def _line(frame: Frame, line: Line) -> str:
    if len(line.x) == 1:
        return f'<circle cx="{frame.across(line.x[0])}" cy="{frame.up(line.y[0])}" r="3" fill="{hue_of(line.hue)}"/>'
    faint = "" if line.trend is None else frame.polyline(line.x, line.y, f'{_pen(line.hue, 1)} opacity=".3"')
    return faint + frame.polyline(line.x, line.shown, _pen(line.hue))


def _bars(frame: Frame, bars: Bars, outline: bool) -> str:
    if outline:
        return frame.polyline(*bars.outline(), _pen(bars.hue))
    whole, full = f'fill="{hue_of(bars.hue)}" fill-opacity=".75"', bars.stacked()[0]
    return "".join(
        _bar(frame, i, bars, 0.0, float(full[i]), whole)
        + _bar(frame, i, bars, float(full[i]), float(bars.heights[i]), TRUNCATED)
        for i in range(len(full))
    )


def _bar(frame: Frame, i: int, bars: Bars, low: float, high: float, look: str) -> str:
    """One piece of bar `i`."""
    if high <= low:
        return ""
    x0, x1, y0, y1 = *frame.across(bars.edges[i : i + 2]), *frame.up(np.array([high, low]))
    wide, tall = max(1.0, x1 - x0 - 1), max(0.5, y1 - y0)
    return f'<rect x="{x0 + 0.5:.1f}" y="{y0:.1f}" width="{wide:.1f}" height="{tall:.1f}" {look}/>'


def _key(chart: Chart) -> tuple[str, float]:
    """What the lines are called, once for all panels, in as many rows as they need; and how high that is."""
    names = chart.names if len(chart.names) > 1 else {}
    entries = [(shortened(n, 24), f'<line x1="0" x2="20" y1="10" y2="10" {_pen(hue)}/>') for n, hue in names.items()]
    if chart.truncated:
        entries.append(("truncated", f'<rect x="4" y="5" width="12" height="10" {TRUNCATED}/>'))
    parts, left, top = [], float(LEFT), 0.0
    for name, mark in entries:
        width = 44 + PER_LETTER * len(name)
        if left > LEFT and left + width > WIDTH:
            left, top = float(LEFT), top + KEY_HEIGHT
        parts.append(f'<g transform="translate({left:g} {top:g})">{mark}<text x="26" y="14">{escape(name)}</text></g>')
        left += width
    return "".join(parts), top + KEY_HEIGHT if entries else 0.0


def _pen(hue: int, width: float = 1.8) -> str:
    dash = DASHES[hue % len(DASHES)]
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    return f'fill="none" stroke="{hue_of(hue)}" stroke-width="{width:g}" stroke-linejoin="round"{dashed}'
