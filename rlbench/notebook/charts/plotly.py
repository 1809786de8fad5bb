"""A chart as a plotly figure: transparent ground, mid-grey text and grid, so that it suits light and dark themes."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlbench.notebook.base.palette import HUES, VERMILLION
from rlbench.notebook.charts.chart import Bars, Chart, Line, outlined
from rlbench.notebook.charts.svg import INK

GRID = "rgba(128,128,128,0.25)"
WIDTH = 860
"""Fixed: plotly cannot find the width of an output that is out of view, and JupyterLab takes those out of the page."""
WIDE_HEIGHT, SMALL_HEIGHT, LINE_HEIGHT = 340, 210, 16
DASHES = ("solid", "dash", "dot", "dashdot")
DIGITS = 6
LOOKALIKES = str.maketrans("<>&", "‹›＆")


def figure(chart: Chart) -> Any:
    """The figure; panels in two columns, zoomed together along x."""
    from plotly.subplots import make_subplots

    columns = 1 if len(chart.panels) <= 1 else 2
    rows = max(1, -(-len(chart.panels) // columns))
    made = make_subplots(rows, columns, horizontal_spacing=0.09, vertical_spacing=0.32 / rows)
    for i, panel in enumerate(chart.panels):
        place = {"row": i // columns + 1, "col": i % columns + 1}
        named = i == _fullest(chart)
        for line in panel.lines:
            made.add_traces(_line(line, named), place["row"], place["col"])
        for k, bars in enumerate(panel.bars):
            made.add_traces(_bars(bars, k > 0, named), place["row"], place["col"])
        made.update_xaxes(title_text=inert(panel.x), matches="x", showgrid=False, showline=True, **place)
        made.update_yaxes(gridcolor=GRID, range=panel.limits, **place)
        axis = "" if i == 0 else str(i + 1)  # over the panel: plotly cannot turn a title that is out of view
        made.add_annotation(
            text=inert(panel.y),
            x=0,
            y=1,
            xref=f"x{axis} domain",
            yref=f"y{axis} domain",
            yshift=4,
            xanchor="left",
            yanchor="bottom",
            showarrow=False,
            font_weight=600,
        )
    axes = {"zeroline": False, "linecolor": GRID, "ticks": "", "automargin": True, "title_standoff": 4}
    made.update_xaxes(**axes)
    made.update_yaxes(**axes)
    height = WIDE_HEIGHT if columns == 1 else SMALL_HEIGHT * rows + 50
    made.update_layout(
        template="none",
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        width=WIDTH,
        height=height,
        font={"color": INK, "size": 12},
        margin={"l": 56, "r": 16, "t": 52, "b": 44},
        bargap=0.04,
        barmode="stack",
        legend={
            "orientation": "h",
            "x": 0,
            "y": 1.0,
            "yref": "container",
            "yanchor": "top",
            "bgcolor": "rgba(0,0,0,0)",
            "traceorder": "normal",
        },
        showlegend=len(chart.names) > 1 or chart.truncated,
        hovermode="x unified" if _lines(chart) else "closest",
        hoverlabel={"font": {"color": "#222222"}, "bgcolor": "#f4f4f4"},
        modebar={"bgcolor": "rgba(0,0,0,0)", "color": INK, "activecolor": HUES[0].light},
        colorway=[hue.light for hue in HUES],
    )
    if chart.caption:
        lines = inert(chart.caption).splitlines()
        room = LINE_HEIGHT * len(lines) + 6
        made.update_layout(height=height + room, margin_b=44 + room)
        made.add_annotation(
            text="<br>".join(lines),
            x=0,
            y=0,
            xref="paper",
            yref="paper",
            yshift=-46,
            yanchor="top",
            xanchor="left",
            align="left",
            showarrow=False,
            font_size=11,
        )
    return made


def _line(line: Line, named: bool) -> list[Any]:
    from plotly import graph_objects as go

    look = {"color": HUES[line.hue % len(HUES)].light, "width": 2, "dash": DASHES[line.hue % len(DASHES)]}
    name = inert(line.name)
    mode = "lines" if len(line.x) > 1 else "markers"
    common = {"name": name, "legendgroup": name, "x": _numbers(line.x), "mode": mode}
    main = go.Scatter(y=_numbers(line.shown), line=look, showlegend=named, **common)
    if line.trend is None:
        return [main]
    thin = look | {"width": 1, "dash": "solid"}
    return [go.Scatter(y=_numbers(line.y), line=thin, opacity=0.35, showlegend=False, hoverinfo="skip", **common), main]


def _bars(bars: Bars, outline: bool, named: bool) -> list[Any]:
    from plotly import graph_objects as go

    color = HUES[bars.hue % len(HUES)].light
    named_as = {"name": inert(bars.name), "legendrank": bars.hue, "showlegend": named}
    if outline:
        look = {"color": color, "width": 2, "dash": DASHES[bars.hue % len(DASHES)]}
        across, up = outlined(bars)
        return [go.Scatter(x=_numbers(across), y=_numbers(up), mode="lines", line=look, **named_as)]
    cut = np.zeros_like(bars.heights) if bars.cut is None else bars.cut
    place = {"x": _numbers((bars.edges[:-1] + bars.edges[1:]) / 2), "width": _numbers(np.diff(bars.edges))}
    whole = _numbers(bars.heights - cut)
    made = [go.Bar(y=whole, marker={"color": color, "opacity": 0.75}, **named_as, **place)]
    if cut.any():
        pattern = {"shape": "/", "size": 6, "solidity": 0.3}
        look = {"color": VERMILLION.light, "pattern": pattern}
        made.append(go.Bar(y=_numbers(cut), marker=look, **(named_as | {"name": "truncated"}), **place))
    return made


def inert(text: str) -> str:
    """`text` without what plotly takes for markup or entities: it reads both, and some of it more than once."""
    return text.translate(LOOKALIKES)


def _fullest(chart: Chart) -> int:
    """The panel whose lines are named in the key: a metric may be missing in a run."""
    return max(range(len(chart.panels)), key=lambda i: len(chart.panels[i].lines))


def _lines(chart: Chart) -> bool:
    return any(panel.lines for panel in chart.panels)


def _numbers(values: np.ndarray) -> list[float]:
    """Plain numbers of few digits: a saved notebook holds them as text."""
    return [float(f"{value:.{DIGITS}g}") for value in np.asarray(values, float).tolist()]
