"""Going on after a death: rebuild the engines that lost a worker, and bring back what they held.

A training engine that lost a rank lost its shards: it is built again and goes back to the snapshot at which the session
stood last (where undo is kept, each finished step left one). Without one it takes the weights of the last sync, which
lie in shared memory, or those it was built from; its optimizer then starts anew, which is said. A `session.trainer` of
its ranks is made again, and goes back to the snapshot where that has it. Replicas are built again and get the trainer's
weights by a sync; those that live are woken where the ranks had them sleep, and mended where they had begun to take
weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlbench.dispatch.chain import Steps
from rlbench.engines.base import Engine, shared
from rlbench.engines.sync import sync_weights
from rlbench.errors import CheckpointError, EngineError, RLBenchError, StateError, Suggesting, WorkerDied
from rlbench.session import building
from rlbench.session.state import snapshots
from rlbench.strategies.generation.session_link import ASLEEP

if TYPE_CHECKING:
    from rlbench.session.core import SessionCore
    from rlbench.session.training.session_trainer import SessionTrainer

SOURCES = ("snapshot", "weights")
ANSWER_LIMIT_S = 30.0
NOT_BACK = (
    "this engine was built again with the weights it was first built from, and heal() ended before it had brought the "
    "session's state back: session.heal() again, or session.restore(…) a snapshot"
)
LOST = "lost with its ranks: session.trainer(…) makes one"


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


def heal_steps(session: SessionCore, prefer: str) -> Steps:
    """Rebuild what died; returns `Healed`.

    Args:
        prefer: "snapshot", or "weights": the last synced weights, without their optimizer.
    """
    if prefer not in SOURCES:
        raise StateError(f"heal(prefer={prefer!r}): wanted 'snapshot' or 'weights'")
    state = session.link.state("engines", "unhealed")
    records, unhealed = state["engines"], dict(state["unhealed"])  # rebuilt is not yet brought back
    lost = [
        *unhealed,
        *(
            name
            for name, engine in session.engines.items()
            if name not in unhealed
            and (not engine.built or records.get(name, {}).get("broken") or lost_workers(engine))  # one that is being
        ),
    ]  # ended may still answer
    for name in lost:
        unhealed.setdefault(name, records.get(name, {}))
    session.link.set(unhealed=unhealed)
    rebuilt: dict[str, str] = {}
    snapshot: str | None = None
    plans = building.plans(session.options, session.link)
    record = unhealed.get("actor", records.get("actor", {}))
    for name in lost:
        if name in session.engines:  # else another driver's heal ended before it was built
            session.engines[name].discard()
        session.engines[name] = plans[name]()
        rebuilt[name] = "built again, frozen as before"
    staged = _staged(record)
    if "actor" in lost:  # a heal that ends in the middle leaves weights that are not the session's
        yield session.train.call_all("hold_back", NOT_BACK, what="heal")
    if "actor" in lost:
        yield _swept(session)
        trainer = session.trainer
        kept = _kept_with(session, trainer, prefer, staged)
        if trainer is not None and kept is not None:
            rebuilt["trainer"] = yield from _made_again(session, trainer, f"from snapshot {kept.label!r}")
        rebuilt["actor"], snapshot = yield from _bring_back(session, prefer, staged)
        if trainer is not None and kept is None:
            rebuilt["trainer"] = yield from _made_again(session, trainer, "from its beginning: no snapshot has it")
        if trainer is None and kept is not None:
            rebuilt["trainer"] = f"{LOST} (another kernel had made it)"
        yield session.train.call_all("hold_back", None, what="heal")
        _wake(session)
    if {"actor", "inference"} & set(lost) and _can_sync(session):
        yield sync_weights(session.train, session.inference, session.version)
        if "inference" in lost:
            rebuilt["inference"] = "built again, with the trainer's weights"
    elif "inference" in lost:
        rebuilt["inference"] = "built again, with the model's first weights: session.sync_weights() is due"
    session.link.set(unhealed={})
    return Healed(rebuilt, session.step, session.version, snapshot)


def lost_workers(engine: Engine) -> list[str]:
    """Labels of the engine's workers that do not live any more; EngineError where one neither answers nor is dead."""
    import ray

    found = []
    for label, actor in zip(engine.labels, engine.workers, strict=True):
        try:
            ray.get(actor.pid.remote(), timeout=ANSWER_LIMIT_S)
        except (ray.exceptions.RayActorError, WorkerDied):
            found.append(label)
        except ray.exceptions.GetTimeoutError:
            raise EngineError(
                f"{label} of {engine.name} is not dead, but has not answered for {ANSWER_LIMIT_S:g} s: wait for it, or "
                "end its process and heal() again"
            ) from None
    return found


