"""Going back: snapshots of a session, undo of a step, and branches.

A snapshot is the whole training state (weights, optimizer, schedulers, random states, and what a `session.trainer` on
the ranks holds beside them) in files outside the ranks, and in the monitor's record where the session stood: step,
rollout number, history. Restoring one moves all of that back and
gives the weights a version of their own, so that no replica is taken for current that is not; the replicas then get
them by a sync. What came later stays on record and can be branched from.
"""

from __future__ import annotations

import secrets
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlbench.dispatch.chain import Steps
from rlbench.dispatch.link import shm_prefix
from rlbench.engines.sync import sync_weights
from rlbench.errors import CheckpointError, SessionError, Suggesting, nearest
from rlbench.runtime import registry
from rlbench.units import format_bytes

if TYPE_CHECKING:
    from rlbench.session.session import Session


@dataclass(frozen=True)
class Snapshot(Suggesting):
    """A state to go back to. `bytes` in all, `fresh` of them not shared with an earlier snapshot."""

    id: str
    label: str
    step: int
    version: int
    rollouts: int
    bytes: int
    fresh: int
    disk: bool
    folder: str
    time: float

    def __repr__(self) -> str:
        where = "disk" if self.disk else "host memory"
        size = f"{format_bytes(self.bytes)} in {where}, {format_bytes(self.fresh)} of its own"
        return f"Snapshot({self.label!r}, step {self.step}, v{self.version}, {size})"


