"""Going on after a death: rebuild the engines that lost a worker, and bring back what they held.

A training engine goes back to the snapshot at which the session stood last, else to the weights of the last sync, which
lie in shared memory, else to those it was built from, saying what was lost. A `session.trainer` of its ranks is made
again, and goes back where the snapshot has it. Replicas get the trainer's weights by a sync.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlbench.dispatch.chain import ChainStep, Steps
from rlbench.engines.base import Engine
from rlbench.errors import CheckpointError, EngineError, RLBenchError, StateError, Suggesting, WorkerDied
from rlbench.runtime import cluster
from rlbench.runtime.starting import starting
from rlbench.session import building
from rlbench.session.core import SessionCore
from rlbench.session.options import SessionOptions
from rlbench.session.state import snapshots
from rlbench.session.state.reference import reference_steps
from rlbench.session.state.setup import set_up_steps
from rlbench.session.state.snapshots import Snapshot
from rlbench.strategies.generation.session_link import ASLEEP

ANSWER_LIMIT_S = 120.0
NOT_BACK = (
    "this engine was built again with the weights it was first built from, and heal() ended before it had brought the "
    "session's state back: session.heal() again, or session.restore(…) a snapshot"
)
LOST = "lost with its ranks: session.trainer(…) makes one"
OF_ANOTHER = f"{LOST} (another kernel had made it)"


@dataclass(frozen=True)
class Healed(Suggesting):
    """What was rebuilt, by engine: from what it goes on. Where the session then stands.

    `snapshot`: id of the one the trainer went back to, None where it went back to none.
    """

    engines: dict[str, str]
    step: int
    version: int
    snapshot: str | None = None

    def __repr__(self) -> str:
        if not self.engines:
            return "nothing to heal: every worker lives"
        lines = [f"  {name}: {what}" for name, what in self.engines.items()]
        return "\n".join([f"healed; at step {self.step}, v{self.version}", *lines])


def heal(core: SessionCore, prefer: str = "snapshot") -> Generator[ChainStep, Any, Healed]:
    """Rebuild the engines that lost a worker and bring back what they held; returns what each goes on from.

    Args:
        prefer: `"snapshot"`: the one at which the session stood last: after the last finished step, where `undo` is
            kept, and what was changed on the ranks since is lost; `"weights"`: the weights of the last sync, with
            an optimizer that starts anew.
    """
    if prefer not in ("snapshot", "weights"):
        raise StateError(f"heal(prefer={prefer!r}): wanted 'snapshot' or 'weights'")
    with starting("healed session"):
        return (yield from _healed(core, prefer))


def _healed(core: SessionCore, prefer: str) -> Steps:
    lost, options = lost_engines(core), building.on_what_is_left(core.options)
    building.need_devices(options)
    rebuilt, snapshot = yield from rebuild_steps(core, options, lost, prefer)
    return Healed(rebuilt, core.step, core.version, None if snapshot is None else snapshot.id)


def lost_engines(core: SessionCore) -> dict[str, Any]:
    """Return the records, by name, of the engines that lost a worker, or that an earlier heal did not bring back."""
    state = core.link.state("engines", "unhealed")
    lost = dict(state["unhealed"])
    for name, engine in core.engines.items():
        record = state["engines"].get(name, {})  # one that is being ended may still answer
        if name not in lost and (not engine.built or record.get("broken") or _lost_workers(engine)):
            lost[name] = record
    return lost


def rebuild_steps(
    core: SessionCore, options: SessionOptions, lost: Mapping[str, Any], prefer: str = "snapshot"
) -> Generator[ChainStep, Any, tuple[dict[str, str], Snapshot | None]]:
    """Build engines again by `options` (`lost`: their records by name) and bring back what they held; returns what
    each goes on from, and the snapshot of the trainer's. Where it ends half-way, `heal` begins again."""
    core.link.set(unhealed=dict(lost))
    rebuilt: dict[str, str] = {}
    plans = building.plans(options, core.link)
    for name in lost:
        if name in core.engines:  # else another driver's heal ended before it was built
            core.engines[name].discard()
        core.engines[name] = plans[name]()
        rebuilt[name] = "built again, frozen as before"
    if "reference" in lost:
        yield from reference_steps(core, core.link.state("reference")["reference"], rebuilt=True)
    snapshot = (yield from _actor_back(core, prefer, lost["actor"], rebuilt)) if "actor" in lost else None
    if {"actor", "inference"} & set(lost) and core.can_sync():
        yield core.synced()
        if "inference" in lost:
            rebuilt["inference"] = "built again, with the trainer's weights"
    elif "inference" in lost:
        rebuilt["inference"] = "built again, with the model's first weights: session.sync_weights() is due"
    core.link.set(unhealed={})
    return rebuilt, snapshot


def _lost_workers(engine: Engine) -> list[str]:
    """Return labels of the engine's workers that do not live; EngineError where one neither answers nor is dead."""
    import ray

    dead = []
    for label, actor in zip(engine.labels, engine.workers, strict=True):
        try:
            ray.get(actor.pid.remote(), timeout=ANSWER_LIMIT_S)
        except (ray.exceptions.RayActorError, WorkerDied):
            dead.append(label)
        except ray.exceptions.GetTimeoutError:
            raise EngineError(
                f"{label} of {engine.name} is not dead, but has not answered for {ANSWER_LIMIT_S:g} s: wait for it, or "
                "end its process and heal() again"
            ) from None
    return dead


