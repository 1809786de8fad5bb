"""Small pieces of HTML, escaped: tables, chips, bars. Theme through Jupyter's variables, each with a fallback."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from typing import Any

STYLE = """<style>
.rlb {font-family: var(--jp-ui-font-family, system-ui, sans-serif); font-size: 12px; color-scheme: light dark;
  color: var(--jp-ui-font-color1, CanvasText); line-height: 1.5}
.rlb table {border-collapse: collapse; font-variant-numeric: tabular-nums; margin: 0}
.rlb th, .rlb td {padding: 0 12px 0 0 !important; text-align: left !important; font-weight: 400; border: 0;
  background: transparent !important; vertical-align: top; max-width: none}
.rlb tr {background: transparent !important}
.rlb th {color: var(--jp-ui-font-color2, GrayText); font-size: 11px}
.rlb .n {text-align: right !important}
.rlb b {font-weight: 600}
.rlb .q {color: var(--jp-ui-font-color2, GrayText)}
.rlb .w {color: var(--jp-warn-color0, #b35900)}
.rlb code, .rlb .t {font-family: var(--jp-code-font-family, monospace); font-size: 12px;
  background: transparent !important;
  white-space: pre-wrap; word-break: break-word}
.rlb .g {border: 1px solid var(--jp-border-color2, #ccc); border-radius: 4px; padding: 4px 8px; margin: 4px 0}
.rlb .neg {background: rgba(213, 94, 0, .28)} .rlb .pos {background: rgba(0, 114, 178, .25)}
</style>"""

CHIPS = {"cuda": ("●", "resident"), "cpu": ("○", "host"), "meta": ("◌", "released"), "empty": ("◌", "empty"),
         "torn": ("✕", "torn"), "none": ("–", "none")}  # fmt: skip


def escape(value: Any) -> str:
    """Text for HTML: everything a model or a user wrote goes through here."""
    return html.escape(str(value))


def box(*parts: str) -> str:
    """The frame of every view."""
    return STYLE + '<div class="rlb">' + "".join(parts) + "</div>"


def table(head: Sequence[str], rows: Iterable[Sequence[str]], numeric: Iterable[int] = ()) -> str:
    """A table of escaped or ready-made cells; columns in `numeric` are right-aligned."""
    right = set(numeric)

    def cell(tag: str, i: int, text: str) -> str:
        return f"<{tag}{' class=n' if i in right else ''}>{text}</{tag}>"

    top = "<tr>" + "".join(cell("th", i, t) for i, t in enumerate(head)) + "</tr>" if any(head) else ""
    body = "".join("<tr>" + "".join(cell("td", i, t) for i, t in enumerate(row)) + "</tr>" for row in rows)
    return f"<table>{top}{body}</table>"


def chip(part: str, state: str) -> str:
    """`weights ● resident`: a sign and always the word."""
    sign, word = CHIPS.get(state, ("?", state))
    part = part.replace("_", " ")
    return f'<span title="{escape(part)}: {escape(state)}">{escape(part)} {sign} {escape(word)}</span>'


def gib(nbytes: float) -> str:
    """Bytes for a reader, in GiB or MiB, three significant digits."""
    return f"{nbytes / 2**30:.3g} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.3g} MiB"