class Snapshots(Suggesting):
    """The snapshots of a session, oldest first; by label, id or place.

    `undo_to`: id of the one that `undo()` goes back to; None where no step can be undone.
    """

    def __init__(self, kept: list[Snapshot], undo_to: str | None = None) -> None:
        self._kept = kept
        self.undo_to = undo_to

    def __len__(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[Snapshot]:
        return iter(self._kept)

    def __getitem__(self, which: int | str | Snapshot) -> Snapshot:
        if isinstance(which, int):
            return self._kept[which]
        wanted = which.id if isinstance(which, Snapshot) else which
        found = [s for s in self._kept if wanted in (s.id, s.label)]
        if not found:
            labels = [s.label for s in self._kept]
            raise SessionError(
                f"no snapshot {wanted!r}{nearest(str(wanted), labels)}; there are {', '.join(labels) or 'none'}"
            )
        return found[-1]

    def __repr__(self) -> str:
        if not self._kept:
            return "no snapshots yet: session.snapshot()"
        total = sum(s.fresh for s in self._kept)
        lines = [f"{len(self._kept)} snapshots, {format_bytes(total)}"]
        return "\n".join([*lines, *(f"  {snapshot!r}" for snapshot in self._kept)])


def listed(session: Session) -> Snapshots:
    """The session's snapshots, those kept for undo included."""
    state = session.link.state("snapshots", "undo")
    kept, undo = state["snapshots"], state["undo"]
    names = Snapshot.__dataclass_fields__
    found = [
        Snapshot(id=i, **{k: v for k, v in fields.items() if k in names and k != "id"}) for i, fields in kept.items()
    ]
    return Snapshots(sorted(found, key=lambda s: s.time), undo[-1] if undo else None)


def snapshot_steps(session: Session, label: str | None, disk: bool) -> Steps:
    """Write a snapshot; returns it. It counts from the moment the monitor knows it."""
    known = list(listed(session))
    if label is not None and label in {s.label for s in known}:
        raise SessionError(f"there is a snapshot {label!r} already: session.drop({label!r}) first, or another label")
    return (yield from _write(session, label, disk, known))


def restore_steps(session: Session, which: Any, sync: bool) -> Steps:
    """Bring the ranks, step, history and rollout number back, then the replicas; returns the snapshot."""
    snapshot = listed(session)[which]
    found = yield session.train.call_all(
        "read_snapshot", snapshot.folder, what="restore", track=True, finish=lambda parts: parts[0]
    )
    session.link.apply({"do": "restore", "id": snapshot.id})
    session.anchors.go_back(snapshot.id)
    session.move_place()
    session.train.publish_state()
    session.trainer_went_back(snapshot.label, found["trainer"])
    if sync and session.replicas_can_sync():
        yield sync_weights(session.train, session.inference, session.version)
    return snapshot


def drop_steps(session: Session, which: list[Any]) -> Steps:
    """Forget snapshots, and branches that end at one, then free what they hold."""
    chosen = [listed(session)[one] for one in which]
    gone = {snapshot.id for snapshot in chosen}
    branches = session.link.state("branches")["branches"]
    if gone & set(branches.values()):
        session.link.set(branches={name: end for name, end in branches.items() if end not in gone})
    yield from _drop(session, chosen)
    return [s.label for s in chosen]


# -- undo


def before_step_steps(session: Session) -> Steps:
    """Keep the state before a step, where the session keeps any for undo; returns the snapshot or None.

    Want of room does not end the step: it is said, and the step then cannot be undone.
    """
    if session.undo_depth < 1:
        return None
    known = list(listed(session))
    try:
        return (yield from _write(session, None, False, known, undo=True))
    except CheckpointError as error:
        warnings.warn(f"this step cannot be undone: {error}. rb.Session(…, undo=0) keeps none", stacklevel=2)
        return None


def after_step_steps(session: Session, kept: Snapshot | None, stepped: bool) -> Steps:
    """A step that changed nothing needs no undo; of the others keep as many as asked for."""
    if kept is None:
        return
    if not stepped:
        yield from _drop(session, [kept])
        return
    stack = keep_for_undo(session, kept)
    surplus = stack[: -session.undo_depth]
    if surplus:
        yield from _drop(session, [s for s in listed(session) if s.id in surplus])


def keep_for_undo(session: Session, kept: Snapshot | None) -> list[str]:
    """Put the state before a step on the undo stack; returns the stack."""
    stack: list[str] = session.link.state("undo")["undo"]
    if kept is not None:
        stack = [*stack, kept.id]
        session.link.set(undo=stack)
    return stack


def undo_steps(session: Session, sync: bool) -> Steps:
    """Go back to before the last step."""
    stack = session.link.state("undo")["undo"]
    if not stack:
        raise SessionError(
            "there is no step to undo: none was taken since the session, or its last restore, began"
            if session.undo_depth
            else "nothing is kept to undo a step: rb.Session(…, undo=1) keeps the state before the last one"
        )
    snapshot = yield from restore_steps(session, stack[-1], sync)
    yield from _drop(session, [snapshot])
    return snapshot


# -- branches


def branch_steps(session: Session, name: str, sync: bool) -> Steps:
    """Start branch `name` where the session stands, or go on with it where it was left; returns its snapshot.

    The branch that is left keeps its own end as a snapshot of its name.
    """
    state = session.link.state("branch", "branches")
    if name == state["branch"]:
        raise SessionError(f"the session is on branch {name!r} already")
    known = list(listed(session))
    left = yield from _write(session, f"branch {state['branch']}", False, known)
    branches = dict(state["branches"])
    old, target = branches.get(state["branch"]), branches.get(name)
    session.link.set(branches=branches | {state["branch"]: left.id}, branch=name, undo=[])
    if old is not None:
        yield from _drop(session, [s for s in known if s.id == old])
    if target is None:
        return left
    return (yield from restore_steps(session, target, sync))


# -- parts


def folder_start(session: Session, disk: bool) -> str:
    """How the paths of the session's snapshots begin; an id follows."""
    return f"{registry.snapshot_folder(session.name)}/" if disk else f"/dev/shm/{shm_prefix(session.name)}snapshot-"


def _write(
    session: Session, label: str | None, disk: bool, known: list[Snapshot], undo: bool = False
) -> Steps:
    """Write, then put on record. A folder that no record names is swept with the session."""
    id_ = secrets.token_hex(4)
    folder = f"{folder_start(session, disk)}{id_}"
    before = next((s.folder for s in reversed(known) if s.disk == disk), None)
    parts = yield session.train.call_all("write_snapshot", folder, before, disk, what="snapshot", track=not undo)
    step = session.step
    session.note_place()
    fields = {
        "label": label or (f"before step {step + 1}" if undo else f"step {step}, {id_}"), "folder": folder,
        "disk": disk, "time": time.time(),
        **{key: sum(int(part[key]) for part in parts) for key in ("bytes", "fresh")},
    }  # fmt: skip
    session.link.apply({"do": "snapshot", "id": id_, "fields": fields})
    session.anchors.mark(id_)
    return listed(session)[id_]


def _drop(session: Session, chosen: list[Snapshot]) -> Steps:
    for snapshot in chosen:
        session.anchors.forget(snapshot.id)
    if chosen:
        session.link.apply(*({"do": "snapshot", "id": s.id, "fields": None} for s in chosen))
        yield session.train.call_all("drop_snapshots", [s.folder for s in chosen], what="drop")
