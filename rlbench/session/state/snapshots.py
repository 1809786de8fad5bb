"""Going back: snapshots of a session, and branches. For those around a step, see `rlbench.session.state.step_copies`.

A snapshot is the whole training state (weights, optimizer, schedulers, random states, and what a `session.trainer` on
the ranks holds beside them) in files outside the ranks, and in the monitor's record where the session stood: step,
rollout number, history. Restoring one moves all of that back and
gives the weights a version of their own, so that no replica is taken for current that is not; the replicas then get
them by a sync. What came later stays on record and can be branched from.

The monitor has the snapshots in the order in which the session stood at them last: the last of them is what `heal` goes
back to.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlbench.dispatch.chain import Steps
from rlbench.dispatch.link import shm_prefix
from rlbench.engines.sync import sync_weights
from rlbench.errors import SessionError, Suggesting, nearest
from rlbench.runtime import registry
from rlbench.units import format_bytes

if TYPE_CHECKING:
    from rlbench.session.core import SessionCore


@dataclass(frozen=True)
class Snapshot(Suggesting):
    """A state to go back to. `bytes` in all, `fresh` of them not shared with an earlier snapshot.

    `automatic`: one that the session keeps around a step, and drops when later ones come.
    """

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
    automatic: bool = False

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


def listed(session: SessionCore) -> Snapshots:
    """The session's snapshots by age, those kept around its steps included."""
    undo = session.link.state("undo")["undo"]
    return Snapshots(sorted(as_stood_at(session), key=lambda s: s.time), undo[-1] if undo else None)


def as_stood_at(session: SessionCore) -> list[Snapshot]:
    """The same, that at which the session stood last as the last."""
    names = Snapshot.__dataclass_fields__
    return [
        Snapshot(id=i, **{k: v for k, v in fields.items() if k in names and k != "id"})
        for i, fields in session.link.state("snapshots")["snapshots"].items()
    ]


def snapshot_steps(session: SessionCore, label: str | None, disk: bool) -> Steps:
    """Write a snapshot; returns it. It counts from the moment the monitor knows it."""
    if label is not None and label in {s.label for s in as_stood_at(session)}:
        raise SessionError(f"there is a snapshot {label!r} already: session.drop({label!r}) first, or another label")
    return (yield from write_steps(session, label, disk))


def restore_steps(session: SessionCore, which: Any, sync: bool, healing: bool = False) -> Steps:
    """Bring the ranks, step, history and rollout number back, then the replicas; returns the snapshot.

    Args:
        healing: the session did not leave that state by itself: where no step has ended since, it stays at the rollout,
            and at the place in its data, that it has come to.
    """
    snapshot = listed(session)[which]
    stays = healing and _no_step_since(session, snapshot)
    found = yield session.train.call_all(
        "read_snapshot", snapshot.folder, what="restore", track=True, finish=lambda parts: parts[0]
    )
    session.link.apply({"do": "restore", "id": snapshot.id, "stays": stays})
    session.anchors.go_back(snapshot.id)
    if not stays:
        session.followed.move_place()
    session.train.publish_state()
    session.trainer_went_back(snapshot.label, found["trainer"])
    if sync and session.can_sync():
        yield sync_weights(session.train, session.inference, session.version)
    return snapshot


def drop_steps(session: SessionCore, which: list[Any]) -> Steps:
    """Forget snapshots, and branches that end at one, then free what they hold."""
    chosen = [listed(session)[one] for one in which]
    gone = {snapshot.id for snapshot in chosen}
    branches = session.link.state("branches")["branches"]
    if gone & set(branches.values()):
        session.link.set(branches={name: end for name, end in branches.items() if end not in gone})
    yield from free_steps(session, chosen)
    return [s.label for s in chosen]


# -- branches


def branch_steps(session: SessionCore, name: str, sync: bool) -> Steps:
    """Start branch `name` where the session stands, or go on with it where it was left; returns its snapshot.

    The branch that is left keeps its own end as a snapshot of its name.
    """
    state = session.link.state("branch", "branches")
    if name == state["branch"]:
        raise SessionError(f"the session is on branch {name!r} already")
    known = as_stood_at(session)
    left = yield from write_steps(session, f"branch {state['branch']}")
    branches = dict(state["branches"])
    old, target = branches.get(state["branch"]), branches.get(name)
    session.link.set(branches=branches | {state["branch"]: left.id}, branch=name, undo=[])
    if old is not None:
        yield from free_steps(session, [s for s in known if s.id == old])
    if target is None:
        return left
    return (yield from restore_steps(session, target, sync))


# -- parts


def folder_start(session: SessionCore, disk: bool) -> str:
    """How the paths of the session's snapshots begin; an id follows."""
    return f"{registry.snapshot_folder(session.name)}/" if disk else f"/dev/shm/{shm_prefix(session.name)}snapshot-"


def write_steps(session: SessionCore, label: str | None, disk: bool = False, automatic: bool = False) -> Steps:
    """Write, then put on record; returns the snapshot. A folder that no record names is swept with the session.

    Args:
        label: None: made up.
        automatic: it is of the session's own. Nobody waits for it, so it does not show as running, and no stop ends it.
    """
    id_ = secrets.token_hex(4)
    folder = f"{folder_start(session, disk)}{id_}"
    before = next((s.folder for s in reversed(as_stood_at(session)) if s.disk == disk), None)
    parts = yield session.train.call_all(
        "write_snapshot", folder, before, disk, not automatic, what="snapshot", track=not automatic
    )
    session.followed.note_place()
    fields = {
        "label": label or f"step {session.step}, {id_}",
        "folder": folder,
        "disk": disk,
        "time": time.time(),
        "automatic": automatic,
        **{key: sum(int(part[key]) for part in parts) for key in ("bytes", "fresh")},
    }
    session.link.apply({"do": "snapshot", "id": id_, "fields": fields})
    session.anchors.mark(id_)
    return next(snapshot for snapshot in as_stood_at(session) if snapshot.id == id_)


def free_steps(session: SessionCore, chosen: list[Snapshot]) -> Steps:
    """Forget these snapshots, then free what they hold."""
    for snapshot in chosen:
        session.anchors.forget(snapshot.id)
    if chosen:
        session.link.apply(*({"do": "snapshot", "id": s.id, "fields": None} for s in chosen))
        yield session.train.call_all("drop_snapshots", [s.folder for s in chosen], what="drop")


def _no_step_since(session: SessionCore, snapshot: Snapshot) -> bool:
    """Whether the session is at the very step and record that it was at then."""
    state = session.link.state("step", "tip", "snapshots")
    then = state["snapshots"][snapshot.id]
    return all(state[key] == then[key] for key in ("step", "tip"))
