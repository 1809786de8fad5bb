"""The losses of a lab side by side on the tokens of a sample, each coloured by its own coefficient. HTML that needs
nothing: it stays in a saved notebook; a sample is chosen by opening it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rlbench.data.rollouts.pieces import PART, SPECIAL, Piece, pieces_of
from rlbench.notebook.base.markup import box, cut, escape, one_line, sheet, visible
from rlbench.notebook.base.palette import css
from rlbench.notebook.rollouts.channel_scale import number, scale_of
from rlbench.notebook.rollouts.static import STYLE as TOKENS

SAMPLES, TOKENS_SHOWN, LOSSES = 4, 96, 4
"""What a saved notebook holds: samples, tokens of each, losses side by side."""
PIECE, NAME = 24, 40

STYLE = TOKENS + sheet("loss_lab")


def token_strips(lab: Any) -> str:
    """The samples on which the losses differ most, the first one open; "" for a lab without losses."""
    names = list(lab)[:LOSSES]
    if not names:
        return ""
    shown = "\n".join(_sample(lab, int(i), names, first=k == 0) for k, i in enumerate(telling_samples(lab)))
    notes = [
        "colour: ∂L/∂log-prob, each loss on its own scale in each sample; orange: a step makes the token more likely, "
        "blue: less; underlined: the other way than the first loss; struck: not trained; point at a token, or Tab to "
        "one, for its numbers"
    ]
    if (left := len(lab.batch) - SAMPLES) > 0:
        notes.append(f"{left:,} more samples: lab.on(rollouts) shows all")
    if len(lab) > LOSSES:
        notes.append(f"the first {LOSSES} of {len(lab)} losses")
    said = "\n".join(f"<div class=q>{escape(note)}</div>" for note in notes)
    return box('<div class="rlb-static">', f"<style>{css('.rlb-static')}{STYLE}</style>", shown, said, "</div>")


def telling_samples(lab: Any) -> np.ndarray:
    """Sequences to show, (≤ SAMPLES,): where the losses, each scaled to norm 1, differ most from the first; of one loss
    alone where its coefficients are largest."""
    vectors = np.stack([lab[name].coefficients.astype(np.float64) / (lab[name].norm or 1.0) for name in lab])
    off = np.abs(vectors[1:] - vectors[0]).max(0) if len(vectors) > 1 else np.abs(vectors[0])
    owner = np.repeat(np.arange(len(lab.batch)), lab.batch.response_lengths)
    score = np.bincount(owner, weights=off, minlength=len(lab.batch))
    return np.argsort(-score, kind="stable")[:SAMPLES]


def _sample(lab: Any, i: int, names: Sequence[str], first: bool) -> str:
    batch = lab.batch
    begin, end = int(batch.responses.offsets[i]), int(batch.responses.offsets[i + 1])
    span = slice(begin, min(end, begin + TOKENS_SHOWN))
    pieces = pieces_of(lab.tokenizer)(batch.responses.values[span])
    own = batch.advantages[begin:end]
    facts = [f"sample {i}", f"group {batch.group[i]}", f"{end - begin:,} tokens"]
    if len(own):
        low, high = float(own.min()), float(own.max())
        facts.append(f"advantage {number(low)}" + (f" to {number(high)}" if low != high else ""))
    if batch.rewards is not None:
        facts.append(f"reward {number(float(batch.rewards[i]))}")
    sides = "\n".join(_side(lab, name, names, slice(begin, end), span, pieces) for name in names)
    more = f"<div class=q>… {end - span.stop:,} more tokens</div>" if end > span.stop else ""
    head = f"<details class=g{' open' if first else ''}><summary>{escape(' · '.join(facts))}</summary>"
    return f"{head}\n<div class=sides>{sides}</div>\n{more}</details>"


def _side(lab: Any, name: str, names: Sequence[str], whole: slice, span: slice, pieces: Sequence[Piece]) -> str:
    """Draw one loss's strip of tokens; the first one's can be reached by keyboard and tell of all losses."""
    lead = name == names[0]
    coefficients, mask, differ = lab[name].coefficients[span], lab.batch.mask[span], lab.signs_differ(name)[span]
    scale = replace(scale_of(f"coef {name}", lab[name].coefficients[whole]), kind="signed")  # around 0, whatever signs
    tokens = []
    for t, (piece, look) in enumerate(zip(pieces, scale.looks(coefficients), strict=True)):
        kind = {SPECIAL: "s", PART: "b"}.get(piece.kind, "")
        looks = filter(None, (look, kind, "differ" if differ[t] else "", "" if mask[t] else "off"))
        said = _numbers(lab, span.start + t, t, names) if lead else number(float(coefficients[t]))
        reach = " tabindex=0" if lead else ""
        text = escape(visible(cut(piece.shown, PIECE)).replace("\n", "⏎\n"))
        tokens.append(f'<i class="{" ".join(looks)}" title="{escape(said)}"{reach}>{text}</i>')
    ends = f"{number(scale.low)} to {number(scale.high)}"
    title = f"<div><b>{escape(one_line(name, NAME))}</b> <span class=q>{escape(ends)}</span></div>"
    return f"<div>{title}\n<div class=t>{''.join(tokens)}</div></div>"


def _numbers(lab: Any, at: int, t: int, names: Sequence[str]) -> str:
    """`token 3 · id 21 · A −0.87 · ratio 1.01 · grpo −0.012 · mine 0.02`."""
    batch = lab.batch
    ratio = float(np.exp(np.float64(lab.scored.logprobs[at]) - batch.old_logprobs[at]))
    facts = [f"token {t}", f"id {int(batch.responses.values[at])}", f"A {number(float(batch.advantages[at]))}"]
    beside = [f"{one_line(name, NAME)} {number(float(lab[name].coefficients[at]))}" for name in names]
    return " · ".join([*facts, f"ratio {number(ratio)}", *beside])
