"""A card: what a value says at the end of a cell. One set of words, laid out once as HTML and once as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlbench.notebook.base.decimal_columns import aligned
from rlbench.notebook.base.inert import cut, one_line, visible
from rlbench.notebook.base.markup import box, escape, table

WARNING = "⚠ "
"""A cell or a note that begins so is shown as a warning."""
MOST = 400
"""Characters of a cell or a note."""
UNBROKEN = 44
"""Characters of a cell up to which it stays on one line."""


@dataclass(frozen=True)
class Pair:
    """A value with its name before it: `entropy 1.2 nats`."""

    name: str
    value: str

    def __str__(self) -> str:
        return f"{self.name} {self.value}"


Cell = str | Pair


@dataclass(frozen=True)
class Grid:
    """Rows of cells, aligned; the first cell of a row names it.

    `head`: names of the columns, where they need any. `labels`: the first cells say what the row is about, as "dtype"
    does, and are drawn quietly; else they are the things themselves.
    """

    rows: tuple[tuple[Cell, ...], ...]
    head: tuple[str, ...] = ()
    numeric: frozenset[int] = frozenset()
    caption: str = ""
    labels: bool = False

    def html(self) -> str:
        """A table."""
        width = max((len(row) for row in self.rows), default=0)
        rows = [[_cell(cell) for cell in row] + [""] * (width - len(row)) for row in self._aligned(html=True)]
        return table(
            [_inert(name) for name in self.head],
            rows,
            self.numeric,
            _inert(self.caption),
            named=True,
            look="labels" if self.labels else "",
        )

    def text(self) -> str:
        """Lines of text, in columns."""
        rows = [tuple(map(_line, row)) for row in (*([self.head] if any(self.head) else []), *self._aligned())]
        count = max((len(row) for row in rows), default=0)
        widths = [max((len(row[i]) for row in rows if i < len(row)), default=0) for i in range(count)]
        lines = [
            "  ".join(
                f"{cell:>{widths[i]}}" if i in self.numeric else f"{cell:<{widths[i]}}" for i, cell in enumerate(row)
            ).rstrip()
            for row in rows
        ]
        return "\n".join([*([_line(self.caption)] if self.caption else []), *lines])

    def _aligned(self, html: bool = False) -> list[list[Cell]]:
        """The rows, numbers of a column aligned at their decimal points."""
        rows: list[list[Cell]] = [list(row) for row in self.rows]
        for i in self.numeric:
            having = [row for row in rows if i < len(row) and isinstance(row[i], str)]
            for row, cell in zip(having, aligned([str(row[i]) for row in having], html), strict=True):
                row[i] = cell
        return rows


@dataclass(frozen=True)
class Card:
    """A title, short facts beside it, tables, notes. All of it is plain text; whoever shows it escapes."""

    title: str
    facts: Sequence[str] = ()
    grids: Sequence[Grid] = ()
    notes: Sequence[str] = ()

    def html(self) -> str:
        """The card for an output cell, inert whatever is in it."""
        head = " · ".join(_inert(fact) for fact in self.facts if fact)
        lead = f"<div><b>{_inert(self.title)}</b>{' &nbsp; ' if head else ''}{head}</div>"
        notes = "\n".join(f'<div class="{"w" if _warns(note) else "q"}">{_inert(note)}</div>' for note in self.notes)
        return box(lead, *(grid.html() for grid in self.grids if grid.rows), notes)

    def text(self) -> str:
        """The card for a terminal, a diff, and readers of text."""
        lead = "   ".join(filter(None, [_line(self.title), " · ".join(_line(fact) for fact in self.facts if fact)]))
        return "\n".join([lead, *(grid.text() for grid in self.grids if grid.rows), *map(_line, self.notes)])

    def bundle(self) -> dict[str, str]:
        """Both, as IPython takes them."""
        return {"text/html": self.html(), "text/plain": self.text()}


def _cell(cell: Cell) -> str:
    if isinstance(cell, Pair):
        return f"<span class=k><span class=q>{_inert(cell.name)}</span> {_inert(cell.value)}</span>"
    look = " ".join(filter(None, ["w" if _warns(cell) else "", "k" if len(cell) <= UNBROKEN else ""]))
    return f'<span class="{look}">{_inert(cell)}</span>' if look else _inert(cell)


def _warns(text: str) -> bool:
    return text.startswith(WARNING)


def _inert(text: str) -> str:
    return escape(cut(visible(text), MOST))


def _line(cell: Cell) -> str:
    return one_line(cell, MOST)
