"""Small pieces of HTML, escaped: tables, chips, bars. Theme through Jupyter's variables, each with a fallback."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from typing import Any

from rlbench.monitor.schema import english
from rlbench.monitor.view import PLACES
from rlbench.notebook.base.decimal_columns import aligned
from rlbench.notebook.base.palette import DARK

STYLE = (
    """<style>
.rlb {font-family: var(--jp-ui-font-family, system-ui, sans-serif); font-size: 12px; color-scheme: light dark;
  color: var(--jp-ui-font-color1, CanvasText); line-height: 1.5; container-type: inline-size}
.rlb table {border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 12px; margin: 0}
.rlb th, .rlb td {padding: 0 12px 0 0 !important; text-align: left !important; font-weight: 400; border: 0;
  background: transparent !important; vertical-align: top; max-width: none}
.rlb tr {background: transparent !important}
.rlb th {color: var(--jp-ui-font-color2, GrayText); font-size: 11px}
.rlb th[scope=row] {color: inherit; font-size: 12px; font-weight: 600; white-space: nowrap}
@container (max-width: 640px) {
  .rlb th[scope=row] {white-space: normal; overflow-wrap: anywhere; min-width: 96px}}
.rlb table.labels th[scope=row] {color: var(--jp-ui-font-color2, GrayText); font-weight: 400}
.rlb caption {caption-side: top; text-align: left; padding: 4px 0 0; font-size: 11px; white-space: nowrap;
  color: var(--jp-ui-font-color2, GrayText)}
.rlb .n {text-align: right !important}
.rlb b {font-weight: 600} .rlb .k {white-space: nowrap}
.rlb .q {color: var(--jp-ui-font-color2, GrayText)}
.rlb .w {color: var(--rlb-warn)}
.rlb code, .rlb .t {font-family: var(--jp-code-font-family, monospace); font-size: 12px;
  background: transparent !important;
  white-space: pre-wrap; word-break: break-word}
.rlb .g {border: 1px solid var(--jp-border-color2, #ccc); border-radius: 4px; padding: 4px 8px; margin: 4px 0}
"""
    + f".rlb {{--rlb-warn: #a34e00}} {DARK.format('.rlb')} {{--rlb-warn: #f2a05c}}\n</style>"
)


def escape(value: Any) -> str:
    """Text for HTML: everything a model or a user wrote goes through here."""
    return html.escape(str(value))


def box(*parts: str) -> str:
    """The frame of every view; each part begins a line, also for who takes the tags out."""
    return STYLE + '<div class="rlb">' + "\n".join(parts) + "</div>"


def table(
    head: Sequence[str],
    rows: Iterable[Sequence[str]],
    numeric: Iterable[int] = (),
    caption: str = "",
    named: bool = False,
    look: str = "",
) -> str:
    """A table of escaped or ready-made cells; what attributes and white space say holds on a page without styles.

    Args:
        head: names of the columns; none where all are empty.
        numeric: columns of numbers, aligned at their decimal points.
        caption: what the table is of, escaped.
        named: the first column names its row.
        look: a CSS class; `labels` draws the names of rows like those of columns.
    """
    right = set(numeric)
    drawn = [list(row) for row in rows]
    for i in right:
        having = [row for row in drawn if i < len(row)]
        for row, text in zip(having, aligned([row[i] for row in having], html=True), strict=True):
            row[i] = text

    def cell(tag: str, i: int, text: str, scope: str = "") -> str:
        look = (f" scope={scope}" if scope else "") + (" class=n align=right" if i in right else "")
        look += " align=left" if tag == "th" and i not in right else ""
        return f"<{tag}{look}>{text}</{tag}>"

    def line(row: Sequence[str]) -> str:
        return " ".join(
            cell("th", i, text, "row") if named and i == 0 else cell("td", i, text) for i, text in enumerate(row)
        )

    top = ["<tr>" + " ".join(cell("th", i, t, "col") for i, t in enumerate(head)) + "</tr>"] if any(head) else []
    over = [f"<caption>{caption}</caption>"] if caption else []
    body = "\n".join([*over, *top, *(f"<tr>{line(row)}</tr>" for row in drawn)])
    return f"<table cellpadding=4{f' class={look}' if look else ''}>{body}</table>"


def chip_text(part: str, state: str) -> str:
    """`weights ● resident`, as plain text."""
    sign, word = PLACES.get(state, ("?", state))
    return f"{part.replace('_', ' ')} {sign} {english(word)}"
