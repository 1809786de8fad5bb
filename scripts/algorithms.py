"""Keep docs/algorithms.md true to `rlbench.rl`: its default column is written from the code, the rest is checked.

    python scripts/algorithms.py --write     after a default or a name changed
    python scripts/algorithms.py             says what differs; exit status 1 if anything does

A table row is `| name | formula | paper | defaults | verl | TRL | OpenRLHF |`. Every public name of `rlbench.rl` has
exactly one row, every row names something public, and every arXiv id of a row is named in the code's docstring.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from pathlib import Path
from typing import Any

from rlbench import rl
from rlbench.rl.policy import default_of

PAGE = Path(__file__).parent.parent / "docs" / "algorithms.md"
ARXIV = re.compile(r"\b\d{4}\.\d{5}\b")
COLUMNS, NAME, PAPER, DEFAULTS = 7, 0, 2, 3
SHARED_ROW = "shared by all"
TYPES = frozenset(
    "AdvantageFunction BatchTotals Loss LossInputs MismatchCorrection PolicyLoss Side TeacherTokens TokenFilter "
    "presets resolve".split()
)
"""Contracts, bases and look-ups: documented in their docstrings, not algorithms of their own."""


def rows(text: str) -> list[list[str]]:
    """The cells of every table row but headings and rules."""
    found = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) == COLUMNS and cells[NAME] != "name" and not set(cells[NAME]) <= set("-: "):
            found.append(cells)
    return found


def name_of(cell: str) -> str:
    """The public name a row is about: `` `k1_plus` ("k1+") `` is `k1_plus`."""
    return cell.split()[0].strip("`")


def defaults_of(name: str) -> str:
    """The defaults of a value or function as the table shows them."""
    value = getattr(rl, name)
    if isinstance(value, type) and issubclass(value, rl.PolicyLoss):
        shared = {f.name: default_of(f) for f in dataclasses.fields(rl.PolicyLoss)}
        shown = [
            (f.name, default_of(f))
            for f in dataclasses.fields(value)
            if f.name not in shared or default_of(f) != shared[f.name] or f.name == "aggregation"
        ]
        shown.sort(key=lambda pair: pair[0] in shared)
    elif dataclasses.is_dataclass(value):
        missing = dataclasses.MISSING
        shown = [
            (f.name, default_of(f))
            for f in dataclasses.fields(value)
            if f.default is not missing or f.default_factory is not missing
        ]
    else:
        given = inspect.signature(value).parameters.values()
        shown = [(p.name, p.default) for p in given if p.default is not p.empty]
    return ", ".join(f"{key}={default!r}" for key, default in shown) or "–"


def documentation(name: str) -> str:
    """What the code says of a name: its docstring, those of its bases, and its module's."""
    value = getattr(rl, name)
    parents = [base.__doc__ or "" for base in getattr(value, "__mro__", ())]
    module = inspect.getmodule(value)
    return " ".join(
        [
            value.__doc__ or "",
            *parents,
            str(getattr(value, "paper", "")),
            module.__doc__ or "" if module else "",
        ]
    )


def problems(text: str) -> list[str]:
    """What in the page is not as the code has it."""
    found = []
    named = [name_of(cells[NAME]) for cells in rows(text) if cells[NAME] != SHARED_ROW]
    public = set(rl.__all__) - TYPES
    found += [f"{name} is public and has no row" for name in sorted(public - set(named))]
    found += [f"{name} has a row and is not in rlbench.rl.__all__" for name in sorted(set(named) - public)]
    found += [f"{name} has {named.count(name)} rows" for name in sorted(set(named)) if named.count(name) > 1]
    for cells in rows(text):
        name = name_of(cells[NAME])
        if name not in public:
            continue
        if cells[DEFAULTS] != table_text(defaults_of(name)):
            found.append(f"{name}: the page says {cells[DEFAULTS]!r}, the code {table_text(defaults_of(name))!r}")
        said = documentation(name)
        found += [
            f"{name}: {paper} is not in its docstring" for paper in ARXIV.findall(cells[PAPER]) if paper not in said
        ]
        if not cells[1].strip("– "):
            found.append(f"{name} has no formula")
    return found


def rewritten(text: str) -> str:
    """The page with its default column as the code has it."""
    lines = []
    for line in text.splitlines():
        cells = rows(line)
        if cells and name_of(cells[0][NAME]) in rl.__all__:
            cells[0][DEFAULTS] = table_text(defaults_of(name_of(cells[0][NAME])))
            line = f"| {' | '.join(cells[0])} |"
        lines.append(line)
    return "\n".join(lines) + "\n"


def table_text(text: str) -> str:
    """Text that stands in a cell."""
    return text.replace("|", "\\|")


def main(arguments: list[str]) -> int:
    """Check, or write; the exit status."""
    text = PAGE.read_text()
    if "--write" in arguments:
        text = rewritten(text)
        PAGE.write_text(text)
    found: Any = problems(text)
    print("\n".join(found) or f"{PAGE.name}: as the code has it")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
