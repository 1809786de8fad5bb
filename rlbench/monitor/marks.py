"""What happened when: a mark for each verb, call, death and want of memory, and what a step's time went to.

Not locked: the monitor holds its lock around every use.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

KEPT = 1024
SPLITS_KEPT = 100
TRAIN = frozenset({"train_step", "forward_backward", "optim_step", "zero_grad"})
SNAPSHOT = frozenset({"snapshot", "restore", "undo", "branch", "drop"})
SAVE = frozenset({"save", "load", "export"})
PHASES = ("train", "sync", "rollout")
"""Kinds that a step's time is split by. Where several run, the first of these counts: what is left to the rollout is
what training did not hide."""


def kind_of(what: str) -> str:
    """The kind of mark of a verb or call, from what it is called."""
    if what.startswith("rollout"):
        return "rollout"
    if what.startswith("weight sync"):
        return "sync"
    if what.endswith((".cpu()", ".meta()")):
        return "offload"
    if what.endswith(".cuda()"):
        return "onload"
    known = {"train": TRAIN, "snapshot": SNAPSHOT, "save": SAVE}
    return next((kind for kind, names in known.items() if what in names), "other")


def ran_out(kind: str, message: str) -> bool:
    """Whether a failure was want of memory: torch's on a GPU, its allocator's on the host, Python's."""
    return kind.startswith("OutOfMemory") or kind == "MemoryError" or "can't allocate memory" in message


@dataclass(frozen=True)
class Mark:
    """`time`: its begin, Unix seconds; `seconds`: None while it runs; `what`: its kind; `engine`: "" for a verb."""

    time: float
    seconds: float | None
    what: str
    label: str
    engine: str


class Marks:
    """The marks of a session, and the clock of its steps."""

    def __init__(self) -> None:
        self.steps = StepClock()
        self._open: dict[str, Mark] = {}
        self._ended: collections.deque[Mark] = collections.deque(maxlen=KEPT)

    def begin(self, id_: str, what: str, engine: str = "", instead_of: Iterable[str] = ()) -> None:
        """A verb or call began; `instead_of` marks that are open, which it covers."""
        self.steps.turn(self._kinds())
        covered = [self._open.pop(other) for other in instead_of if other in self._open]
        since = min([time.time(), *(mark.time for mark in covered)])
        self._open[id_] = Mark(since, None, kind_of(what), what, engine)

    def end(self, id_: str) -> None:
        """It is over; nothing happens where it had no mark."""
        mark = self._open.get(id_)
        if mark is None:
            return
        self.steps.turn(self._kinds())
        del self._open[id_]
        self._ended.append(replace(mark, seconds=max(0.0, time.time() - mark.time)))
        if mark.what == "train" and "train" not in self._kinds():
            self.steps.close()

    def instant(self, what: str, label: str, engine: str = "") -> None:
        """Something that has no duration: a death, want of memory, or a call too short to be seen running."""
        self._ended.append(Mark(time.time(), 0.0, what, label, engine))

    def note(self, event: Mapping[str, Any], before: Mapping[str, Any]) -> None:
        """Mark what an event of the session's state (`before`) says: a step, its record, a worker's death."""
        if event["do"] == "set" and event["key"] == "step" and "train" in self._kinds():
            self.steps.step = event["value"]
        if event["do"] == "record":
            self.steps.recorded(event["record"])
        broken = (event.get("fields") or {}).get("broken") if event["do"] == "engine" else None
        if broken and not before["engines"].get(event["name"], {}).get("broken"):
            self.instant("died", broken, event["name"])

    def since(self, when: float) -> list[dict[str, Any]]:
        """Marks that ended after `when` (Unix seconds) or still run, by their begin."""
        ended = [mark for mark in self._ended if mark.time + (mark.seconds or 0.0) > when]
        return [asdict(mark) for mark in sorted([*ended, *self._open.values()], key=lambda mark: mark.time)]

    def _kinds(self) -> set[str]:
        return {mark.what for mark in self._open.values()}


class StepClock:
    """What the time between the ends of two optimizer steps went to; the first step counts from the first mark."""

    def __init__(self) -> None:
        self.splits: collections.deque[dict[str, Any]] = collections.deque(maxlen=SPLITS_KEPT)
        self._turned: float | None = None
        self._seconds = dict.fromkeys((*PHASES, "other", "idle"), 0.0)
        self.step: int | None = None
        self._rates: dict[int, float] = {}

    def turn(self, kinds: Iterable[str]) -> None:
        """Something begins or ends now: the time since the last turn went to these `kinds`."""
        now = time.monotonic()
        if self._turned is not None:
            running = set(kinds)
            phase = next((p for p in PHASES if p in running), "other" if running else "idle")
            self._seconds[phase] += now - self._turned
        self._turned = now

    def recorded(self, record: dict[str, Any]) -> None:
        """Note the rate that a step's record tells."""
        if record.get("step") is not None and record.get("tokens_per_s") is not None:
            self._rates = {int(record["step"]): float(record["tokens_per_s"])}

    def close(self) -> None:
        """End the step that the optimizer made, as training has ended just now."""
        if self.step is None:
            return
        spent = self._seconds
        split = {"step": self.step, "seconds": sum(spent.values()), **spent}
        self.splits.append(split | {"score": None, "tokens_per_s": self._rates.get(self.step)})
        self._seconds, self.step = dict.fromkeys(spent, 0.0), None
