"""The dashboard as it stays in a saved notebook: numbers, and small drawings of memory and lengths. No script."""

from __future__ import annotations

import time as clock
from collections.abc import Sequence

from rlbench.monitor.schema import english
from rlbench.monitor.view import PART_NAMES
from rlbench.notebook.base.markup import box, escape, table
from rlbench.notebook.base.palette import BLUE, GREY, OWNERS
from rlbench.notebook.base.sparkline import sparkline
from rlbench.notebook.charts.svg import image
from rlbench.notebook.dashboard.data import Lengths, Split, View
from rlbench.notebook.dashboard.memory import Lane, Memory, seen_and_thin
from rlbench.units import format_age, format_bytes, format_number, format_percent, format_rate

MOMENTS = 80
LANE_WIDTH, LANE_HEIGHT = 380, 32
BARS_WIDTH, BARS_HEIGHT = 240, 80
MIB = 1 << 20


def snapshot(view: View, at: float, note: str = "") -> str:
    """The session at time `at` (Unix seconds) as HTML; `note` says why it does not move."""
    when = clock.strftime("%Y-%m-%d %H:%M:%S", clock.localtime(at))
    head = (
        f"<div><b>rlbench</b> · {escape(view.name)} <span class=q>{escape(view.model)}</span> &nbsp; step {view.step}"
        f" · v{view.version} · {escape(view.phase)} &nbsp; "
        f"<span class=q>{escape(note or 'as of')} {when}</span></div>"
    )
    error = f"<div class=w>⚠ {escape(view.error)}</div>" if view.error else ""
    split = "" if view.split is None else f"<div>{escape(split_line(view.split))}</div>"
    return box(head, error, _engines(view), _memory(view.memory), _lengths(view.lengths), _metrics(view), split)


def text(view: View) -> str:
    """The same in a few lines of plain text."""
    lines = [f"rlbench · {view.name} ({view.model})   step {view.step} · v{view.version} · {view.phase}"]
    for row in view.engines:
        parts = "   ".join(f"{part['name']} {english(part['word'])}" for part in row["parts"])
        note = ("⚠ " if row["warns"] else "") + english(row["note"])
        lines.append(f"{row['name']:<10} {row['kind']:<9} {parts}   {_bytes(row['bytes'])}   {note}".rstrip())
    if view.lengths:
        lines.append(f"lengths    {lengths_line(view.lengths[-1])}")
    known = [f"{c.label} {format_number(c.points[-1][1])}" for c in view.curves if c.points]
    lines += [" · ".join(known)] if known else []
    lines += [split_line(view.split)] if view.split is not None else []
    return "\n".join(lines)


def lengths_line(lengths: Lengths) -> str:
    """`64 samples · p50 118 · p90 402 · max 512 · truncated 6 %`"""
    known = [("p50", lengths.p50), ("p90", lengths.p90), ("max", lengths.max)]
    said = [f"{name} {value:,.0f}" for name, value in known if value is not None]
    cut = [] if lengths.truncated is None else [f"truncated {format_percent(lengths.truncated)}"]
    return " · ".join([f"{lengths.samples} samples", *said, *cut])


def split_line(split: Split) -> str:
    """`step 1.9 s = rollout 0.9 · score 0.0 · train 0.8 · sync 0.1 · idle 0.1   3,100 tok/s`"""
    parts = " · ".join(f"{name} {format_number(seconds)}" for name, seconds in split.parts if seconds > 0)
    rate = "" if split.tokens_per_s is None else f"   {format_rate(split.tokens_per_s)}"
    return f"step {format_number(split.seconds)} s = {parts}{rate}"


def _engines(view: View) -> str:
    parts = max((len(row["parts"]) for row in view.engines), default=0)
    rows = []
    for row in view.engines:
        chips = [escape(english(part["toggle"]["label"])) for part in row["parts"]] + [""] * (parts - len(row["parts"]))
        note = escape(english(row["note"]))
        warned = f"<span class=w>⚠ {note}</span>" if row["warns"] else note
        rows.append([f"<b>{escape(row['name'])}</b>", escape(row["kind"]), *chips, _bytes(row["bytes"]), warned])
    if not rows:
        return "<div class=q>No engines yet.</div>"
    return table(["engine", "", *[""] * parts, "memory", "version"], rows, numeric=[2 + parts])


def _memory(memory: Memory) -> str:
    if not memory.lanes:
        return "<div class=q>No memory samples yet.</div>"
    most = max((max(_totals(lane), default=0) for lane in memory.lanes), default=0) or 1
    rows = []
    for lane in memory.lanes:
        last = [values[-1] for values in lane.owners]
        now = "" if None in last else format_bytes(sum(value or 0 for value in last) * MIB)
        rows.append([escape(lane.name), _lane(lane, memory.times, most), now, escape(lane.detail)])
    span = format_age(memory.times[-1] - memory.times[0])
    return (
        f"<div class=g><div><b>memory</b> <span class=q>last {span}</span> &nbsp; "
        f"{_key(memory)}</div>\n{table([], rows, numeric=[2])}</div>"
    )


