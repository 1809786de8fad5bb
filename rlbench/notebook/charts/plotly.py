"""A chart as a plotly figure: transparent ground, mid-grey text and grid, so that it suits light and dark themes."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlbench.notebook.base.palette import HUES, VERMILLION, hue_of
from rlbench.notebook.charts.chart import Bars, Chart, Line
from rlbench.notebook.charts.svg import INK

GRID, NONE = "rgba(128,128,128,0.25)", "rgba(0,0,0,0)"
WIDTH = 860
"""Fixed: plotly cannot find the width of an output that is out of view, and JupyterLab takes those out of the page."""
WIDE_HEIGHT, SMALL_HEIGHT, LINE_HEIGHT = 340, 210, 16
DASHES = ("solid", "dash", "dot", "dashdot")
DIGITS = 6
LOOKALIKES = str.maketrans("<>&", "‹›＆")
LEGEND = {"orientation": "h", "x": 0, "y": 1.0, "yref": "container", "yanchor": "top", "traceorder": "normal"}
TEXT = {"x": 0, "xanchor": "left", "align": "left", "showarrow": False}


def figure(chart: Chart) -> Any:
    """The figure; panels in two columns, zoomed together along x."""
    from plotly.subplots import make_subplots

    columns = 1 if len(chart.panels) <= 1 else 2
    rows = max(1, -(-len(chart.panels) // columns))
    made = make_subplots(rows, columns, horizontal_spacing=0.09, vertical_spacing=0.32 / rows)
    fullest = max(chart.panels, key=lambda panel: len(panel.lines))  # names the lines: a metric may be missing in a run
    for i, panel in enumerate(chart.panels):
        place = {"row": i // columns + 1, "col": i % columns + 1}
        traces = [trace for line in panel.lines for trace in _line(line, panel is fullest)]
        traces += [trace for k, bars in enumerate(panel.bars) for trace in _bars(bars, k > 0, panel is fullest)]
        made.add_traces(traces, *([value] * len(traces) for value in place.values()))
        made.update_xaxes(title_text=inert(panel.x), matches="x", showgrid=False, showline=True, **place)
        made.update_yaxes(gridcolor=GRID, range=panel.limits, **place)
        axis = "" if i == 0 else str(i + 1)  # over the panel: plotly cannot turn a title that is out of view
        own = {"xref": f"x{axis} domain", "yref": f"y{axis} domain", "y": 1, "yshift": 4, "yanchor": "bottom"}
        made.add_annotation(text=inert(panel.y), font_weight=600, **own, **TEXT)
    axes = {"zeroline": False, "linecolor": GRID, "ticks": "", "automargin": True, "title_standoff": 4}
    made.update_xaxes(**axes)
    made.update_yaxes(**axes)
    lines = inert(chart.caption).splitlines()
    room = LINE_HEIGHT * len(lines) + 6 if lines else 0
    made.update_layout(
        template="none",
        paper_bgcolor=NONE,
        plot_bgcolor=NONE,
        width=WIDTH,
        height=room + (WIDE_HEIGHT if columns == 1 else SMALL_HEIGHT * rows + 50),
        font={"color": INK, "size": 12},
        margin={"l": 56, "r": 16, "t": 52, "b": 44 + room},
        bargap=0.04,
        barmode="stack",
        legend=LEGEND,
        showlegend=len(chart.names) > 1 or chart.truncated,
        hovermode="x unified" if any(panel.lines for panel in chart.panels) else "closest",
        hoverlabel={"font": {"color": "#222222"}, "bgcolor": "#f4f4f4"},
        modebar={"bgcolor": NONE, "color": INK, "activecolor": hue_of(0)},
        colorway=[hue.light for hue in HUES],
    )
    if lines:
        paper = {"xref": "paper", "yref": "paper", "y": 0, "yshift": -46, "yanchor": "top"}
        made.add_annotation(text="<br>".join(lines), font_size=11, **paper, **TEXT)
    return made


def _line(line: Line, named: bool) -> list[Any]:
    from plotly import graph_objects as go

    look, name = _pen(line.hue), inert(line.name)
    mode = "lines" if len(line.x) > 1 else "markers"
    common = {"name": name, "legendgroup": name, "x": _numbers(line.x), "mode": mode}
    main = go.Scatter(y=_numbers(line.shown), line=look, showlegend=named, **common)
    if line.trend is None:
        return [main]
    thin = look | {"width": 1, "dash": "solid"}
    return [go.Scatter(y=_numbers(line.y), line=thin, opacity=0.35, showlegend=False, hoverinfo="skip", **common), main]


def _bars(bars: Bars, outline: bool, named: bool) -> list[Any]:
    from plotly import graph_objects as go

    named_as = {"name": inert(bars.name), "legendrank": bars.hue, "showlegend": named}
    if outline:
        across, up = map(_numbers, bars.outline())
        return [go.Scatter(x=across, y=up, mode="lines", line=_pen(bars.hue), **named_as)]
    whole, cut = bars.stacked()
    place = {"x": _numbers((bars.edges[:-1] + bars.edges[1:]) / 2), "width": _numbers(np.diff(bars.edges))}
    made = [go.Bar(y=_numbers(whole), marker={"color": hue_of(bars.hue), "opacity": 0.75}, **named_as, **place)]
    if cut.any():
        look = {"color": VERMILLION.light, "pattern": {"shape": "/", "size": 6, "solidity": 0.3}}
        made.append(go.Bar(y=_numbers(cut), marker=look, **(named_as | {"name": "truncated"}), **place))
    return made


def inert(text: str) -> str:
    """`text` without what plotly takes for markup or entities: it reads both, and some of it more than once."""
    return text.translate(LOOKALIKES)


def _pen(hue: int) -> dict[str, Any]:
    return {"color": hue_of(hue), "width": 2, "dash": DASHES[hue % len(DASHES)]}


def _numbers(values: np.ndarray) -> list[float]:
    """Plain numbers of few digits: a saved notebook holds them as text."""
    return [float(f"{value:.{DIGITS}g}") for value in np.asarray(values, float).tolist()]
