"""The session's state as one value, and the events that change it.

`reduce(state, event)` is the only way the state changes; the journal is the list of events. So a monitor that
restarts reads its journal and stands where it stood.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

Event = dict[str, Any]
State = dict[str, Any]


def initial(name: str) -> State:
    """A session nobody has built anything in."""
    return {
        "name": name, "epoch": 0, "driver": None, "config": {}, "engines": {}, "version": 0, "step": 0,
        "rollouts": 0, "history": [],
    }  # fmt: skip


def reduce(state: State, event: Event) -> State:
    """The state after one event. Events: `set` (key, value), `engine` (name, fields; None drops it), `record` (a step's
    record), `drive` (epoch, driver).
    """
    kind = event["do"]
    if kind == "set":
        return state | {event["key"]: event["value"]}
    if kind == "engine":
        engines = dict(state["engines"])
        if event["fields"] is None:
            engines.pop(event["name"], None)
        else:
            engines[event["name"]] = engines.get(event["name"], {}) | event["fields"]
        return state | {"engines": engines}
    if kind == "record":
        return state | {"history": [*state["history"], event["record"]]}
    if kind == "drive":
        return state | {"epoch": event["epoch"], "driver": event["driver"]}
    raise ValueError(f"unknown event {kind!r}")


class Journal:
    """Events on disk, one JSON line each, written before they count."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def replay(self, state: State) -> State:
        """The state after all whole lines of the journal.

        A last line cut by a crash was never answered for; it is removed, so that the next event gets a line of its own.
        """
        try:
            written = self._path.read_bytes()
        except FileNotFoundError:
            return state
        whole = written.rfind(b"\n") + 1
        for line in written[:whole].splitlines():
            state = reduce(state, json.loads(line))
        os.truncate(self._path, whole)
        return state

    def append(self, event: Event) -> None:
        """Write one event."""
        with open(os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "a") as file:
            file.write(json.dumps(event) + "\n")

    def remove(self) -> None:
        """The session is over."""
        self._path.unlink(missing_ok=True)
