"""A chart as SVG: what stays of it where nothing interactive runs. Text is escaped, colours suit both themes."""

from __future__ import annotations

import base64
from dataclasses import dataclass

import numpy as np

from rlbench.monitor.view import shortened
from rlbench.notebook.base.markup import box, escape
from rlbench.notebook.base.palette import HUES
from rlbench.notebook.charts.chart import Bars, Chart, Line, Panel, outlined, ticks
from rlbench.units import format_number

WIDTH, WIDE_HEIGHT, SMALL_HEIGHT = 680, 240, 150
LEFT, RIGHT, TOP, BOTTOM = 48, 14, 24, 24
KEY_HEIGHT, PER_LETTER = 20, 6.2
INK = "#808080"
"""Legible on white and on black, for where the colour of the text around is not known."""
DASHES = ("", "6 3", "2 3", "8 3 2 3")


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


def page(chart: Chart) -> str:
    """The drawing as an image, with its caption, for an output cell."""
    caption = "\n".join(f'<div class="q">{escape(line)}</div>' for line in chart.caption.splitlines())
    if not chart.panels:
        return box(f'<div class="q">{escape(chart.text)}</div>', caption)
    return box(image(svg(chart, INK), _label(chart), f'width="{WIDTH}" style="max-width:100%"'), caption)


def image(drawing: str, label: str, size: str) -> str:
    """An SVG as an image: GitHub, and JupyterLab in notebooks it does not trust, take inline drawings out.

    Args:
        label: says in characters what it shows; escaped.
        size: attributes.
    """
    data = base64.b64encode(drawing.encode()).decode()
    return f'<img alt="{label}" {size} src="data:image/svg+xml;base64,{data}"/>'


