"""Going back: snapshots of a session, and branches. For those around a step, see `rlbench.session.state.step_copies`.

A snapshot is the whole training state in files outside the ranks, and in the monitor's record where the session stood:
step, rollout number, history. Restored weights get a version of their own, so that no replica is taken for current that
is not. The monitor has the snapshots in the order in which the session stood at them last; `heal` takes the last.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlbench.dispatch.chain import ChainStep, Steps
from rlbench.dispatch.link import shm_prefix
from rlbench.errors import SessionError, Suggesting, nearest
from rlbench.results import Names
from rlbench.runtime import registry
from rlbench.session.core import SessionCore
from rlbench.session.state.reference import reference_steps
from rlbench.session.state.setup import note_setup
from rlbench.units import format_bytes
from rlbench.workers.train.config import ID_LENGTH


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
        self._kept, self.undo_to = kept, undo_to

    def __len__(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[Snapshot]:
        return iter(self._kept)

    def __getitem__(self, which: int | str | Snapshot) -> Snapshot:
        if isinstance(which, int):
            return self._kept[which]
        wanted = which.id if isinstance(which, Snapshot) else which
        matching = [s for s in self._kept if wanted in (s.id, s.label)]
        if not matching:
            labels = [s.label for s in self._kept]
            there = ", ".join(labels) or "none"
            raise SessionError(f"no snapshot {wanted!r}{nearest(str(wanted), labels)}; there are {there}")
        return matching[-1]

    def __repr__(self) -> str:
        if not self._kept:
            return "no snapshots yet: session.snapshot()"
        total = sum(s.fresh for s in self._kept)
        lines = [f"{len(self._kept)} snapshots, {format_bytes(total)}"]
        return "\n".join([*lines, *(f"  {snapshot!r}" for snapshot in self._kept)])


def snapshot(core: SessionCore, label: str | None = None, disk: bool = False) -> Generator[ChainStep, Any, Snapshot]:
    """Keep the whole training state: weights, optimizer, schedulers, random states, step, rollout number, history.

    Of a `session.trainer`, too: critic, average, schedules, place in the prompts, what waits to be trained on. Tensors
    that did not change since the last one are kept once.

    Args:
        label: to find it by; default: made up of the step.
        disk: on disk in the state folder, instead of host memory; so are all on a cluster of several nodes, which
            must see that folder. Either is gone when the session closes; for what must stay, use `save(path)`.
    """
    if label is not None and label in {s.label for s in as_stood_at(core)}:
        raise SessionError(f"there is a snapshot {label!r} already: session.drop({label!r}) first, or another label")
    return (yield from write_steps(core, label, disk))


def restore(
    core: SessionCore, snapshot: Snapshot | str | int, sync: bool = True
) -> Generator[ChainStep, Any, Snapshot]:
    """Go back to a snapshot, bit for bit; the replicas follow (`sync=False`: when `sync_weights()` is called).

    The weights get a new version number, since those in between were other weights. Gradients that wait for a
    step are dropped; later steps leave the history and stay on record. A trainer on the ranks goes back, too; where
    the snapshot is of before it was made, or of another one, the policy alone does, and a warning says so.
    """
    return (yield from restore_steps(core, snapshot, sync))


def drop(core: SessionCore, *which: Snapshot | str | int) -> Generator[ChainStep, Any, Names]:
    """Forget snapshots and free what they hold. A branch that was left at one is forgotten with it."""
    chosen = [listed(core)[one] for one in which]
    gone = {snapshot.id for snapshot in chosen}
    branches = core.link.state("branches")["branches"]
    if gone & set(branches.values()):
        stay = {name: end for name, end in branches.items() if end not in gone}
        held = {name: number for name, number in core.adapters.items() if name in stay or name not in branches}
        core.link.set(branches=stay, adapters=held)
    yield from free_steps(core, chosen)
    return Names("dropped", [s.label for s in chosen])


def branch(core: SessionCore, name: str, sync: bool = True) -> Generator[ChainStep, Any, Snapshot]:
    """Start a branch here, or go on with one that was left: its weights, step and history come back.

    The branch that is left is kept as a snapshot. Every session starts on "main". Where the replicas hold adapters
    (`rb.Inference(adapters=2)`), that of the branch that is left stays in them: `session.rollout(…, adapter="main")`.
    """
    state = core.link.state("branch", "branches")
    if name == state["branch"]:
        raise SessionError(f"the session is on branch {name!r} already")
    number = _place_of(core, name) if core.inference.info.get("adapters") else None
    known = as_stood_at(core)
    if number is not None and sync and core.can_sync():
        yield core.synced()  # what is left stays in the replicas, to be sampled from by the branch's name
    left = yield from write_steps(core, f"branch {state['branch']}")
    ends = dict(state["branches"])
    old, target = ends.get(state["branch"]), ends.get(name)
    core.link.set(branches=ends | {state["branch"]: left.id}, branch=name, undo=[])
    if number is not None:
        core.link.set(adapters=core.adapters | {name: number})
    yield from free_steps(core, [s for s in known if s.id == old])
    if target is None and number is not None and sync and core.can_sync():
        yield core.synced()
    return left if target is None else (yield from restore_steps(core, target, sync))


def _place_of(core: SessionCore, name: str) -> int:
    """Return the number that a branch's adapter has, or gets, in the replicas; SessionError where all are taken."""
    held, most = core.adapters, int(core.inference.info["adapters"])
    free = [number for number in range(1, most + 1) if number not in held.values()]
    if name in held or free:
        return held.get(name) or free[0]
    raise SessionError(
        f"the replicas hold {most} adapters, of {', '.join(held)}: session.drop the snapshot of a branch that is done, "
        f"or make the session with rb.Inference(adapters={most + 1})"
    )


