"""Rollouts as HTML that needs nothing: what a saved notebook, nbconvert and GitHub show, and the exported page.

Few, but the most telling: prompts whose answers differ most, ends of the reward, what was truncated, where sampler and
trainer disagree most.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rlbench.data import Rollouts
from rlbench.notebook.base.inert import cut, visible
from rlbench.notebook.base.markup import box, escape
from rlbench.notebook.base.palette import STRONGEST, css
from rlbench.notebook.rollouts.channel_scale import LEVELS, Scale, number, telling
from rlbench.notebook.rollouts.prompt_parts import images
from rlbench.notebook.rollouts.rows import Shown, headline

GROUPS_SHOWN, SAMPLES_SHOWN, TOKENS_SHOWN, PROMPT_SHOWN = 5, 4, 96, 300  # a saved notebook holds it
IMAGES_SHOWN, EDGE = 2, 96

STYLE = """
.rlb-static .g {border: 1px solid var(--jp-border-color2, #bdbdbd); border-radius: 4px; margin: 8px 0; overflow: hidden}
.rlb-static .h {display: flex; flex-wrap: wrap; gap: 0 12px; padding: 4px 8px; background: rgba(128, 128, 128, .08)}
.rlb-static .h code {flex: 1 1 240px} .rlb-static .h img {max-height: 96px; border-radius: 4px}
.rlb-static table {width: 100%; table-layout: fixed; border-collapse: collapse; margin: 0}
.rlb-static table td {vertical-align: top; padding: 4px 8px !important;
  border-top: 1px solid rgba(128, 128, 128, .2) !important}
.rlb-static .m {width: 64px; font-weight: 600; white-space: nowrap}
.rlb-static .e {width: 140px; white-space: nowrap; text-align: right !important}
.rlb-static .t {white-space: pre-wrap; overflow-wrap: anywhere; unicode-bidi: isolate}
.rlb-static .t > * {font-style: normal; border-radius: 2px; unicode-bidi: isolate}
.rlb-static .s {font-variant-caps: all-small-caps; font-size: 11px; padding: 0 4px; margin: 0 1px; border-radius: 8px;
  border: 1px solid rgba(128, 128, 128, .6)}
.rlb-static .b {font-size: 10px; padding: 0 2px; border: 1px dotted rgba(128, 128, 128, .6)}
.rlb-static .clip {outline: 1.5px solid currentColor; outline-offset: -1px}
.rlb-static .off {text-decoration: line-through; opacity: .7}
""" + "".join(
    f".rlb-static .{letter}{k} {{background: color-mix(in srgb, var(--rlb-{hue}) {k * STRONGEST * 100 / LEVELS:.0f}%, "
    "transparent)}\n"
    for letter, hue in (("p", "positive"), ("n", "negative"), ("q", "magnitude"))
    for k in range(1, LEVELS + 1)
)

ENDED = {"stop": "stop", "length": "<span class=w>✂ length</span>", "abort": "<span class=w>■ aborted</span>"}


def rollouts_view(rollouts: Rollouts) -> str:
    """Summary, and the most telling groups with tokens coloured by the channel that tells most."""
    return static_view(Shown(rollouts))


def static_view(shown: Shown, colour: str | None = None) -> str:
    """`rollouts_view` of what a viewer holds already, coloured by the channel that is chosen there."""
    rollouts, scale = shown.rollouts, chosen_scale(shown, colour)
    parts = [f"<style>{css('.rlb-static')}{STYLE}</style>", f"<div>{escape(headline(rollouts))}</div>"]
    groups = telling_groups(shown, GROUPS_SHOWN)
    if len(groups):
        parts.append(f"<div class=q>{escape(legend(scale))}</div>")
    pictures = 0
    for p in groups:
        samples = telling_samples(shown, p, SAMPLES_SHOWN)
        rows = [row_html(shown, int(i), scale, TOKENS_SHOWN) for i in samples]
        more = int(shown.summary.counts[p]) - len(samples)
        head = group_head(shown, int(p), IMAGES_SHOWN if pictures < IMAGES_SHOWN else 0)
        pictures += head.count("<img")
        left = [f"<tr><td></td> <td class=q>… {more} more</td> <td></td></tr>"] if more > 0 else []
        lines = "\n".join([*rows, *left])
        parts.append(f"<div class=g>{head}\n<table cellpadding=4>{lines}</table></div>")
    hidden = len(rollouts) - len(groups)
    if hidden:
        parts.append(f"<div class=q>… {hidden:,} more prompts</div>")
    return box('<div class="rlb-static">', *parts, "</div>")


def chosen_scale(shown: Shown, colour: str | None = None) -> Scale:
    """The scale of a channel; None takes the one that tells most."""
    name = telling(shown.channels, shown.rollouts.responses.offsets) if colour is None else colour
    return next(scale for scale in shown.scales if scale.name == name)


def legend(scale: Scale) -> str:
    """`colour: difference (nats), −0.12 to 0.3; outlined: clipped; struck: not trained`."""
    unit = f" ({scale.unit})" if scale.unit else ""
    named = scale.name.replace("_", " ")
    signs = {"signed": "; orange below 0, blue above", "ratio": "; orange below 1, blue above"}.get(scale.kind, "")
    return f"colour: {named}{unit}, {number(scale.low)} to {number(scale.high)}{signs}"


def telling_groups(shown: Shown, most: int) -> np.ndarray:
    """Prompts to show first, (≤ most,): by spread of the rewards, then truncated or aborted, mismatch, length."""
    s = shown.summary
    truncated = s.per_prompt((shown.rollouts.truncated | shown.rollouts.aborted).astype(np.float64))
    mismatch = np.zeros(len(shown.rollouts)) if s.mismatch is None else s.per_prompt(np.nan_to_num(s.mismatch))
    spread = np.round(s.spread, 9) if shown.rollouts.rewards is not None else s.per_prompt(s.lengths.astype(np.float64))
    order = np.lexsort((-s.per_prompt(s.lengths.astype(np.float64)), -mismatch, -truncated, -np.nan_to_num(spread)))
    order = order[s.counts[order] > 0]
    worst = order[np.argsort(-mismatch[order], kind="stable")[:1]] if mismatch.any() else order[:0]
    first = order[: most - len(np.setdiff1d(worst, order[:most]))]
    return np.concatenate([first, np.setdiff1d(worst, first)])


def telling_samples(shown: Shown, p: int, most: int) -> np.ndarray:
    """Completions of a prompt to show: the best and the worst, one truncated, the largest mismatch, then by reward."""
    s, r = shown.summary, shown.rollouts
    first, end = np.searchsorted(r.group, [p, p + 1])
    own = np.arange(first, end)
    ranked = own[np.lexsort((s.lengths[own], -s.rewards[own]))]
    if len(own) <= most:
        return ranked
    picked = [ranked[0], ranked[-1]]
    picked += list(own[r.truncated[own] | r.aborted[own]][:1])
    if s.mismatch is not None:
        picked.append(own[np.argmax(np.nan_to_num(s.mismatch[own]))])
    picked += [*ranked[1 : 1 + most // 2], *ranked[::-1]]
    chosen = list(dict.fromkeys(int(i) for i in picked))[:most]
    return ranked[np.isin(ranked, chosen)]


def group_head(shown: Shown, p: int, most: int, edge: int = EDGE) -> str:
    """A prompt's line, with `most` images at most, `edge` pixels on the longer side."""
    head = shown.head(p)
    facts = []
    if "mean" in head:
        facts.append(f"{head['right']}/{head['n']} right" if head["two"] else f"reward {number(head['mean'])}")
        facts.append(f"spread {head['spread']:.2f}")
    text = escape(visible(cut(shown.rollouts.prompts[p].text, PROMPT_SHOWN)))
    drawn = "".join(
        f'<img src="{escape(image.image)}" alt="{escape(image.text)}">'
        for image in (images(shown.rollouts.prompts[p], edge)[:most] if most else ())
    )
    return f"<div class=h><b>prompt {p}</b> <code>{text}</code> <span class=q>{' · '.join(facts)}</span>{drawn}</div>"


def row_html(shown: Shown, i: int, scale: Scale, most: int, every: bool = False) -> str:
    """A completion as a row of a table, which reads without any style: reward, tokens, length and why it ended.

    Args:
        shown, i: which.
        scale: what its tokens are coloured by.
        most: tokens at most.
        every: each token is an element of its own, so that a script can colour it; else only coloured ones are.
    """
    row, span = shown.row(i, 0, most) if every else _preview(shown, i, most)
    mark = "" if row["reward"] is None else f"{'✓' if row['right'] else '✗'} {_signed(row['reward'])}"
    left = row["n"] - len(row["pieces"])
    rest = f"<span class=q> … {left:,} more tokens</span>" if left else ""
    plain = f"<div>{escape(row['text'])}</div> " if "text" in row else ""
    return (
        f"<tr{f' data-i={i}' if every else ''}><td class=m>{mark}</td> "
        f"<td class=t>{plain}{_tokens(shown, row, span, scale, every)}{rest}</td> "
        f"<td class='e q' align=right>{row['n']:,} tok · {ENDED[row['finish']]}</td></tr>"
    )


def _preview(shown: Shown, i: int, most: int) -> tuple[dict[str, Any], slice]:
    row, span = shown.row(i)
    span = slice(span.start, min(span.stop, span.start + most))
    count = span.stop - span.start
    return row | {"pieces": row["pieces"][:count], "kinds": row["kinds"][:count]}, span


def _tokens(shown: Shown, row: dict[str, Any], span: slice, scale: Scale, every: bool) -> str:
    values = shown.channels[scale.name][span]
    levels = scale.levels(values)
    clipped, mask = (shown.channels.get(name) for name in ("clipped", "mask"))
    out = []
    for t, (piece, kind) in enumerate(zip(row["pieces"], row["kinds"], strict=True)):
        names = [f"{_letter(scale, levels[t])}{abs(levels[t])}"] if levels[t] else []
        names += {"s": ["s"], "b": ["b"], "i": ["b"]}.get(kind, [])
        if clipped is not None and clipped[span.start + t] > 0:
            names.append("clip")
        if mask is not None and mask[span.start + t] == 0:
            names.append("off")
        text = escape(piece.replace("\n", "⏎\n") if every else piece.replace("\n", "⏎"))
        if not names and not every:
            out.append(text)
            continue
        title = f" title={number(float(values[t]))}"
        tag = "i" if every else "span"  # short where there are many, upright where a reader drops our style
        out.append(f"<{tag}{_class(names)}{title}>{text}</{tag}>")
    return "".join(out)


def _class(names: Sequence[str]) -> str:
    return f" class={names[0]}" if len(names) == 1 else f' class="{" ".join(names)}"' if names else ""


def _letter(scale: Scale, level: int) -> str:
    return "q" if scale.kind in ("size", "flag") else "p" if level > 0 else "n"


def _signed(value: float) -> str:
    return f"{value:+.2f}".replace("-", "−") if value else "0.00"
