"""The dashboard as it stays in a saved notebook: numbers, and small drawings of memory and lengths. No script."""

from __future__ import annotations

import time as clock
from collections.abc import Sequence

import numpy as np

from rlbench.monitor.schema import english
from rlbench.monitor.view import PART_NAMES
from rlbench.notebook.base.figures import blocks, sparkline
from rlbench.notebook.base.markup import box, escape
from rlbench.notebook.base.palette import BLUE, GREY, OWNERS
from rlbench.notebook.cards.card import WARNING, Cell, Grid, Markup
from rlbench.notebook.charts.svg import image
from rlbench.notebook.dashboard.data import DashboardView, Json
from rlbench.notebook.dashboard.memory import Lane, Memory, seen_and_thin
from rlbench.units import MIB, format_age, format_bytes, format_number, format_percent, format_rate

MOMENTS = 80
LANE_WIDTH, LANE_HEIGHT = 380, 32
BARS_WIDTH, BARS_HEIGHT = 240, 80


def snapshot(view: DashboardView, memory: Memory, at: float) -> str:
    """The session at time `at` (Unix seconds) as HTML."""
    when = clock.strftime("%Y-%m-%d %H:%M:%S", clock.localtime(at))
    head = (
        f"<div><b>rlbench</b> · {escape(view.name)} <span class=q>{escape(view.model)}</span> &nbsp; step {view.step}"
        f" · v{view.version} · {escape(view.phase)} &nbsp; <span class=q>as of {when}</span></div>"
    )
    error = f"<div class=w>⚠ {escape(view.error)}</div>" if view.error else ""
    engines = _engines(view).html() if view.engines else "<div class=q>No engines yet.</div>"
    split = "" if view.split is None else f"<div>{escape(split_line(view.split))}</div>"
    return box(head, error, engines, _memory(memory), _lengths(view.lengths), _metrics(view), split)


def text(view: DashboardView) -> str:
    """The same in a few lines of plain text."""
    lines = [f"rlbench · {view.name} ({view.model})   step {view.step} · v{view.version} · {view.phase}"]
    lines += [_engines(view).text()] if view.engines else []
    lines += [f"lengths    {lengths_line(view.lengths[-1])}"] if view.lengths else []
    known = [f"{c['label']} {format_number(c['points'][-1][1])}" for c in view.curves if c["points"]]
    lines += [" · ".join(known)] if known else []
    lines += [split_line(view.split)] if view.split is not None else []
    return "\n".join(lines)


def lengths_line(lengths: Json) -> str:
    """`64 samples · p50 118 · p90 402 · max 512 · truncated 6 %`"""
    said = [f"{name} {lengths[name]:,.0f}" for name in ("p50", "p90", "max") if lengths[name] is not None]
    cut = [] if lengths["truncated"] is None else [f"truncated {format_percent(lengths['truncated'])}"]
    return " · ".join([f"{lengths['samples']} samples", *said, *cut])


def split_line(split: Json) -> str:
    """`step 1.9 s = rollout 0.9 · score 0.0 · train 0.8 · sync 0.1 · idle 0.1   3,100 tok/s`"""
    parts = " · ".join(f"{name} {format_number(seconds)}" for name, seconds in split["parts"] if seconds > 0)
    rate = "" if split["tokens_per_s"] is None else f"   {format_rate(split['tokens_per_s'])}"
    return f"step {format_number(split['seconds'])} s = {parts}{rate}"


def _engines(view: DashboardView) -> Grid:
    parts = max((len(row["parts"]) for row in view.engines), default=0)
    rows: list[tuple[Cell, ...]] = []
    for row in view.engines:
        chips = [english(part["toggle"]["label"]) for part in row["parts"]] + [""] * (parts - len(row["parts"]))
        memory = "" if row["bytes"] is None else format_bytes(row["bytes"])
        note = (WARNING if row["warns"] else "") + english(row["note"])
        rows.append((row["name"], row["kind"], *chips, memory, note))
    return Grid(rows, ("engine", "", *[""] * parts, "memory", "version"), frozenset({2 + parts}))


