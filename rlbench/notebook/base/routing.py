"""Which thread of the kernel hears a click: the one the front end asked for, so that controls act while a cell runs.

JupyterLab sends widget messages to a subshell (ipykernel 7), which a running cell does not block. ipykernel 7.4 sends
them to the shell that last wrote to the widget instead: the main one, where they wait for the cell. Nothing here acts
before 7.4: there is nothing to mend (6 has no subshells, clicks wait for the cell; 7.0 to 7.3 do as asked).
"""

from __future__ import annotations

from typing import Any


def route_by_front_end(widget: Any) -> None:
    """Let the front end choose the thread again, for one of rlbench's own widgets and all its children.

    Args:
        widget: an ipywidgets or anywidget widget whose comm is open; call it once it has its children.
    """
    seen: set[int] = set()
    waiting = [widget]
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        comm: Any = getattr(one, "comm", None)
        if hasattr(comm, "_reply_subshell_for"):  # a private name: ipykernel 7.4 has it, others need no mending
            comm._reply_subshell_for = _as_asked
        waiting.extend(getattr(one, "children", ()) or ())


def works_while_busy() -> bool:
    """Whether clicks can be heard while a cell runs: ipykernel 7 or later (with a front end that uses subshells)."""
    import ipykernel

    return int(ipykernel.version_info[0]) >= 7


def _as_asked(data: Any, default: Any) -> Any:
    return default
