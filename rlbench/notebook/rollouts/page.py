"""Rollouts as one page that needs nothing else: `rollouts.to_html(path)`.

It reads without JavaScript; with it, tokens are coloured by any channel, completions filtered, numbers read. The page
forbids itself the network and every script but its own (Content-Security-Policy, the script by its hash), so that text
of a model could do nothing even if it were markup, which it never is.
"""

from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np

from rlbench.data import Rollouts
from rlbench.errors import DataError, nearest
from rlbench.notebook.base.markup import escape
from rlbench.notebook.base.palette import MAGNITUDE, NEGATIVE, POSITIVE, css
from rlbench.notebook.rollouts.channel_scale import Scale
from rlbench.notebook.rollouts.rows import IMAGES_OF_A_PROMPT, THUMBNAIL, Shown, headline
from rlbench.notebook.rollouts.static import (
    STYLE,
    chosen_scale,
    group_head,
    legend,
    row_html,
    telling_groups,
    telling_samples,
)

STATIC = Path(__file__).parents[1] / "static"
TOKENS_OF_A_COMPLETION = 20_000

PAGE_STYLE = """
:root {color-scheme: light dark}
body {font: 13px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 1200px; padding: 16px 24px 56px;
  font-variant-numeric: tabular-nums}
h1 {font-size: 15px; font-weight: 600; margin: 0 0 4px}
.q {color: GrayText} .w {color: #b35900}
code, .t {font: 12px/1.5 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere}
#controls {display: flex; flex-wrap: wrap; gap: 4px 16px; align-items: center; margin: 8px 0}
#legend {display: flex; gap: 8px; align-items: center; font-size: 11px} #legend .name {font-weight: 600}
#legend .bar {width: 120px; height: 12px; border: 1px solid GrayText; border-radius: 2px}
#readout {position: fixed; inset: auto 0 0 0; padding: 4px 24px; min-height: 20px; font-size: 12px;
  font-family: ui-monospace, monospace; background: Canvas; border-top: 1px solid GrayText;
  overflow-wrap: anywhere; white-space: pre-wrap}
#controls :focus-visible, [data-i] .t:focus-visible {outline: 2px solid Highlight; outline-offset: 1px}
[data-i] .t:focus-within i.at, [data-i] .t:focus i.at {outline: 2px solid CanvasText; outline-offset: -1px}
[hidden] {display: none !important}
@media (prefers-color-scheme: dark) {.w {color: #f5a04b}}
"""


def page(rollouts: Rollouts, colour: str | None = None, samples: int = 200) -> str:
    """The page as a text.

    Args:
        rollouts: what to show; the most telling groups come first.
        colour: channel it opens with; None takes the one that tells most.
        samples: completions at most.

    Raises:
        DataError: no such channel, or `samples` below 1.
    """
    if samples < 1:
        raise DataError(f"to_html: samples={samples}: at least one is needed")
    shown = Shown(rollouts)
    names = list(shown.channels)
    if colour is not None and colour not in names:
        raise DataError(f"to_html: no channel {colour!r}{nearest(colour, names)}; there are {', '.join(names)}")
    scale = chosen_scale(shown, colour)
    groups, rows = _groups(shown, scale, samples)
    note = f"{_left_out(rollouts, len(rows))}{legend(scale)}"
    return _frame(headline(rollouts), note, groups, _data(shown, scale, rows))


def _groups(shown: Shown, scale: Scale, samples: int) -> tuple[str, list[int]]:
    """The groups as HTML, and which completions are in them."""
    parts: list[str] = []
    rows: list[int] = []
    for p in telling_groups(shown, len(shown.rollouts)):
        left = samples - len(rows)
        if left <= 0:
            break
        chosen = [int(i) for i in telling_samples(shown, int(p), left)]
        rows += chosen
        drawn = "".join(row_html(shown, i, scale, TOKENS_OF_A_COMPLETION, every=True) for i in chosen)
        head = group_head(shown, int(p), IMAGES_OF_A_PROMPT, THUMBNAIL)
        parts.append(f"<section class=g>{head}<table>{drawn}</table></section>")
    return "".join(parts), rows


def _left_out(rollouts: Rollouts, shown: int) -> str:
    left = rollouts.samples - shown
    return f"{shown:,} of {rollouts.samples:,} completions, the most telling groups first · " if left else ""


def _data(shown: Shown, scale: Scale, rows: list[int]) -> dict[str, Any]:
    """What the page's script reads."""
    found: dict[str, Any] = {}
    for i in rows:
        first, end = (int(o) for o in shown.rollouts.responses.offsets[i : i + 2])
        span = slice(first, min(end, first + TOKENS_OF_A_COMPLETION))
        values = np.stack([channel[span] for channel in shown.channels.values()]).astype("<f4")
        found[str(i)] = {
            "right": bool(shown.summary.right[i]),
            "cut": bool(shown.rollouts.finish[i]),
            "ids": shown.rollouts.responses.values[span].tolist(),
            "values": base64.b64encode(values.tobytes()).decode(),
        }
    names = [one.name for one in shown.scales]
    return {
        "channels": [one.to_page() for one in shown.scales],
        "colour": names.index(scale.name),
        "rows": found,
    }


def _dark() -> str:
    """The page has no theme of Jupyter's to follow, but the reader's own."""
    hues = {"negative": NEGATIVE, "positive": POSITIVE, "magnitude": MAGNITUDE}
    named = "".join(f"--rlb-{name}: {hue.dark};" for name, hue in hues.items())
    return f"@media (prefers-color-scheme: dark) {{.rlb-static {{{named}}}}}"


def _frame(title: str, note: str, body: str, data: dict[str, Any]) -> str:
    script = (STATIC / "rollout_page.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; "
        "base-uri 'none'; form-action 'none'"
    )
    facts = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    style = css(".rlb-static") + STYLE + PAGE_STYLE + _dark()
    options = "".join(
        f"<option value={value}>{text}</option>"
        for value, text in (
            ("all", "all"),
            ("right", "right"),
            ("wrong", "wrong"),
            ("cut", "truncated or aborted"),
        )
    )
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width"><title>{escape(title)}</title>
<style>{style}</style></head>
<body class="rlb-static"><h1>{escape(title)}</h1><div class="q">{escape(note)}</div>
<div id="controls" hidden>
<label>colour <select id="colour"></select></label> <label>show <select id="filter">{options}</select></label>
<label>search <input id="search" type="search"></label> <div id="legend"></div></div>
{body}
<div id="readout" role="status" aria-live="polite"></div>
<script type="application/json" id="facts">{facts}</script>
<script>{script}</script>
</body></html>
"""
