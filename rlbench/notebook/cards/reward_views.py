"""How rewards look side by side: a row of numbers each, where they disagree, what was slow, what failed."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from rlbench.notebook.base.inert import cut, one_line
from rlbench.notebook.cards.card import WARNING, Card, Cell, Grid
from rlbench.notebook.cards.card_view import CardView
from rlbench.units import format_number, format_seconds, format_share

DISAGREEMENTS, SLOWEST, ERRORS = 6, 3, 3
"""Rows of each table; the methods give all."""
DRAWN = 6
"""Distributions in one chart."""
NAME, TEXT = 40, 120
"""Characters of a reward's name, and of a prompt or a completion."""
SLOW_S = 0.001
"""Below this no completion is called slow."""


def comparison_view(comparison: Any) -> CardView:
    """The card of a comparison, and the rewards' distributions."""
    shown = type(comparison)({name: comparison.scored[name] for name in comparison.names[:DRAWN]})
    return CardView(comparison_card(comparison), shown.plot())


def comparison_card(comparison: Any) -> Card:
    """Numbers of every reward; of the second also the counts, the disagreements and the slowest completions."""
    base = comparison.rollouts(comparison.baseline)
    facts = (f"{format_number(base.samples)} completions", f"{format_number(len(base))} prompts")
    grids = [_numbers(comparison), _counts(comparison), *_disagreements(comparison)]
    last = [grid for grid in (_slowest(comparison), _errors(comparison)) if grid is not None]
    return Card("reward comparison", facts, [*grids, *last], _remarks(comparison))


def errors_card(errors: Any) -> Card:
    """What scoring failed on, one row per completion."""
    rows = tuple((str(e.index), _text(e.prompt), _text(e.error), _text(e.line)) for e in errors[:50])
    more = [f"{len(errors) - len(rows)} more: rollouts.reward_errors.table()"] if len(errors) > len(rows) else []
    grid = Grid(rows, ("completion", "prompt", "error", "line"))
    return Card("reward errors", (f"{len(errors)} failed" if len(errors) else "none",), [grid], more)


def _numbers(comparison: Any) -> Grid:
    against = f"correlation with {_name(comparison.baseline)}", "changed", "order changed", "advantage flipped"
    head = ("", "mean", "std", "failed", "prompts with a spread", *against, "seconds")
    rows = tuple(_row(name, one, name == comparison.baseline) for name, one in comparison.agreements.items())
    return Grid(rows, head, frozenset(range(1, len(head))))


def _row(name: str, agreement: Any, own: bool) -> tuple[Cell, ...]:
    changes = map(_percent, (agreement.changed, agreement.order_changed, agreement.flipped))
    against = ("–",) * 4 if own else (_number(agreement.correlation), *changes)
    alone = _number(agreement.mean), _number(agreement.std), str(agreement.errors), _percent(agreement.spread)
    return (_name(name), *alone, *against, _number(agreement.seconds))


def _counts(comparison: Any) -> Grid:
    """How often which value of the baseline meets which of the second reward."""
    rows, columns, counts = comparison.counts()
    second = comparison.names[1]
    body = tuple((row, *(format_number(int(c)) for c in line)) for row, line in zip(rows, counts, strict=True))
    caption = f"completions: {_name(comparison.baseline)} down, {_name(second)} across"
    return Grid(body, ("", *columns), frozenset(range(1, len(columns) + 1)), caption)


def _disagreements(comparison: Any) -> list[Grid]:
    """The largest of each reward against the baseline."""
    grids = []
    old = _name(comparison.baseline)
    for name in comparison.names[1:]:
        found = comparison.disagreements(None, name)
        rows = tuple(
            (str(d.index), *map(_text, (d.prompt, d.response, d.label)), *map(_reward, (d.old, d.new, d.diff)))
            for d in found[:DISAGREEMENTS]
        )
        more = f"; {len(found) - len(rows):,} more: .disagreements(n)" if len(found) > len(rows) else ""
        head = ("completion", "prompt", "response", "label", old, _name(name), "difference")
        caption = f"where {_name(name)} disagrees with {old}, most first{more}"
        grids += [Grid(rows, head, frozenset((4, 5, 6)), caption)] if rows else []
    return grids


def _slowest(comparison: Any) -> Grid | None:
    found = [t for t in comparison.slowest(SLOWEST) if t.seconds >= SLOW_S]
    rows = tuple((str(t.index), _name(t.name), format_seconds(t.seconds), _text(t.response)) for t in found)
    return Grid(rows, ("completion", "reward", "took", "response"), frozenset((2,)), "slowest") if rows else None


def _errors(comparison: Any) -> Grid | None:
    rows: list[tuple[Cell, ...]] = []
    for name in comparison.names:
        errors = comparison.errors(name)
        for e in errors[:ERRORS]:
            rows.append((str(e.index), _name(name), _text(e.error), _text(e.line)))
        if len(errors) > ERRORS:
            rows.append(("…", _name(name), f"{len(errors) - ERRORS:,} more: .errors({name!r})", ""))
    return Grid(tuple(rows), ("completion", "reward", "error", "line"), caption="failed") if rows else None


def _remarks(comparison: Any) -> list[str]:
    agreements = comparison.agreements
    notes = [
        f"{WARNING}{_name(name)} gives every prompt's completions one reward: no advantage, nothing to learn from"
        for name, a in agreements.items()
        if a.spread == 0
    ]
    same = [name for name in comparison.names[1:] if agreements[name].changed == 0 and not agreements[name].errors]
    notes += [f"{_name(name)} agrees with {_name(comparison.baseline)} on all completions" for name in same]
    if len(comparison.names) > DRAWN:
        notes.append(f"distributions of the first {DRAWN} of {len(comparison.names)}")
    return [*notes, "flipped: the advantage against the group's mean has the opposite sign"]


def _name(name: str) -> str:
    return one_line(name, NAME)


def _text(value: Any) -> str:
    """A text of a model or a user on one line; `Card` escapes it."""
    return "–" if value is None else cut(" ".join(str(value).split("\n")), TEXT)


def _reward(value: float) -> str:
    return "failed" if math.isnan(value) else format_number(np.float64(value))


def _number(value: float) -> str:
    return "–" if math.isnan(value) else format_number(float(value))


def _percent(share: float) -> str:
    return "–" if math.isnan(share) else format_share(share, 1)