def branches(core: SessionCore) -> dict[str, Snapshot | None]:
    """Return the branches by name, each with the snapshot of its end; None for the one the session is on."""
    state, kept = core.link.state("branch", "branches"), listed(core)
    left = {name: kept[id_] for name, id_ in state["branches"].items() if name != state["branch"]}
    return {state["branch"]: None} | left


# -- parts


def listed(core: SessionCore) -> Snapshots:
    """Return the session's snapshots by age, those kept around its steps included."""
    undo = core.link.state("undo")["undo"]
    return Snapshots(sorted(as_stood_at(core), key=lambda s: s.time), undo[-1] if undo else None)


def as_stood_at(core: SessionCore) -> list[Snapshot]:
    """Return the same, that at which the session stood last as the last."""
    names = Snapshot.__dataclass_fields__
    return [
        Snapshot(id=i, **{k: v for k, v in fields.items() if k in names and k != "id"})
        for i, fields in core.link.state("snapshots")["snapshots"].items()
    ]


def folder_start(core: SessionCore, disk: bool) -> str:
    """Return how the paths of the session's snapshots begin; an id follows."""
    return f"{registry.snapshot_folder(core.name)}/" if disk else f"/dev/shm/{shm_prefix(core.name)}snapshot-"


def new_folder(core: SessionCore, disk: bool) -> str:
    """Return a path for a new snapshot; see `id_of`."""
    return f"{folder_start(core, disk)}{secrets.token_hex(ID_LENGTH // 2)}"


def id_of(folder: str) -> str:
    """Return the id of the snapshot in `folder`."""
    return folder[-ID_LENGTH:]


def write_steps(core: SessionCore, label: str | None, disk: bool = False, automatic: bool = False) -> Steps:
    """Write, then put on record; returns the snapshot. A folder that no record names is swept with the session.

    `automatic`: nobody waits for it, so it does not show as running, and no stop ends it.
    """
    durable, disk = disk, disk or core.keeps_on_disk
    folder = new_folder(core, disk)
    id_ = id_of(folder)
    before = next((s.folder for s in reversed(as_stood_at(core)) if s.disk == disk), None)
    parts = yield core.train.call_all(
        "write_snapshot", folder, before, durable, not automatic, what="snapshot", track=not automatic
    )
    event = snapshot_event(label or f"step {core.step}, {id_}", folder, disk, parts, automatic)
    core.link.apply(*core.followed.place_events(), event)
    core.anchors.note([id_])
    return listed(core)[id_]


def snapshot_event(
    label: str, folder: str, disk: bool, parts: Sequence[Mapping[str, int]], automatic: bool
) -> dict[str, Any]:
    """Return what puts on record a snapshot that the ranks have written; `parts`: what they say of its size."""
    sizes = {key: sum(int(part[key]) for part in parts) for key in ("bytes", "fresh")}
    fields = {"label": label, "folder": folder, "disk": disk, "time": time.time(), "automatic": automatic, **sizes}
    return {"do": "snapshot", "id": id_of(folder), "fields": fields}


def forgotten(ids: Sequence[str]) -> list[dict[str, Any]]:
    """Return what takes these snapshots off the record."""
    return [{"do": "snapshot", "id": id_, "fields": None} for id_ in ids]


def restore_steps(core: SessionCore, which: Any, sync: bool, healing: bool = False) -> Steps:
    """Bring the ranks, step, history and rollout number back, then the replicas; returns the snapshot.

    `healing`: where no step has ended since, the session stays at the rollout and the place in its data it has come to.
    """
    snapshot = listed(core)[which]
    state = core.link.state("step", "tip", "snapshots")
    at = state["snapshots"][snapshot.id]
    stays = healing and all(state[key] == at[key] for key in ("step", "tip"))
    found = yield core.ask_ranks("read_snapshot", snapshot.folder, at["setup"], what="restore", track=True)
    yield from reference_steps(core, at["reference"])
    core.link.apply({"do": "restore", "id": snapshot.id, "stays": stays})
    core.anchors.go_back(snapshot.id)
    if not stays:
        core.followed.move_place()
    core.train.publish_state()
    note_setup(core, found["setup"])
    core.trainer_went_back(snapshot.label, found["trainer"])
    if sync and core.can_sync():
        yield core.synced()
    return snapshot


def free_steps(core: SessionCore, chosen: list[Snapshot]) -> Steps:
    """Forget these snapshots, then free what they hold."""
    if chosen:
        ids = [s.id for s in chosen]
        core.link.apply(*forgotten(ids))
        core.anchors.note([], dropped=ids)
        yield core.train.call_all("drop_snapshots", [s.folder for s in chosen], what="drop")
