"""Rollouts as one page that needs nothing else, and reads without JavaScript: `rollouts.to_html(path)`.

The page forbids itself the network and every script but its own (Content-Security-Policy, the script by its hash), so
that text of a model could do nothing even if it were markup, which it never is.
"""

from __future__ import annotations

import base64
import hashlib
import json
from typing import Any

import numpy as np

from rlbench.data import Rollouts
from rlbench.errors import DataError
from rlbench.notebook.base.markup import STATIC, escape, sheet
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

TOKENS_OF_A_COMPLETION = 20_000

FILTERS = {"all": "all", "right": "right", "wrong": "wrong", "cut": "truncated or aborted"}
HUES = {"negative": NEGATIVE, "positive": POSITIVE, "magnitude": MAGNITUDE}
DARK = "".join(f"--rlb-{name}: {hue.dark};" for name, hue in HUES.items())
PAGE_STYLE = sheet("rollout_page") + f"@media (prefers-color-scheme: dark) {{.rlb-static {{{DARK}}}}}"
"""The page has no theme of Jupyter's to follow, but the reader's own."""


def page(rollouts: Rollouts, colour: str | None = None, samples: int = 200) -> str:
    """The page as a text, of the most telling groups, `samples` completions at most; it opens with channel `colour`."""
    if samples < 1:
        raise DataError(f"to_html: samples={samples}: at least one is needed")
    shown = Shown(rollouts)
    scale = chosen_scale(shown, colour)
    groups: list[str] = []
    rows: list[int] = []
    for p in telling_groups(shown, len(rollouts)):
        if len(rows) >= samples:
            break
        chosen = telling_samples(shown, int(p), samples - len(rows)).tolist()
        rows += chosen
        drawn = "".join(
            row_html(shown, i, scale, TOKENS_OF_A_COMPLETION, every=True, images=IMAGES_OF_A_PROMPT) for i in chosen
        )
        head = group_head(shown, int(p), IMAGES_OF_A_PROMPT, THUMBNAIL)
        groups.append(f"<section class=g>{head}<table>{drawn}</table></section>")
    left = f"{len(rows):,} of {rollouts.samples:,} completions, the most telling groups first · "
    note = (left if len(rows) < rollouts.samples else "") + legend(scale)
    return _frame(headline(rollouts), note, "".join(groups), _data(shown, scale, rows))


def _data(shown: Shown, scale: Scale, rows: list[int]) -> dict[str, Any]:
    """What the page's script reads."""
    told: dict[str, Any] = {}
    responses = shown.rollouts.responses
    for i in rows:
        first, end = (int(o) for o in responses.offsets[i : i + 2])
        span = slice(first, min(end, first + TOKENS_OF_A_COMPLETION))
        values = np.stack([channel[span] for channel in shown.channels.values()]).astype("<f4")
        told[str(i)] = {
            "right": bool(shown.summary.right[i]),
            "cut": bool(shown.rollouts.finish[i]),
            "ids": responses.values[span].tolist(),
            "values": base64.b64encode(values.tobytes()).decode(),
        }
    channels = [one.to_page() for one in shown.scales.values()]
    return {"channels": channels, "colour": list(shown.scales).index(scale.name), "rows": told}


def _frame(title: str, note: str, body: str, data: dict[str, Any]) -> str:
    script = (STATIC / "rollout_page.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; "
        "base-uri 'none'; form-action 'none'"
    )
    facts = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    options = "".join(f"<option value={value}>{text}</option>" for value, text in FILTERS.items())
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width"><title>{escape(title)}</title>
<style>{css(".rlb-static")}{STYLE}{PAGE_STYLE}</style></head>
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
