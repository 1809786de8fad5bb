"""Rollouts as HTML that needs nothing, few but the most telling: for a saved notebook and the exported page."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlbench.data import Rollouts
from rlbench.notebook.base.markup import box, cut, escape, sheet, visible
from rlbench.notebook.base.palette import STRONGEST, css
from rlbench.notebook.rollouts.channel_scale import LEVELS, Scale, number, telling
from rlbench.notebook.rollouts.order import checked
from rlbench.notebook.rollouts.rows import Shown, headline

GROUPS_SHOWN, SAMPLES_SHOWN, TOKENS_SHOWN, PROMPT_SHOWN = 5, 4, 96, 300  # a saved notebook holds it
IMAGES_SHOWN, EDGE = 2, 96  # of prompts and completions together

STYLE = sheet("rollouts") + "".join(
    f".rlb-static .{letter}{k} {{background: color-mix(in srgb, var(--rlb-{hue}) {k * STRONGEST * 100 / LEVELS:.0f}%, "
    "transparent)}\n"
    for letter, hue in (("p", "positive"), ("n", "negative"), ("q", "magnitude"))
    for k in range(1, LEVELS + 1)
)

MARKS = {"t": "", "s": "s", "b": "b", "i": "b"}
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
        head = group_head(shown, int(p), IMAGES_SHOWN if pictures < IMAGES_SHOWN else 0)
        pictures += head.count("<img")
        samples = telling_samples(shown, p, SAMPLES_SHOWN)
        rows = []
        for i in samples:
            rows.append(row_html(shown, int(i), scale, TOKENS_SHOWN, images=IMAGES_SHOWN - pictures))
            pictures += rows[-1].count("<img")
        more = int(shown.summary.counts[p]) - len(samples)
        rows += [f"<tr><td></td> <td class=q>… {more} more</td> <td></td></tr>"] if more > 0 else []
        lines = "\n".join(rows)
        parts.append(f"<div class=g>{head}\n<table cellpadding=4>{lines}</table></div>")
    hidden = len(rollouts) - len(groups)
    if hidden:
        parts.append(f"<div class=q>… {hidden:,} more prompts</div>")
    return box('<div class="rlb-static">', *parts, "</div>")


def chosen_scale(shown: Shown, colour: str | None = None) -> Scale:
    """The scale of a channel; None takes the one that tells most."""
    if colour is None:
        colour = telling(shown.channels, shown.rollouts.responses.offsets)
    return shown.scales[checked("channel", colour, shown.channels)]


def legend(scale: Scale) -> str:
    """`colour: difference (nats), −0.12 to 0.3; outlined: clipped; struck: not trained`."""
    unit = f" ({scale.unit})" if scale.unit else ""
    signs = {"signed": "; orange below 0, blue above", "ratio": "; orange below 1, blue above"}.get(scale.kind, "")
    return f"colour: {scale.name.replace('_', ' ')}{unit}, {number(scale.low)} to {number(scale.high)}{signs}"


def telling_groups(shown: Shown, most: int) -> np.ndarray:
    """Prompts to show first, (≤ most,): by spread of the rewards, then truncated or aborted, mismatch, length."""
    s, r = shown.summary, shown.rollouts
    length, truncated = s.per_prompt(s.lengths), s.per_prompt((r.truncated | r.aborted).astype(np.float64))
    mismatch = np.zeros(len(r)) if s.mismatch is None else s.per_prompt(np.nan_to_num(s.mismatch))
    spread = length if r.rewards is None else np.round(s.spread, 9)
    order = np.lexsort((-length, -mismatch, -truncated, -np.nan_to_num(spread)))
    order = order[s.counts[order] > 0]
    worst = order[np.argsort(-mismatch[order], kind="stable")[:1]] if mismatch.any() else order[:0]
    first = order[: most - len(np.setdiff1d(worst, order[:most]))]
    return np.concatenate([first, np.setdiff1d(worst, first)])


def telling_samples(shown: Shown, p: int, most: int) -> np.ndarray:
    """Completions of a prompt to show: the best and the worst, one truncated, the largest mismatch, then by reward."""
    s, r = shown.summary, shown.rollouts
    own = np.arange(*np.searchsorted(r.group, [p, p + 1]))
    ranked = own[np.lexsort((s.lengths[own], -s.rewards[own]))]
    if len(own) <= most:
        return ranked
    picked = [ranked[0], ranked[-1], *own[r.truncated[own] | r.aborted[own]][:1]]
    if s.mismatch is not None:
        picked.append(own[np.argmax(np.nan_to_num(s.mismatch[own]))])
    picked += [*ranked[1 : 1 + most // 2], *ranked[::-1]]
    return ranked[np.isin(ranked, list(dict.fromkeys(picked))[:most])]


def group_head(shown: Shown, p: int, most: int, edge: int = EDGE) -> str:
    """A prompt's line, with `most` images at most, `edge` pixels on the longer side."""
    head, facts = shown.head(p), []
    if "mean" in head:
        facts.append(f"{head['right']}/{head['n']} right" if head["two"] else f"reward {number(head['mean'])}")
        facts.append(f"spread {head['spread']:.2f}")
    text = escape(visible(cut(shown.rollouts.prompts[p].text, PROMPT_SHOWN)))
    drawn = "".join(
        f'<img src="{escape(image.image)}" alt="{escape(image.text)}"> <span class=q>{image.chip}</span>'
        for image in (shown.thumbnails(p, most, edge) if most else ())
    )
    return f"<div class=h><b>prompt {p}</b> <code>{text}</code> <span class=q>{' · '.join(facts)}</span>{drawn}</div>"


