"""How rewards look side by side: a row of numbers each, where they disagree, what was slow, what failed."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from rlbench.notebook.base.markup import cut, one_line
from rlbench.notebook.cards.card import WARNING, Card, Cell, Grid
from rlbench.units import format_number, format_seconds, format_share

DISAGREEMENTS, SLOWEST, ERRORS = 6, 3, 3
"""Rows of each table; the methods give all."""
DRAWN = 6
"""Distributions in one chart."""
NAME, TEXT = 40, 120
"""Characters of a reward's name, and of a prompt or a completion."""
SLOW_S = 0.001
"""Below this no completion is called slow."""


def comparison_card(comparison: Any) -> Card:
    """Numbers and distributions of every reward; of the second the counts, disagreements, slowest completions."""
    base = comparison.rollouts(comparison.baseline)
    facts = (f"{format_number(base.samples)} completions", f"{format_number(len(base))} prompts")
    grids = [_numbers(comparison), _counts(comparison), *_disagreements(comparison)]
    drawn = type(comparison)({name: comparison.scored[name] for name in comparison.names[:DRAWN]})
    grids += [_slowest(comparison), _errors(comparison)]
    return Card("reward comparison", facts, grids, _remarks(comparison), drawn.plot())


def errors_card(errors: Any) -> Card:
    """What scoring failed on, one row per completion."""
    rows = [(str(e.index), _text(e.prompt), _text(e.error), _text(e.line)) for e in errors[:50]]
    more = [f"{len(errors) - len(rows)} more: rollouts.reward_errors.table()"] if len(errors) > len(rows) else []
    grid = Grid(rows, ("completion", "prompt", "error", "line"))
    return Card("reward errors", (f"{len(errors)} failed" if len(errors) else "none",), [grid], more)


def _numbers(comparison: Any) -> Grid:
    against = f"correlation with {_name(comparison.baseline)}", "changed", "order changed", "advantage flipped"
    head = ("", "mean", "std", "failed", "prompts with a spread", *against, "seconds")
    rows = []
    for name, a in comparison.agreements.items():
        compared = (_number(a.correlation), _percent(a.changed), _percent(a.order_changed), _percent(a.flipped))
        beside = ("–",) * 4 if name == comparison.baseline else compared
        alone = _number(a.mean), _number(a.std), str(a.errors), _percent(a.spread)
        rows.append((_name(name), *alone, *beside, _number(a.seconds)))
    return Grid(rows, head, frozenset(range(1, len(head))))


def _counts(comparison: Any) -> Grid:
    """How often which value of the baseline meets which of the second reward."""
    rows, columns, counts = comparison.counts()
    body = tuple((row, *(format_number(int(c)) for c in line)) for row, line in zip(rows, counts, strict=True))
    caption = f"completions: {_name(comparison.baseline)} down, {_name(comparison.names[1])} across"
    return Grid(body, ("", *columns), frozenset(range(1, len(columns) + 1)), caption)


def _disagreements(comparison: Any) -> list[Grid]:
    """The largest of each reward against the baseline."""
    grids = []
    old = _name(comparison.baseline)
    for name in comparison.names[1:]:
        found = comparison.disagreements(None, name)
        rows = [
            (str(d.index), *map(_text, (d.prompt, d.response, d.label)), *map(_reward, (d.old, d.new, d.diff)))
            for d in found[:DISAGREEMENTS]
        ]
        more = f"; {len(found) - len(rows):,} more: .disagreements(n)" if len(found) > len(rows) else ""
        head = ("completion", "prompt", "response", "label", old, _name(name), "difference")
        caption = f"where {_name(name)} disagrees with {old}, most first{more}"
        grids.append(Grid(rows, head, frozenset({4, 5, 6}), caption))
    return grids


def _slowest(comparison: Any) -> Grid:
    slow = [t for t in comparison.slowest(SLOWEST) if t.seconds >= SLOW_S]
    rows = [(str(t.index), _name(t.name), format_seconds(t.seconds), _text(t.response)) for t in slow]
    return Grid(rows, ("completion", "reward", "took", "response"), frozenset({2}), "slowest")


def _errors(comparison: Any) -> Grid:
    rows: list[tuple[Cell, ...]] = []
    for name in comparison.names:
        errors = comparison.errors(name)
        for e in errors[:ERRORS]:
            rows.append((str(e.index), _name(name), _text(e.error), _text(e.line)))
        if len(errors) > ERRORS:
            rows.append(("…", _name(name), f"{len(errors) - ERRORS:,} more: .errors({name!r})", ""))
    return Grid(rows, ("completion", "reward", "error", "line"), caption="failed")


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
