"""A live view at the end of a cell, and beside it its static form, for whoever reads the notebook without the kernel.

They are two outputs. In one output the front end would choose: JupyterLab takes the widget of whatever else there is,
and where the kernel is gone says "model not found" in place of all of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

STILL = "rlb-still"
"""Class of the static form. What a drawing puts into the page itself has the class `rlb-live`."""
STYLE = """<style>
.jp-OutputArea-child:has(.rlb-live) + .jp-OutputArea-child:has(.rlb-still),
.cell_container:has(.rlb-live) .rlb-still,
.jp-OutputArea-child:not(:has(.jp-OutputArea-output > *)):has(+ .jp-OutputArea-child .rlb-still) {
  display: none !important}
</style>"""
"""Of the two one is seen: the live view once it is drawn; else the static form, without the front end's message."""


def display_both(live: Any, still: Mapping[str, str]) -> Any:
    """Display a widget and, below it, the bundle that stays of it; returns the display handle of the latter."""
    from IPython.display import DisplayHandle, display

    display({**(live._repr_mimebundle_() or {}), "text/html": "<div></div>", "text/plain": " "}, raw=True)
    handle = DisplayHandle()
    handle.display(framed(still), raw=True)
    return handle


def framed(still: Mapping[str, str]) -> dict[str, str]:
    """The bundle as `display_both` shows it, for an update of its output."""
    return {**still, "text/html": f'{STYLE}<div class="{STILL}">{still["text/html"]}</div>'}