def _actor_back(core: SessionCore, prefer: str, record: dict[str, Any], rebuilt: dict[str, str]) -> Steps:
    """Bring back what the ranks held, say so in `rebuilt`; returns the snapshot it came from, or None."""
    # a heal that ends in the middle leaves weights that are not the session's
    yield core.train.call_all("hold_back", NOT_BACK, what="heal")
    # what a rank left that died in the middle of a snapshot would lie in memory until the session ends
    starts = [snapshots.folder_start(core, disk) for disk in (False, True)]
    known = snapshots.as_stood_at(core)
    yield core.train.call_all("sweep_snapshots", starts, [s.folder for s in known], what="heal")
    staged, trainer = _staged(core, record), core.trainer
    there = [] if prefer == "weights" and staged else [s for s in known if Path(s.folder).is_dir()]
    newest = there[-1] if there else None
    state = core.link.state("setup", "snapshots")
    setup = state["setup"] if newest is None else state["snapshots"][newest.id]["setup"]
    yield from set_up_steps(core, setup, "heal")
    id_ = "*" if trainer is None else trainer.id
    with_trainer = newest is not None and any(Path(newest.folder).glob(f"*/trainer-{id_}"))
    if trainer is None and with_trainer:
        rebuilt["trainer"] = OF_ANOTHER
    if newest is not None and trainer is not None and with_trainer:
        rebuilt["trainer"] = yield from _made_again(core, f"from snapshot {newest.label!r}")
    back = _from_weights(core, staged) if newest is None else _from_snapshot(core, newest)
    rebuilt["actor"] = yield from back
    if trainer is not None and not with_trainer:
        rebuilt["trainer"] = yield from _made_again(core, "from its beginning: no snapshot has it")
    yield core.train.call_all("hold_back", None, what="heal")
    if core.link.state("engines")["engines"].get("inference", {}).get(ASLEEP):  # by ranks that cannot wake them now
        core.inference.cuda()
        core.link.engine("inference", {ASLEEP: False})
    return newest


def _from_snapshot(core: SessionCore, newest: Snapshot) -> Steps:
    """Bring rebuilt ranks to a snapshot; says what that was, and what had come after it."""
    reached = core.step
    try:
        yield from snapshots.restore_steps(core, newest, sync=False, healing=True)
    except CheckpointError as error:
        raise CheckpointError(
            f"snapshot {newest.label!r} (step {newest.step}) cannot be gone back to: {error}. "
            f"session.drop({newest.id!r}), then heal() again: it goes on from the one before, or without one from "
            "the weights of the last sync"
        ) from None
    said = f"built again, from snapshot {newest.label!r} (step {newest.step}): weights, optimizer, random state"
    if newest.step >= reached:
        return said
    steps = f"Step {reached} is" if newest.step + 1 == reached else f"Steps {newest.step + 1} to {reached} are"
    return f"{said}. {steps} lost"


def _from_weights(core: SessionCore, staged: dict[str, Any] | None) -> Steps:
    """Give rebuilt ranks the weights of the last sync, if they are kept; says what they have."""
    core.anchors.go_back(None)
    core.link.set(undo=[])
    if staged:
        yield core.train.call_all("load_staged", staged["manifest"], what="heal")
        core.link.set(version=staged["version"])
        return f"built again, with the weights of the last sync kept (v{staged['version']}); the optimizer starts anew"
    if (lora := core.options.train.lora) is not None and lora.path is not None:
        yield core.train.call_all("load_adapter", lora.path, what="heal")
    said = "built again, with the weights it was first built from; the optimizer starts anew"
    if not core.version:
        return said
    core.link.set(version=core.link.state("highest")["highest"] + 1)
    return f"{said}. What {core.step} steps had trained is lost: there was no snapshot and no sync"


def _staged(core: SessionCore, record: dict[str, Any]) -> dict[str, Any] | None:
    """Return version and manifest of the newest synced weights that still lie in shared memory: of a sync from the
    kernel, or from the ranks. None where a rank is on another node, which has none of it."""
    if any(node != cluster.node_address() for node in core.train.nodes):
        return None
    synced = [
        {"version": record[f"{whose}staged_version"], "manifest": record[f"{whose}staged"]}
        for whose in ("", "rank_")
        if f"{whose}staged" in record
    ]
    there = [one for one in synced if all(Path(bucket["path"]).exists() for bucket in one["manifest"]["buckets"])]
    return max(there, key=lambda one: int(one["version"]), default=None)


def _made_again(core: SessionCore, where: str) -> Steps:
    """Make the trainer of ranks that died from its description; says where it goes on, or why there is none."""
    trainer, core.trainer = core.trainer, None
    core.link.set(cut=None)  # a snapshot brings it back with the experience
    if trainer is None or trainer.spec is None:
        return OF_ANOTHER
    try:
        made = yield core.ask_ranks("make_trainer", trainer.method, trainer.spec, trainer.id, what="heal")
    except WorkerDied:
        core.trainer = trainer  # healed once more, it is made then
        raise
    except RLBenchError as error:
        return f"{LOST} ({error})"
    core.trainer = trainer
    trainer.went_back(int(made["optimizer_steps"]))
    return f"made again, {where}"
