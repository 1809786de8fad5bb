"""A live view at the end of a cell, which hears clicks while a cell runs, and beside it its static form.

They are two outputs. In one output the front end would choose: JupyterLab takes the widget of whatever else there is,
and where the kernel is gone says "model not found" in place of all of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from rlbench.notebook.base.markup import sheet

STILL = "rlb-still"
"""Class of the static form. What a drawing puts into the page itself has the class `rlb-live`."""
STYLE = f"<style>\n{sheet('still')}</style>"
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


class Kept:
    """The views that are held, as ipywidgets holds every widget until it is closed; of more than `most` the oldest are
    let go: a page shows their static form, and a notebook is saved without them."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._views: deque[Any] = deque()

    def add(self, view: Any) -> None:
        """Hold one more; it has `release`."""
        self._views.append(view)
        while len(self._views) > self._most:
            self._views.popleft().release()


def close_tree(widget: Any) -> None:
    """Close a widget with all it is made of, so that no notebook is saved with it; pages show the static form then."""
    for child in getattr(widget, "children", ()) or ():
        close_tree(child)
    for look in ("layout", "style"):
        part: Any = getattr(widget, look, None)
        if hasattr(part, "close"):
            part.close()
    widget.close()


def route_by_front_end(widget: Any) -> None:
    """Let the front end choose the thread that hears a click, for a widget of ours with its open comm and its children.

    JupyterLab sends widget messages to a subshell (ipykernel 7), which a running cell does not block. ipykernel 7.4
    sends them to the shell that last wrote to the widget instead: the main one, where they wait for the cell.
    """
    comm: Any = getattr(widget, "comm", None)
    if hasattr(comm, "_reply_subshell_for"):  # a private name: ipykernel 7.4 has it, others need no mending
        comm._reply_subshell_for = lambda data, default: default
    for child in getattr(widget, "children", ()) or ():
        route_by_front_end(child)


def works_while_busy() -> bool:
    """Whether clicks can be heard while a cell runs: ipykernel 7 or later (with a front end that uses subshells)."""
    import ipykernel

    return int(ipykernel.version_info[0]) >= 7
