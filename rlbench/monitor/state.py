"""The session's state as one value, and the events that change it.

`reduce(state, event)` is the only way the state changes; the journal is the list of events. So a monitor that
restarts reads its journal and stands where it stood.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

DRAWN = ("rollouts", "cursor")
PLACE = ("step", "version", "tip", "cut", *DRAWN)
"""What says where a session stands in its own course, and of that, how far it has drawn; a snapshot keeps it."""
LENGTHS_KEPT = 32

Event = dict[str, Any]
State = dict[str, Any]


def initial(name: str) -> State:
    """A session nobody has built anything in.

    `unhealed`: records, as they were, of engines that a heal began to bring back and has not. `cut`: of an iteration
    that was stopped with steps of it done, the trainer and the snapshot of before it.
    """
    return {
        "name": name,
        "epoch": 0,
        "driver": None,
        "config": {},
        "engines": {},
        "version": 0,
        "highest": 0,
        "step": 0,
        "rollouts": 0,
        "records": [],
        "tip": None,
        "snapshots": {},
        "undo": [],
        "branch": "main",
        "branches": {},
        "paused": False,
        "lengths": [],
        "trackers": [],
        "cursor": None,
        "unhealed": {},
        "cut": None,
    }


def history(state: State) -> list[dict[str, Any]]:
    """The step records that led to where the session stands, oldest first."""
    return [state["records"][at]["record"] for at in course(state)]


def course(state: State) -> list[int]:
    """Which of the records those are, by number.

    Records are a tree: each knows the one before it. Going back to a snapshot moves the tip; nothing is lost.
    """
    found: list[int] = []
    at = state["tip"]
    while at is not None:
        found.append(at)
        at = state["records"][at]["parent"]
    return found[::-1]


def reduce(state: State, event: Event) -> State:
    """The state after one event.

    Events: `set` (key, value), `engine` (name, fields; None drops it), `record` (a step's record), `drive` (epoch,
    driver), `lengths` (entry: those of a rollout), `snapshot` (id, fields; None drops it): keeps where the session
    stands, `restore` (id, stays): goes back there under a version that no weights had before; where it `stays`, what
    was drawn since counts. The snapshot at which the session stood last is the last of them.
    """
    kind = event["do"]
    if kind == "set":
        key, value = event["key"], event["value"]
        highest = max(state["highest"], value) if key == "version" else state["highest"]
        return state | {key: value, "highest": highest}
    if kind == "engine":
        engines = dict(state["engines"])
        if event["fields"] is None:
            engines.pop(event["name"], None)
        else:
            engines[event["name"]] = engines.get(event["name"], {}) | event["fields"]
        return state | {"engines": engines}
    if kind == "record":
        entry = {"parent": state["tip"], "record": event["record"]}
        return state | {"records": [*state["records"], entry], "tip": len(state["records"])}
    if kind == "snapshot":
        snapshots = dict(state["snapshots"])
        if event["fields"] is None:
            snapshots.pop(event["id"], None)
        else:
            snapshots[event["id"]] = {key: state[key] for key in PLACE} | event["fields"]
        undo = [i for i in state["undo"] if i in snapshots]
        return state | {"snapshots": snapshots, "undo": undo}
    if kind == "restore":
        snapshots = dict(state["snapshots"])
        snapshots[event["id"]] = back = snapshots.pop(event["id"])
        place = {key: back[key] for key in PLACE if not (event.get("stays") and key in DRAWN)}
        version = state["highest"] + 1
        return state | place | {"snapshots": snapshots, "version": version, "highest": version}
    if kind == "lengths":
        entry = event["entry"] | {"step": state["step"]}
        return state | {"lengths": [*state["lengths"], entry][-LENGTHS_KEPT:]}
    if kind == "drive":
        return state | {"epoch": event["epoch"], "driver": event["driver"]}
    raise ValueError(f"unknown event {kind!r}")


class Journal:
    """Events on disk, one JSON line each, written before they count."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.once: list[str] = []

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
            event = json.loads(line)
            self.once.append(event.get("id_once", ""))
            state = reduce(state, event)
        os.truncate(self._path, whole)
        return state

    def append(self, event: Event) -> None:
        """Write one event."""
        with open(os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "a") as file:
            file.write(json.dumps(event) + "\n")

    def remove(self) -> None:
        """The session is over."""
        self._path.unlink(missing_ok=True)
