"""Weights from one training engine to another: a reference that follows the policy, with a proof by log-probs."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from rlbench.dispatch.chain import Chain, Steps
from rlbench.dispatch.link import shm_prefix
from rlbench.engines.sync import joined, need_weights, probe_steps
from rlbench.errors import EngineError, WeightSyncError
from rlbench.weights.manifest import Manifest
from rlbench.weights.proof import allowed_gap, largest_gap, probe_tokens
from rlbench.weights.sync import asked, synced
from rlbench.weights.transport import choose

if TYPE_CHECKING:
    from rlbench.engines.train import TrainEngine


def copy_weights(source: TrainEngine, target: TrainEngine, transport: str | None = None) -> Chain:
    """Start a copy through shared memory; see `TrainEngine.p2p_weight_sync`."""
    return Chain("weight copy", source.link.held("weight copy", _steps(source, target, transport)))


def _steps(source: TrainEngine, target: TrainEngine, transport: str | None) -> Steps:
    _need_copyable(source, target, transport)
    tokens = probe_tokens(int(source.info["vocab_size"]))
    expected = yield from probe_steps(source, tokens, "weight copy: proof")
    prefix = f"{shm_prefix(source.link.name)}{source.name}-copy"  # what replicas are given stays, for heal()
    manifest: Manifest = yield source.call_all(
        "stage_weights", {"transport": "shm", "prefix": prefix}, finish=joined, what="weight copy: staging"
    )
    yield target.call_all("load_staged", asdict(manifest), what="weight copy: loading")
    yield source.call_all("forget_weights", prefix, what="weight copy")
    got = yield from probe_steps(target, tokens, "weight copy: proof")
    gap = largest_gap(expected, [got])
    wider = max((str(engine.info["dtype"]) for engine in (source, target)), key=allowed_gap)
    if not gap <= allowed_gap(wider):
        raise WeightSyncError(
            f"after the copy the log-probs of {target.name} differ from those of {source.name} by up to {gap:.2g} "
            f"(allowed: {allowed_gap(wider):g}): both must be of one architecture and config; build {target.name} again"
        )
    return synced(None, manifest, "shm", gap, wider)


def _need_copyable(source: TrainEngine, target: TrainEngine, transport: str | None) -> None:
    """Refuse what cannot be copied; nothing has moved."""
    if target is source:
        raise EngineError(f"p2p_weight_sync: {source.name} is itself the target; give another engine")
    if target.link is not source.link:
        raise EngineError(f"p2p_weight_sync: {source.name} and {target.name} are in different sessions")
    if target.info["optimizer"]:
        raise EngineError(
            f"p2p_weight_sync: {target.name} trains ({', '.join(target.info['optimizer'])}), and an optimizer's state "
            "belongs to its weights. Copy into an engine without one, as a reference is; session.restore() and "
            "rb.Session.load() bring both back"
        )
    for engine in (source, target):
        need_weights(engine)
    if transport not in (None, "shm"):
        raise WeightSyncError(f"transport={transport!r}: between training engines there is 'shm'; leave transport out")
    choose(asked(source, "sync_facts"), asked(target, "sync_facts"), "shm")
