"""Cards of data at hand: prompts, where a stream or a mixture stands, and a batch."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from rlbench.data import TrainBatch
from rlbench.data.base.column import Column
from rlbench.data.prompts.mixing import Mixture
from rlbench.data.prompts.sampling import reshaped_notes
from rlbench.data.prompts.set import PromptSet
from rlbench.data.prompts.stream import PromptStream
from rlbench.monitor.view import shortened
from rlbench.notebook.base.figures import blocks
from rlbench.notebook.cards.card import WARNING, Card, Cell, Grid
from rlbench.units import format_number, format_percent, format_share

SHOWN, HEAD, BINS = 5, 90, 24
"""Rows of prompts, characters of each, bins of a histogram."""


def prompt_set_card(prompts: PromptSet) -> Card:
    """The first prompts with their lengths and labels, and what was too long."""
    facts = [f"{format_number(len(prompts))} prompts"]
    title, known = prompts.name or "prompts", prompts.lengths is not None
    if not len(prompts):
        return Card(title, facts)
    if prompts.lengths is not None:
        facts.append(f"tokens {_ends(Column.of(prompts.lengths, 'lengths').summary(), ', ')}")
    rows: list[tuple[Cell, ...]] = []
    for i, prompt in enumerate(prompts.prompts[:SHOWN]):
        tokens = [] if prompts.lengths is None else [format_number(int(prompts.lengths[i]))]
        label = "–" if prompt.label is None else str(prompt.label)
        rows.append((str(i), *tokens, _head(prompt.text), _head(label)))
    head = ("", *(["tokens"] if known else []), "prompt (its last message)", "label")
    grids = [Grid(rows, head, frozenset({0, 1} if known else {0}), labels=True)]
    notes = [f"… {format_number(len(prompts) - SHOWN)} more"] if len(prompts) > SHOWN else []
    if prompts.too_long:
        longest = sorted(prompts.too_long, key=lambda one: -one.tokens)[:SHOWN]
        long = [(str(one.row), format_number(one.tokens), _head(one.text)) for one in longest]
        limit = "" if prompts.max_prompt_tokens is None else f" than {prompts.max_prompt_tokens} tokens"
        grids.append(Grid(long, ("row", "tokens", "prompt"), frozenset({0, 1}), f"longer{limit}", labels=True))
        notes.append(f"{WARNING}{format_number(len(prompts.too_long))} too long: .too_long lists them all")
    return Card(title, facts, grids, notes)


def stream_card(stream: PromptStream) -> Card:
    """Where it stands."""
    order = f"shuffled, seed {stream.seed}" if stream.shuffle else "in order"
    return Card(f"stream {stream.prompts.name}".strip(), [_place(stream), f"{stream.taken} taken", order])


def mixture_card(mixture: Mixture) -> Card:
    """Shares asked for and taken, and where each set stands."""
    rows = []
    for name, stream in mixture.streams.items():
        taken = format_share(mixture.counts[name], mixture.taken) if mixture.taken else "–"
        rows.append((name, format_percent(mixture.weights[name]), taken, str(mixture.counts[name]), _place(stream)))
    grid = Grid(rows, ("set", "share", "taken", "prompts", "stands at"), frozenset({1, 2, 3}))
    return Card("mixture", [f"{mixture.taken} taken", f"seed {mixture.seed}"], [grid])


def _place(stream: PromptStream) -> str:
    if stream.ended:
        return "ended"
    last = "" if stream.epochs is None else f" of {stream.epochs}"
    return f"epoch {stream.epoch + 1}{last}, {stream.position} of {len(stream.prompts)}"


def _head(text: str) -> str:
    return shortened(" ".join(text.split()), HEAD)


def batch_card(batch: TrainBatch) -> Card:
    """What a step would train on."""
    trained = int(batch.mask.sum())
    facts = [
        f"{format_number(len(batch))} sequences",
        f"{format_number(batch.tokens)} response tokens",
        f"{format_number(trained)} trained ({format_share(trained, batch.tokens)})",
    ]
    if not len(batch):
        return Card("batch", facts, notes=["nothing to train on: rollouts.score(reward_fn).batch(advantage=…)"])
    lengths = Column.of(batch.response_lengths, "lengths", "tokens", batch.truncated)
    bins = min(BINS, int(lengths.max() - lengths.min()) + 1)
    versions = np.unique(batch.weight_version)
    named = ["nobody" if version < 0 else f"v{version}" for version in versions[:8]]
    shown = ", ".join(named) + (" …" if len(versions) > 8 else "")
    known = ["sampler"] if batch.sampled else []
    known += [name for name in ("old", "ref") if getattr(batch, f"{name}_logprobs") is not None]
    advantages = batch.advantages[batch.mask]
    rows = [
        ("lengths", f"{blocks(np.histogram(np.asarray(lengths), bins)[0], floor=0)}  {_spread(lengths)}"),
        ("prompts", _spread(Column.of(batch.prompts.lengths, "prompts"))),
        *([] if batch.rewards is None else [("reward", _values(batch.rewards))]),
        ("advantage", _values(advantages) if len(advantages) else "no trained token"),
        ("sampled by", f"{shown}, temperature {format_number(batch.temperature)}"),
        ("log-probs known", ", ".join(known) or "none"),
        *([] if batch.preference is None else [("compared", _compared(batch))]),
    ]
    owner = np.repeat(np.arange(len(batch)), batch.response_lengths)
    asked = np.ones(len(batch), bool) if batch.preference is None else batch.preference != 0
    silent = int(((np.bincount(owner, (batch.advantages != 0) & batch.mask, len(batch)) == 0) & asked).sum())
    notes = [f"{WARNING}{note}" for note in reshaped_notes(batch.reshaped_by)]
    if silent:
        said = f"{silent} of {len(batch)} sequences have advantage 0 throughout: no policy gradient from them"
        notes = [said, *notes]
    return Card("batch", facts, [Grid(rows, labels=True)], notes)


def _compared(batch: TrainBatch) -> str:
    """How many responses were preferred, how many not, and how many are judged neither way."""
    assert batch.preference is not None
    counts = {sign: int((batch.preference == sign).sum()) for sign in (1, -1, 0)}
    pairs = "" if batch.pair is None else f"{len(np.unique(batch.pair[batch.pair >= 0]))} pairs · "
    other = f" · {counts[0]} neither, after other prompts" if counts[0] else ""
    if batch.verdicts is not None:
        return f"{pairs}by {', '.join(batch.verdicts.heads)}"
    return f"{pairs}{counts[1]} preferred, {counts[-1]} not{other}"


def _values(values: np.ndarray) -> str:
    low, mean, high, std = (format_number(float(v)) for v in (values.min(), values.mean(), values.max(), values.std()))
    return f"mean {mean} ± {std} · from {low} to {high}"


def _spread(column: Column) -> str:
    found = column.summary()
    cut = f" · {format_percent(found['truncated'])} truncated" if "truncated" in found else ""
    return f"{_ends(found, ' · ')} tokens{cut}"


def _ends(summary: Mapping[str, float], between: str) -> str:
    return between.join(f"{name} {format_number(round(summary[name]))}" for name in ("min", "p50", "p90", "max"))