def _memory(memory: Memory) -> str:
    if not memory.lanes:
        return "<div class=q>No memory samples yet.</div>"
    most = max(float(lane.stack().sum(0).max(initial=0)) for lane in memory.lanes) or 1.0
    rows: list[tuple[Cell, ...]] = []
    for lane in memory.lanes:
        known = lane.owners[0][-1] is not None
        now = format_bytes(float(lane.stack()[:, -1].sum()) * MIB) if known else ""
        rows.append((lane.name, Markup(_lane(lane, memory.times, most)), now, lane.detail))
    seen, thin = seen_and_thin(memory)
    named = {owner: english(text) for owner, text in PART_NAMES.items()}
    key = [f'<span style="color:{OWNERS[owner].light}">■</span> {named[owner]}' for owner in seen]
    if thin:
        key.append(f"<span class=q>too thin to see: {', '.join(named[owner] for owner in thin)}</span>")
    if memory.untold is not None:
        key.append("<span class=q>grey at first: workers tell whose it is while somebody looks</span>")
    span = format_age(memory.times[-1] - memory.times[0])
    head = f"<div><b>memory</b> <span class=q>last {span}</span> &nbsp; {' &nbsp; '.join(key)}</div>"
    return f"<div class=g>{head}\n{Grid(rows, numeric=frozenset({2}), labels=True).html()}</div>"


def _lane(lane: Lane, times: Sequence[float], most: float) -> str:
    """Stacked areas from below in the order of the owners."""
    values = lane.stack()
    across = np.interp(times, (times[0], times[-1]), (0, LANE_WIDTH)) if len(times) > 1 else [0, LANE_WIDTH]
    tops = np.cumsum(np.vstack([np.zeros(len(times)), values]), 0) / most
    heights = np.broadcast_to(LANE_HEIGHT * (1 - tops), (len(tops), len(across)))
    edges = [[f"{x:.0f},{y:.1f}" for x, y in zip(across, row, strict=True)] for row in heights]
    drawn = "".join(
        f'<polygon points="{" ".join(edges[i + 1] + edges[i][::-1])}" fill="{hue.light}"/>'
        for i, hue in enumerate(OWNERS.values())
        if values[i].any()
    )
    return _picture(drawn, LANE_WIDTH, LANE_HEIGHT, f"memory of {lane.name} over time", values.sum(0))


def _lengths(lengths: Sequence[Json]) -> str:
    if not lengths:
        return "<div class=q>No rollouts yet. <code>session.rollout(prompts)</code></div>"
    last = lengths[-1]
    edges, counts = last["edges"], last["counts"]
    most = max(counts, default=0) or 1
    low, high = (edges[0], edges[-1]) if edges else (0.0, 1.0)
    scale = BARS_WIDTH / ((high - low) or 1.0)
    bars = "".join(
        f'<rect x="{(left - low) * scale:.1f}" width="{max(1.0, (right - left) * scale - 1):.1f}" '
        f'y="{BARS_HEIGHT * (1 - count / most):.1f}" height="{BARS_HEIGHT * count / most:.1f}" fill="{BLUE.light}"/>'
        for left, right, count in zip(edges, edges[1:], counts, strict=False)
        if count
    )
    picture = _picture(bars, BARS_WIDTH, BARS_HEIGHT, "histogram of lengths", counts)
    what, line = escape(last["rollout"]), escape(lengths_line(last))
    return (
        f"<div class=g><div><b>lengths</b> <span class=q>{what}</span> · {line}</div>\n<div>{picture}</div>\n"
        f"<div class=q>from {low:.0f} to {high:.0f} tokens</div></div>"
    )


def _picture(shapes: str, width: int, height: int, label: str, values: Sequence[int] | np.ndarray) -> str:
    """Shapes over a ground line; the label has in characters what stays of them where a notebook is not trusted."""
    drawing = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">'
        f'<path d="M0 {height - 0.5}H{width}" stroke="{GREY.light}"/>{shapes}</svg>'
    )
    said = f": {sparkline([float(value) for value in values], 32)}" if len(values) else ""
    return image(drawing, escape(label + said), f'width="{width}" height="{height}"')


def _metrics(view: DashboardView) -> str:
    known = [curve for curve in view.curves if curve["points"]]
    if not known:
        return "<div class=q>No steps yet. <code>session.train_step(batch)</code></div>"
    drawn = []
    for curve in known:
        values = [value for _, value in curve["points"][-24:]]
        label = escape(f"{curve['label']} ({curve['unit']})" if curve["unit"] else curve["label"])
        number, course = format_number(values[-1]), blocks(values)
        drawn.append(f"<span class=k><span class=q>{label}</span> {number} <code>{course}</code></span>")
    return f"<div>{' &nbsp; '.join(drawn)}</div>"
