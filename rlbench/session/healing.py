"""Going on after a death: rebuild the engines that lost a worker, and bring back what they held.

A training engine that lost a rank lost its shards: it is built again and goes back to the newest snapshot (the state
before the last step is one, where undo is kept). Without one it takes the weights of the last sync, which lie in shared
memory, or those it was built from; its optimizer then starts anew, which is said. Replicas are built again and get the
trainer's weights by a sync.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlbench.dispatch.chain import Steps
from rlbench.engines.base import Engine
from rlbench.engines.sync import sync_weights
from rlbench.errors import EngineError, StateError, WorkerDied
from rlbench.session import building, snapshots

if TYPE_CHECKING:
    from rlbench.session.session import Session

SOURCES = ("snapshot", "weights")
ANSWER_LIMIT_S = 30.0


@dataclass(frozen=True)
class Healed:
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


def heal_steps(session: Session, prefer: str) -> Steps:
    """Rebuild what died; returns `Healed`.

    Args:
        prefer: "snapshot", or "weights": the last synced weights, newer by up to a step, without their optimizer.
    """
    if prefer not in SOURCES:
        raise StateError(f"heal(prefer={prefer!r}): wanted 'snapshot' or 'weights'")
    lost = [name for name, engine in session.engines.items() if lost_workers(engine)]
    rebuilt: dict[str, str] = {}
    snapshot: str | None = None
    plans = building.plans(session.options, session.link)
    record = session.link.state("engines")["engines"].get("actor", {})
    staged = {"version": record["staged_version"], "manifest": record["staged"]} if "staged" in record else None
    for name in lost:
        session.engines[name].discard()
        session.engines[name] = plans[name]()
        rebuilt[name] = "built again, frozen as before"
    if "actor" in lost:
        rebuilt["actor"], snapshot = yield from _bring_back(session, prefer, staged)
    if lost and {"actor", "inference"} & set(lost) and session.replicas_can_sync():
        yield sync_weights(session.train, session.inference, session.version)
        if "inference" in lost:
            rebuilt["inference"] = "built again, with the trainer's weights"
    elif "inference" in lost:
        rebuilt["inference"] = "built again, with the model's first weights: session.sync_weights() is due"
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


def _bring_back(session: Session, prefer: str, staged: dict[str, Any] | None) -> Steps:
    """Give a rebuilt trainer the newest state there is; returns what that was, in words, and the snapshot's id."""
    kept = [s for s in snapshots.listed(session) if Path(s.folder).is_dir()]
    if kept and not (prefer == "weights" and staged):
        newest = kept[-1]
        yield from snapshots.restore_steps(session, newest, sync=False)
        said = f"built again, from snapshot {newest.label!r} (step {newest.step}): weights, optimizer, random state"
        return said, newest.id
    session.anchors.go_back(None)
    session.link.set(undo=[])
    if staged and all(Path(bucket["path"]).exists() for bucket in staged["manifest"]["buckets"]):
        yield session.train.call_all("load_staged", staged["manifest"], what="heal")
        session.link.set(version=staged["version"])
        said = f"built again, with the weights of the last sync (v{staged['version']}); the optimizer starts anew"
        return said, None
    fresh = session.version
    if fresh:
        session.link.set(version=session.link.state("highest")["highest"] + 1)
    lost = f". What {session.step} steps had trained is lost: there was no snapshot and no sync" if fresh else ""
    return f"built again, with the weights it was first built from; the optimizer starts anew{lost}", None
