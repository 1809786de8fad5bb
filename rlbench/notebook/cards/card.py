"""A card: what a value says at the end of a cell. One set of words, laid out once as HTML and once as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

from rlbench.notebook.base.figures import aligned
from rlbench.notebook.base.markup import box, cut, escape, one_line, visible
from rlbench.notebook.charts.chart import Chart
from rlbench.notebook.charts.svg import page

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


class Markup(str):
    """A cell of ready-made HTML, escaped by who made it."""


Cell = str | Pair


@dataclass(frozen=True)
class Grid:
    """Rows of cells, numbers aligned at their decimal points; the first cell of a row names it.

    `head`: names of the columns, where they need any. `labels`: the first cells say what the row is about, as "dtype"
    does, and are drawn quietly; else they are the things themselves. What attributes and white space say in the HTML
    holds on a page without styles.
    """

    rows: Sequence[Sequence[Cell]]
    head: tuple[str, ...] = ()
    numeric: frozenset[int] = frozenset()
    caption: str = ""
    labels: bool = False

    def html(self) -> str:
        """A table."""
        width = max((len(row) for row in self.rows), default=0)
        lines = [f"<caption>{_inert(self.caption)}</caption>"] if self.caption else []
        if any(self.head):
            lines.append(self._line([_inert(name) for name in self.head], ["th scope=col"] * len(self.head)))
        for row in self._aligned(html=True):
            cells = [_cell(cell) for cell in row] + [""] * (width - len(row))
            lines.append(self._line(cells, ["th scope=row", *["td"] * (width - 1)]))
        return f"<table cellpadding=4{' class=labels' if self.labels else ''}>" + "\n".join(lines) + "</table>"

    def text(self) -> str:
        """Lines of text, in columns."""
        rows = [[_line(cell) for cell in row] for row in (*([self.head] if any(self.head) else []), *self._aligned())]
        widths = [max(map(len, column)) for column in zip_longest(*rows, fillvalue="")]
        lines = [
            "  ".join(
                cell.rjust(widths[i]) if i in self.numeric else cell.ljust(widths[i]) for i, cell in enumerate(row)
            ).rstrip()
            for row in rows
        ]
        return "\n".join([*([_line(self.caption)] if self.caption else []), *lines])

    def _line(self, cells: Sequence[str], tags: Sequence[str]) -> str:
        drawn = []
        for i, (cell, tag) in enumerate(zip(cells, tags, strict=True)):
            left = " align=left" if tag.startswith("th") else ""
            side = " class=n align=right" if i in self.numeric else left
            drawn.append(f"<{tag}{side}>{cell}</{tag[:2]}>")
        return f"<tr>{' '.join(drawn)}</tr>"

    def _aligned(self, html: bool = False) -> list[list[Cell]]:
        rows = [list(row) for row in self.rows]
        for i in self.numeric:
            having = [row for row in rows if i < len(row) and isinstance(row[i], str)]
            for row, cell in zip(having, aligned([str(row[i]) for row in having], html), strict=True):
                row[i] = cell
        return rows


@dataclass(frozen=True)
class Card:
    """A title, short facts beside it, tables, notes: plain text, escaped here; and below it, perhaps, a chart.

    `detail`: ready-made HTML between card and chart, escaped by who made it; a reader of text does without.
    """

    title: str
    facts: Sequence[str] = ()
    grids: Sequence[Grid] = ()
    notes: Sequence[str] = ()
    chart: Chart | None = None
    detail: str = ""

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
        """Both with the chart, as IPython takes them."""
        html, text = [self.html(), self.detail], [self.text()]
        if self.chart is not None:
            html, text = [*html, page(self.chart)], [*text, repr(self.chart)]
        return {"text/html": "\n".join(filter(None, html)), "text/plain": "\n".join(filter(None, text))}


def counted(count: int, what: str) -> str:
    """`1 step`, `1,024 steps`."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def _cell(cell: Cell) -> str:
    if isinstance(cell, Markup):
        return str(cell)
    if isinstance(cell, Pair):
        return f"<span class=k><span class=q>{_inert(cell.name)}</span> {_inert(cell.value)}</span>"
    look = " ".join(filter(None, ["w" if _warns(cell) else "", "k" if len(cell) <= UNBROKEN else ""]))
    return f'<span class="{look}">{_inert(cell)}</span>' if look else _inert(cell)


def _warns(text: str) -> bool:
    return text.startswith((WARNING, "✕ "))


def _inert(text: str) -> str:
    return escape(cut(visible(text), MOST))


def _line(cell: Cell) -> str:
    return one_line(cell, MOST)