def _swept(session: SessionCore) -> Any:
    """Free what a rank left that died in the middle of a snapshot; it would lie in memory until the session ends."""
    starts = [snapshots.folder_start(session, disk) for disk in (False, True)]
    kept = [snapshot.folder for snapshot in snapshots.listed(session)]
    return session.train.call_all("sweep_snapshots", starts, kept, what="heal")


def _bring_back(session: SessionCore, prefer: str, staged: dict[str, Any] | None) -> Steps:
    """Give a rebuilt trainer the newest state there is; returns what that was, in words, and the snapshot's id."""
    newest, reached = _newest(session, prefer, staged), session.step
    if newest is not None:
        try:
            yield from snapshots.restore_steps(session, newest, sync=False, healing=True)
        except CheckpointError as error:
            raise CheckpointError(
                f"snapshot {newest.label!r} (step {newest.step}) cannot be gone back to: {error}. "
                f"session.drop({newest.id!r}), then heal() again: it goes on from the one before, or without one from "
                "the weights of the last sync"
            ) from None
        said = f"built again, from snapshot {newest.label!r} (step {newest.step}): weights, optimizer, random state"
        return said + _taken_back(newest.step, reached), newest.id
    session.anchors.go_back(None)
    session.link.set(undo=[])
    if staged:
        yield session.train.call_all("load_staged", staged["manifest"], what="heal")
        session.link.set(version=staged["version"])
        said = f"built again, with the weights of the last sync kept (v{staged['version']}); the optimizer starts anew"
        return said, None
    fresh = session.version
    if fresh:
        session.link.set(version=session.link.state("highest")["highest"] + 1)
    lost = f". What {session.step} steps had trained is lost: there was no snapshot and no sync" if fresh else ""
    return f"built again, with the weights it was first built from; the optimizer starts anew{lost}", None


def _taken_back(step: int, reached: int) -> str:
    """Which steps had been taken after the one gone back to, in words."""
    if step >= reached:
        return ""
    return f". Step {reached} is lost" if step + 1 == reached else f". Steps {step + 1} to {reached} are lost"


def _staged(record: dict[str, Any]) -> dict[str, Any] | None:
    """Version and manifest of the newest synced weights that still lie in shared memory: of a sync from the kernel, or
    from the ranks."""
    found = [
        {"version": record[f"{whose}staged_version"], "manifest": record[f"{whose}staged"]}
        for whose in ("", "rank_")
        if f"{whose}staged" in record
    ]
    there = [one for one in found if all(Path(bucket["path"]).exists() for bucket in one["manifest"]["buckets"])]
    return max(there, key=lambda one: int(one["version"]), default=None)


def _newest(session: SessionCore, prefer: str, staged: dict[str, Any] | None) -> snapshots.Snapshot | None:
    """The snapshot to go back to."""
    kept = [s for s in snapshots.as_stood_at(session) if Path(s.folder).is_dir()]
    return kept[-1] if kept and not (prefer == "weights" and staged) else None


def _kept_with(
    session: SessionCore, trainer: SessionTrainer | None, prefer: str, staged: dict[str, Any] | None
) -> snapshots.Snapshot | None:
    """The snapshot to go back to, where the trainer is in it; without one: where any trainer is."""
    newest, id_ = _newest(session, prefer, staged), "*" if trainer is None else trainer.id
    return newest if newest and any(Path(newest.folder).glob(f"*/trainer-{id_}")) else None


def _made_again(session: SessionCore, trainer: SessionTrainer, where: str) -> Steps:
    """Make the trainer of ranks that died from its description; says where it goes on, or why there is none."""
    session.trainer = None
    session.link.set(cut=None)  # a snapshot brings it back with the experience
    if trainer.spec is None:
        return f"{LOST} (another kernel had made it)"
    try:
        made = yield session.train.call_all(
            "make_trainer", trainer.method, shared(trainer.spec), trainer.id, finish=lambda found: found[0], what="heal"
        )
    except WorkerDied:
        session.trainer = trainer  # healed once more, it is made then
        raise
    except RLBenchError as error:
        return f"{LOST} ({error})"
    session.trainer = trainer
    trainer.went_back(int(made["optimizer_steps"]))
    return f"made again, {where}"


def _wake(session: SessionCore) -> None:
    """Wake the replicas if it was the ranks that had them sleep, for a while that never ended."""
    if session.link.state("engines")["engines"].get("inference", {}).get(ASLEEP):
        session.inference.cuda()
        session.link.engine("inference", {ASLEEP: False})


def _can_sync(session: SessionCore) -> bool:
    """Whether a sync can be done now; it also mends replicas that were left half-way."""
    return session.train.status()["weights"] == "cuda" and session.inference.status()["weights"] in ("cuda", "torn")
