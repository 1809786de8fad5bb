"""The session's state as one value, and the events that change it.

`reduce(state, event)` is the only way the state changes; the journal is the list of events. So a monitor that
restarts reads its journal and stands where it stood.
"""

from __future__ import annotations

import collections
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

DRAWN = ("rollouts", "cursor")
PLACE = ("step", "version", "tip", "cut", "setup", "reference", *DRAWN)
"""What says where a session stands in its own course, and of that, how far it has drawn; a snapshot keeps it."""
LENGTHS_KEPT = 32
BEGIN = -1
"""In the place of a step record's number: before the first step."""
ONCE_KEPT = 256
"""Events of which is known that they were applied: one whose answer was lost is sent again."""

LISTS = ("undo", "spare", "lengths", "trackers", "defaults", "evaluations", "logged")

Event = dict[str, Any]
State = dict[str, Any]


class StepLog(Sequence[dict[str, Any]]):
    """The records of all steps in the order they came, each with its `parent` and its `place` in its course.

    A value: with one more it is another, which shares the memory of this one, as a state is made for each event.
    """

    def __init__(self, entries: list[dict[str, Any]] | None = None, count: int = 0) -> None:
        self._entries, self._count = [] if entries is None else entries, count

    def added(self, record: dict[str, Any], parent: int | None) -> StepLog:
        """Return the log with a step after that of number `parent`."""
        entries = self._entries if len(self._entries) == self._count else self._entries[: self._count]
        place = 0 if parent is None else int(self[parent]["place"]) + 1
        entries.append({"parent": parent, "place": place, "record": lean(record)})
        return StepLog(entries, self._count + 1)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        chosen = range(self._count)[index]
        return [self._entries[at] for at in chosen] if isinstance(index, slice) else self._entries[chosen]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StepLog) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]


def lean(value: Any) -> Any:
    """Return an equal record whose names and texts are there once for all records.

    What came in a message or of a file has its own of each, which is half of what a record of 50 numbers takes.
    """
    if isinstance(value, Mapping):
        return {lean(name): lean(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [lean(inner) for inner in value]
    return sys.intern(value) if type(value) is str else value


def initial(name: str) -> State:
    """Return the state of a session nobody has built anything in.

    `unhealed`: records, as they were, of engines that a heal began to bring back and has not. `cut`: of an iteration
    that was stopped with steps of it done, the trainer and the snapshot of before it. `spare`: folders of copies around
    steps that are off the record, whose memory the next one takes. `adapters`: by branch, the number that its adapter
    has in the replicas. `defaults`: what was chosen where nobody said, with the reasons. `park`: at the end of its
    lease it goes to disk. `evaluations`: what each found; `at`: the number of the step record whose weights it is of,
    BEGIN, or None where they are not on record. `logged`: a user's own numbers, in the same form. `setup`: what trains
    otherwise than as it was built, see `rlbench.workers.train.setup`. `reference`: the folder of weights
    that the reference was moved to.
    """
    state: State = {"name": name, "branch": "main", "paused": False, "park": False}
    state |= dict.fromkeys(("epoch", "version", "highest", "step", "rollouts"), 0)
    state |= dict.fromkeys(("driver", "tip", "cursor", "cut", "undo_depth", "reference"))
    state |= {key: {} for key in ("config", "engines", "snapshots", "branches", "adapters", "unhealed", "setup")}
    return state | {"records": StepLog()} | {key: [] for key in LISTS}


def history(state: State, last: int | None = None) -> list[dict[str, Any]]:
    """The step records that led to where the session stands, oldest first; of those the `last` so many.

    They are a tree, in which going back to a snapshot moves the tip; nothing is lost.
    """
    records: list[dict[str, Any]] = []
    measured = measured_at(state)
    at = state["tip"]
    while at is not None and (last is None or len(records) < last):
        entry = state["records"][at]
        records.append(with_measured(entry["record"], measured.get(at)))
        at = entry["parent"]
    return records[::-1]


def measured_at(state: Mapping[str, Any]) -> dict[int | None, dict[str, float]]:
    """Return what evaluations found last of each step record's weights, and what a user logged there, metrics by name,
    by the record's number."""
    found: dict[int | None, dict[str, float]] = {}
    for one in (*state["evaluations"], *state["logged"]):
        if one["at"] is not None:
            found.setdefault(one["at"], {}).update(one["metrics"])
    return found


def with_measured(record: dict[str, Any], found: Mapping[str, float] | None) -> dict[str, Any]:
    """Return a step's record with what was measured of its weights; what the record says itself stays."""
    return {**record, **found, **record} if found else record


def history_length(state: State) -> int:
    """Return how many records those are."""
    return 0 if state["tip"] is None else int(state["records"][state["tip"]]["place"]) + 1


def reduce(state: State, event: Event) -> State:
    """The state after one event.

    Events: `set` (key, value), `engine` (name, fields; None drops it), `record` (a step's record), `drive` (epoch,
    driver), `lengths` (entry: those of a rollout), `evaluated` (entries: of one evaluation each), `logged` (metrics: a
    user's, of where the session stands), `snapshot` (id, fields; None drops it): keeps where the session stands,
    `restore` (id, stays): goes back there under a version that no weights had before; where it `stays`, what was drawn
    since counts. The snapshot at which the session stood last is the last of them.
    """
    kind = event["do"]
    if kind == "set":
        key, value = event["key"], event["value"]
        value = StepLog(lean(value), len(value)) if key == "records" else value
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
        records = state["records"].added(event["record"], state["tip"])
        return state | {"records": records, "tip": len(records) - 1}
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
    if kind == "evaluated":
        return state | {"evaluations": [*state["evaluations"], *event["entries"]]}
    if kind == "logged":
        one = {"at": BEGIN if state["tip"] is None else state["tip"], "metrics": event["metrics"]}
        return state | {"logged": [*state["logged"], one]}
    if kind == "drive":
        return state | {"epoch": event["epoch"], "driver": event["driver"]}
    raise ValueError(f"unknown event {kind!r}")


class Journal:
    """Events on disk, one JSON line each, written before they count."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.once: collections.deque[str] = collections.deque(maxlen=ONCE_KEPT)

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