def _key(memory: Memory) -> str:
    """Which colour is whose, of what can be seen, and why the rest cannot."""
    seen, thin = seen_and_thin(memory)
    said = [f'<span style="color:{OWNERS[owner].light}">■</span> {_owner_name(owner)}' for owner in seen]
    if thin:
        said.append(f"<span class=q>too thin to see: {', '.join(map(_owner_name, thin))}</span>")
    if memory.untold is not None:
        said.append("<span class=q>grey at first: workers tell whose it is while somebody looks</span>")
    return " &nbsp; ".join(said)


def _owner_name(owner: str) -> str:
    """`kv_cache` as a reader knows it: `KV cache`."""
    return english(PART_NAMES[owner])


def _lane(lane: Lane, times: Sequence[float], most: int) -> str:
    """Stacked areas from below in the order of the owners."""
    span = (times[-1] - times[0]) or 1.0
    across = [(t - times[0]) / span * LANE_WIDTH for t in times] if len(times) > 1 else [0.0, LANE_WIDTH]

    def edge(values: Sequence[float]) -> list[str]:
        return [f"{x:.0f},{LANE_HEIGHT * (1 - v / most):.1f}" for x, v in zip(across, values, strict=True)]

    below, drawn = [0.0] * len(across), []
    for hue, values in zip(OWNERS.values(), lane.owners, strict=True):
        spread = [value or 0 for value in values] * (len(across) // len(values))
        above = [low + value for low, value in zip(below, spread, strict=True)]
        if any(spread):
            drawn.append(f'<polygon points="{" ".join(edge(above) + edge(below)[::-1])}" fill="{hue.light}"/>')
        below = above
    return _picture("".join(drawn), LANE_WIDTH, LANE_HEIGHT, _blocks(f"memory of {lane.name} over time", _totals(lane)))


def _lengths(lengths: Sequence[Lengths]) -> str:
    if not lengths:
        return "<div class=q>No rollouts yet. <code>session.rollout(prompts)</code></div>"
    last = lengths[-1]
    most = max(last.counts, default=0) or 1
    low, high = (last.edges[0], last.edges[-1]) if last.edges else (0.0, 1.0)
    scale = BARS_WIDTH / ((high - low) or 1.0)
    bars = "".join(
        f'<rect x="{(left - low) * scale:.1f}" width="{max(1.0, (right - left) * scale - 1):.1f}" '
        f'y="{BARS_HEIGHT * (1 - count / most):.1f}" height="{BARS_HEIGHT * count / most:.1f}" fill="{BLUE.light}"/>'
        for left, right, count in zip(last.edges, last.edges[1:], last.counts, strict=False)
        if count
    )
    picture = _picture(bars, BARS_WIDTH, BARS_HEIGHT, _blocks("histogram of lengths", last.counts))
    return (
        f"<div class=g><div><b>lengths</b> <span class=q>{escape(last.rollout)}</span> · {escape(lengths_line(last))}"
        f"</div>\n<div>{picture}</div>\n<div class=q>from {low:.0f} to {high:.0f} tokens</div></div>"
    )


def _picture(shapes: str, width: int, height: int, label: str) -> str:
    """Shapes over a ground line; the label is what stays of them where a notebook is not trusted."""
    drawing = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">'
        f'<path d="M0 {height - 0.5}H{width}" stroke="{GREY.light}"/>{shapes}</svg>'
    )
    return image(drawing, escape(label), f'width="{width}" height="{height}"')


def _metrics(view: View) -> str:
    known = [curve for curve in view.curves if curve.points]
    if not known:
        return "<div class=q>No steps yet. <code>session.train_step(batch)</code></div>"
    heads = [escape(curve.label) + (f" ({escape(curve.unit)})" if curve.unit else "") for curve in known]
    lasts = [format_number(curve.points[-1][1]) for curve in known]
    lines = [f"<code>{sparkline([v for _, v in c.points], 24).split(' ')[1]}</code>" for c in known]
    return table(heads, [lasts, lines])


def _totals(lane: Lane) -> list[int]:
    return [sum(value or 0 for value in moment) for moment in zip(*lane.owners, strict=True)]


def _blocks(label: str, values: Sequence[int]) -> str:
    return f"{label}: {sparkline([float(value) for value in values], 32)}" if values else label


def _bytes(nbytes: int | None) -> str:
    return "" if nbytes is None else format_bytes(nbytes)
