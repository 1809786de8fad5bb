"""The copies that a session keeps around its steps, so that `undo` and `heal` both lose nothing that was finished.

`heal` goes back to the one after the last step, `undo` to the one before it, which shares the tensors of the one after
the step before as far as nothing changed them since: a step costs one copy, and `undo=1` holds two.
"""

from __future__ import annotations

import warnings
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlbench.dispatch.chain import ChainStep, Steps
from rlbench.errors import CheckpointError, SessionError
from rlbench.runtime.devices import room_in_memory
from rlbench.session.core import SessionCore
from rlbench.session.state.snapshots import (
    Snapshot,
    as_stood_at,
    forgotten,
    free_steps,
    id_of,
    new_folder,
    restore_steps,
    snapshot_event,
    write_steps,
)
from rlbench.workers.train.config import AroundStep

Event = dict[str, Any]
SPARE_BYTES, SPARE_SHARE = 1 << 30, 4
"""The memory of a copy that nobody goes back to is kept for the next one up to that size, or up to one part of so many
of what is free beside it: memory asked of the system anew takes several times as long as the copy."""


def undo(core: SessionCore, sync: bool = True) -> Generator[ChainStep, Any, Snapshot]:
    """Take the last optimizer step (of a trainer: iteration) back, and call by call those before it; returns the
    snapshot of before it, which stays until the next step."""
    stack = core.link.state("undo")["undo"]
    if not stack:
        raise SessionError(
            "there is no step to undo: none was taken since the session, or its last restore, began"
            if core.undo_depth
            else "nothing is kept to undo a step: rb.Session(…, undo=1) keeps the state before the last one"
        )
    snapshot = yield from restore_steps(core, stack[-1], sync)
    core.link.set(undo=stack[:-1])
    yield from _surplus_freed(core)
    return snapshot


@dataclass(frozen=True)
class Kept:
    """What the session keeps around its next optimizer step, as planned from its record; `room`: bytes of host memory
    that were free then."""

    core: SessionCore
    around: AroundStep
    disk: bool
    step: int
    undo: list[str]
    snapshots: Mapping[str, Mapping[str, Any]]
    room: int

    def before_events(self, done: Mapping[str, Any]) -> list[Event]:
        """Return what puts the copy before the step on record."""
        undo = [{"do": "set", "key": "undo", "value": self._undo_then(done)}]
        return [*self.core.followed.place_events(), *self._events(done, "before"), *undo]

    def after_events(self, done: Mapping[str, Any]) -> list[Event]:
        """Return the same of the copy after it, and what forgets those that neither `undo` nor `heal` goes back to."""
        spare = {"do": "set", "key": "spare", "value": [folder for folder, small in self._given_up(done) if small]}
        return [*forgotten(self._gone(done)), *self._events(done, "after"), spare]

    def recorded_steps(self, done: Mapping[str, Any]) -> Steps:
        """Follow the record: free the copies that it names no more, but for those whose memory is spare. Want of room
        did not end the step: it is said."""
        written = [name for name in ("before", "after") if "failed" not in done[name]]
        self.core.anchors.note([id_of(getattr(self.around, name)) for name in written], dropped=self._gone(done))
        large = [folder for folder, small in self._given_up(done) if not small]
        if large:
            yield self.core.train.call_all("drop_snapshots", large, what="drop")
        if "failed" in done["before"]:
            _warn_not_undone(done["before"]["failed"])
        if "failed" in done["after"]:
            _warn_not_kept(self.core, self.step + 1, done["after"]["failed"])

    def _undo_then(self, done: Mapping[str, Any]) -> list[str]:
        before = None if "failed" in done["before"] else id_of(self.around.before)
        return _undone_to(self.core, self.undo, before) if done["stepped"] else self.undo

    def _gone(self, done: Mapping[str, Any]) -> list[str]:
        automatic = [id_ for id_, fields in self.snapshots.items() if fields["automatic"]]
        others = automatic[:-1] if "failed" in done["before"] and "failed" in done["after"] else automatic
        return [id_ for id_ in others if id_ not in self._undo_then(done)]

    def _given_up(self, done: Mapping[str, Any]) -> list[tuple[str, bool]]:
        """Return the folders that go off the record, and of each whether it is small enough to be spare."""
        gone, most = [self.snapshots[id_] for id_ in self._gone(done)], max(SPARE_BYTES, self.room // SPARE_SHARE)
        return [(fields["folder"], fields["bytes"] <= most) for fields in gone]

    def _events(self, done: Mapping[str, Any], which: str) -> list[Event]:
        folder, parts = getattr(self.around, which), [part for part in [done[which]] if "failed" not in part]
        return [snapshot_event(f"{which} step {self.step + 1}", folder, self.disk, [part], True) for part in parts]


def planned(core: SessionCore, state: Mapping[str, Any]) -> Kept | None:
    """Plan what is kept around a step, from what is on record; None where nothing is."""
    if not core.undo_depth:
        return None
    disk = core.keeps_on_disk
    before, after = (new_folder(core, disk) for _ in range(2))
    earlier = [fields["folder"] for fields in state["snapshots"].values() if fields["disk"] == disk]
    around = AroundStep(before, after, earlier[-1] if earlier else None, state["spare"])
    return Kept(core, around, disk, int(state["step"]), state["undo"], state["snapshots"], room_in_memory())


def before_step_steps(core: SessionCore) -> Steps:
    """Keep the state before a step; returns its `Snapshot`, None where the session keeps none.

    Want of room does not end the step: it is said, and the step then cannot be undone.
    """
    if not core.undo_depth:
        return None
    yield from _surplus_freed(core)
    try:
        return (yield from write_steps(core, f"before step {core.step + 1}", automatic=True))
    except CheckpointError as error:
        _warn_not_undone(error)
        return None


def can_be_undone(core: SessionCore, before: Snapshot | None) -> None:
    """Let `undo` go back to before a step that changed something, and to before no more steps than asked for."""
    if core.undo_depth:
        core.link.set(undo=_undone_to(core, core.link.state("undo")["undo"], None if before is None else before.id))


def after_step_steps(core: SessionCore) -> Steps:
    """Keep the state after a step that is on record, or after a checkpoint was loaded; what gives way is freed first.

    Want of room is said: were a worker lost before the next step, that step would be.
    """
    if not core.undo_depth:
        return
    yield from _surplus_freed(core)
    try:
        yield from write_steps(core, f"after step {core.step}", automatic=True)
    except CheckpointError as error:
        _warn_not_kept(core, core.step, error)


def _undone_to(core: SessionCore, stack: Sequence[str], before: str | None) -> list[str]:
    """Return what `undo` goes back to after one more step: where nothing was kept before it, no step can be undone."""
    return [] if before is None else [*stack, before][-core.undo_depth :]


def _warn_not_undone(why: object) -> None:
    warnings.warn(f"this step cannot be undone: {why}. rb.Session(…, undo=0) keeps none", stacklevel=3)


def _warn_not_kept(core: SessionCore, step: int, why: object) -> None:
    others = as_stood_at(core)
    to = f"go back to {others[-1].label!r}" if others else "go on without a snapshot"
    warnings.warn(f"step {step} is done but not kept, heal() would {to}: {why}", stacklevel=3)


def _surplus_freed(core: SessionCore) -> Steps:
    """Drop the copies around steps that neither `undo` nor `heal` would go back to."""
    automatic = [snapshot for snapshot in as_stood_at(core) if snapshot.automatic]
    undo = core.link.state("undo")["undo"]
    yield from free_steps(core, [snapshot for snapshot in automatic[:-1] if snapshot.id not in undo])
