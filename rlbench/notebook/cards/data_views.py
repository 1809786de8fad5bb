"""Cards of prompts at hand: a set, what was too long in it, and where a stream or a mixture stands."""

from __future__ import annotations

from rlbench.data.base.column import Column
from rlbench.data.prompts.mixing import Mixture
from rlbench.data.prompts.set import PromptSet
from rlbench.data.prompts.stream import PromptStream
from rlbench.monitor.view import shortened
from rlbench.notebook.cards.card import WARNING, Card, Cell, Grid
from rlbench.units import format_number, format_percent, format_share

SHOWN, HEAD = 5, 90


def prompt_set_card(prompts: PromptSet) -> Card:
    """The first prompts with their lengths and labels, and what was too long."""
    facts = [f"{format_number(len(prompts))} prompts"]
    if not len(prompts):
        return Card(prompts.name or "prompts", facts)
    if prompts.lengths is not None:
        spread = Column.of(prompts.lengths, "lengths").summary()
        shown = [f"{name} {format_number(round(spread[name]))}" for name in ("min", "p50", "p90", "max")]
        facts.append(f"tokens {', '.join(shown)}")
    rows: list[tuple[Cell, ...]] = []
    for i, prompt in enumerate(prompts.prompts[:SHOWN]):
        tokens = [] if prompts.lengths is None else [format_number(int(prompts.lengths[i]))]
        label = "–" if prompt.label is None else str(prompt.label)
        rows.append((str(i), *tokens, _head(prompt.text), _head(label)))
    known = prompts.lengths is not None
    head = ("", *(["tokens"] if known else []), "prompt (its last message)", "label")
    grids = [Grid(tuple(rows), head, frozenset({0, 1} if known else {0}), labels=True)]
    notes = [f"… {format_number(len(prompts) - SHOWN)} more"] if len(prompts) > SHOWN else []
    if prompts.too_long:
        grids.append(_long_grid(prompts))
        notes.append(f"{WARNING}{format_number(len(prompts.too_long))} too long: .too_long lists them all")
    return Card(prompts.name or "prompts", facts, grids, notes)


def stream_card(stream: PromptStream) -> Card:
    """Where it stands."""
    order = f"shuffled, seed {stream.seed}" if stream.shuffle else "in order"
    return Card(f"stream {stream.prompts.name}".strip(), [_place(stream), f"{stream.taken} taken", order])


def mixture_card(mixture: Mixture) -> Card:
    """Shares asked for and given, and where each set stands."""
    rows: list[tuple[Cell, ...]] = []
    for name, stream in mixture.streams.items():
        given = format_share(mixture.counts[name], mixture.taken) if mixture.taken else "–"
        rows.append((name, format_percent(mixture.weights[name]), given, str(mixture.counts[name]), _place(stream)))
    grid = Grid(tuple(rows), ("set", "share", "taken", "prompts", "stands at"), frozenset({1, 2, 3}))
    return Card("mixture", [f"{mixture.taken} taken", f"seed {mixture.seed}"], [grid])


def _long_grid(prompts: PromptSet) -> Grid:
    longest = sorted(prompts.too_long, key=lambda one: -one.tokens)[:SHOWN]
    rows = tuple((str(one.row), format_number(one.tokens), _head(one.text)) for one in longest)
    limit = "" if prompts.max_prompt_tokens is None else f" than {prompts.max_prompt_tokens} tokens"
    return Grid(rows, ("row", "tokens", "prompt"), frozenset({0, 1}), caption=f"longer{limit}", labels=True)


def _place(stream: PromptStream) -> str:
    if stream.ended:
        return "ended"
    last = "" if stream.epochs is None else f" of {stream.epochs}"
    return f"epoch {stream.epoch + 1}{last}, {stream.position} of {len(stream.prompts)}"


def _head(text: str) -> str:
    return shortened(" ".join(text.split()), HEAD)