def svg(chart: Chart, ink: str = "") -> str:
    """The drawing alone, in the colour of the text around it or in `ink`; its label is the chart's text."""
    columns = 1 if len(chart.panels) == 1 else 2
    rows = -(-len(chart.panels) // columns)
    cell = WIDTH / columns, WIDE_HEIGHT if columns == 1 else SMALL_HEIGHT
    key, begin = _key(chart)
    height = begin + rows * cell[1]
    drawn = "".join(
        _panel(panel, (i % columns) * cell[0], begin + (i // columns) * cell[1], *cell)
        for i, panel in enumerate(chart.panels)
    )
    own = f' color="{ink}"' if ink else ""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{_label(chart)}"{own} '
        f'viewBox="0 0 {WIDTH} {height:g}" width="{WIDTH}" height="{height:g}" font-family="system-ui, sans-serif" '
        f'style="max-width:100%;height:auto;font-size:11px;font-variant-numeric:tabular-nums" fill="currentColor">'
        f"{key}{drawn}</svg>"
    )


def _label(chart: Chart) -> str:
    return escape("; ".join(repr(chart).splitlines()))


def _panel(panel: Panel, left: float, top: float, width: float, height: float) -> str:
    frame = Frame(left + LEFT, top + TOP, width - LEFT - RIGHT, height - TOP - BOTTOM, *panel.bounds())
    marks = "".join(_line(frame, line) for line in panel.lines)
    marks += "".join(_bars(frame, bars, outline=i > 0) for i, bars in enumerate(panel.bars))
    last = "" if len(panel.lines) != 1 else format_number(float(panel.lines[0].shown[-1]))
    return (
        f'<text x="{frame.left:g}" y="{top + 14:g}" font-weight="600">{escape(panel.y)}</text>'
        f'<text x="{frame.left + frame.width:g}" y="{top + 14:g}" text-anchor="end">{last}</text>'
        f"{_axes(frame, panel.x)}{marks}"
    )


def _axes(frame: Frame, name: str) -> str:
    right, bottom = frame.left + frame.width, frame.top + frame.height
    parts = []
    for value in ticks(*frame.y, 3):
        up = frame.up(value)
        parts.append(
            f'<line x1="{frame.left:g}" x2="{right:g}" y1="{up}" y2="{up}" stroke="currentColor" opacity=".14"/>'
            f'<text x="{frame.left - 6:g}" y="{up + 4:g}" text-anchor="end">{format_number(float(value))}</text>'
        )
    for value in ticks(*frame.x, 3):
        if frame.across(value) < right - PER_LETTER * (len(name) + 3):  # the name stands at the end
            place = f'x="{frame.across(value)}" y="{bottom + 14:g}" text-anchor="middle"'
            parts.append(f"<text {place}>{format_number(float(value))}</text>")
    parts.append(
        f'<line x1="{frame.left:g}" x2="{right:g}" y1="{bottom:g}" y2="{bottom:g}" stroke="currentColor" opacity=".4"/>'
        f'<text x="{right:g}" y="{bottom + 14:g}" text-anchor="end">{escape(name)}</text>'
    )
    return "".join(parts)


def _line(frame: Frame, line: Line) -> str:
    if len(line.x) == 1:
        return (
            f'<circle cx="{frame.across(line.x[0])}" cy="{frame.up(line.y[0])}" r="3" fill="{_light(line.hue)}" '
            f'style="fill:{_hue(line.hue)}"/>'
        )
    faint = (
        ""
        if line.trend is None
        else f'<polyline points="{_points(frame, line.x, line.y)}" {_pen(line.hue, 1)} opacity=".3"/>'
    )
    return f'{faint}<polyline points="{_points(frame, line.x, line.shown)}" {_pen(line.hue, 1.8)}/>'


def _bars(frame: Frame, bars: Bars, outline: bool) -> str:
    if outline:
        return f'<polyline points="{_points(frame, *outlined(bars))}" {_pen(bars.hue, 1.8)}/>'
    cut = np.zeros_like(bars.heights) if bars.cut is None else bars.cut
    whole = bars.heights - cut
    return "".join(
        _bar(frame, bars.edges[i], bars.edges[i + 1], 0.0, float(whole[i]), bars.hue)
        + _bar(frame, bars.edges[i], bars.edges[i + 1], float(whole[i]), float(bars.heights[i]), None)
        for i in range(len(bars.heights))
    )


def _bar(frame: Frame, left: float, right: float, low: float, high: float, hue: int | None) -> str:
    """One piece of a bar; `hue=None`: the truncated one, which is also outlined, so that it differs without colour."""
    if high <= low:
        return ""
    x0, x1, y0, y1 = *frame.across(np.array([left, right])), *frame.up(np.array([high, low]))
    look = TRUNCATED if hue is None else f'fill="{_light(hue)}" fill-opacity=".75" style="fill:{_hue(hue)}"'
    wide, tall = max(1.0, x1 - x0 - 1), max(0.5, y1 - y0)
    return f'<rect x="{x0 + 0.5:.1f}" y="{y0:.1f}" width="{wide:.1f}" height="{tall:.1f}" {look}/>'


def _key(chart: Chart) -> tuple[str, float]:
    """What the lines are called, once for all panels, in as many rows as they need; and how high that is."""
    entries = [
        (shortened(name, 24), f'<line x1="0" x2="20" y1="10" y2="10" {_pen(hue, 1.8)}/>')
        for name, hue in chart.names.items()
        if len(chart.names) > 1
    ]
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


def _pen(hue: int, width: float) -> str:
    dash = DASHES[hue % len(DASHES)]
    return (
        f'fill="none" stroke="{_light(hue)}" stroke-width="{width:g}" stroke-linejoin="round"'
        + (f' stroke-dasharray="{dash}"' if dash else "")
        + f' style="stroke:{_hue(hue)}"'
    )


def _hue(hue: int) -> str:
    return f"var(--rlb-hue-{hue % len(HUES)},{_light(hue)})"


def _light(hue: int) -> str:
    return HUES[hue % len(HUES)].light


TRUNCATED = f'fill="{_light(1)}" fill-opacity=".3" stroke="{_light(1)}" style="fill:{_hue(1)};stroke:{_hue(1)}"'


def _points(frame: Frame, x: np.ndarray, y: np.ndarray) -> str:
    return " ".join(f"{a:g},{b:g}" for a, b in zip(frame.across(x), frame.up(y), strict=True))