def row_html(shown: Shown, i: int, scale: Scale, most: int, every: bool = False, images: int = 0) -> str:
    """A completion as a row that reads without any style; `every` token an element for a script, or coloured ones;
    `images`: so many at most of those that an environment showed."""
    row, span = shown.row(i, 0, most, preview=not every)
    row["images"] = row["images"][: max(0, images)]
    reward = row["reward"]
    signed = f"{reward:+.2f}".replace("-", "−") if reward else "0.00"
    mark = "" if reward is None else f"{'✓' if row['right'] else '✗'} {signed}"
    left = row["n"] - len(row["pieces"])
    rest = f"<span class=q> … {left:,} more tokens</span>" if left else ""
    behind = f"↳ from token {row['born']:,} · " if row["born"] else ""
    plain = f"<div>{escape(row['text'])}</div> " if "text" in row else ""
    return (
        f"<tr{f' data-i={i}' if every else ''}><td class=m>{mark}</td> "
        f"<td class=t>{plain}{_tokens(shown, row, span, scale, every)}{rest}</td> "
        f"<td class='e q' align=right>{behind}{row['n']:,} tok · {ENDED[row['finish']]}</td></tr>"
    )


def _tokens(shown: Shown, row: dict[str, Any], span: slice, scale: Scale, every: bool) -> str:
    values = shown.channels[scale.name][span]
    looks = scale.looks(values)
    nothing = np.zeros(len(values))
    clipped = shown.channels["clipped"][span] if "clipped" in shown.channels else nothing
    mask = shown.channels["mask"][span] if "mask" in shown.channels else nothing + 1
    out = []
    pictures = {image["t"]: image for image in row["images"] if image["src"]}
    for t, (piece, kind) in enumerate(zip(row["pieces"], row["kinds"], strict=True)):
        if image := pictures.get(t):
            out.append(f'<img src="{escape(image["src"])}" alt="{escape(image["alt"])}"> ')
        marks = (looks[t], MARKS[kind], "clip" if clipped[t] > 0 else "", "off" if mask[t] == 0 else "")
        look = " ".join(filter(None, marks))
        text = escape(piece.replace("\n", "⏎\n" if every else "⏎"))
        if not (look and text) and not every:  # of tokens that stand for an image all but the first have no text
            out.append(text)
            continue
        quoted = f'"{look}"' if " " in look else look
        tag = "i" if every else "span"  # short where there are many, upright where a reader drops our style
        styled = f" class={quoted}" if look else ""
        out.append(f"<{tag}{styled} title={number(float(values[t]))}>{text}</{tag}>")
    return "".join(out)
