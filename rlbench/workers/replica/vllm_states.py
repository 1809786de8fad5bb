"""How vLLM gives up the memory of weights and KV cache and takes it back, noted in the replica's state."""

from __future__ import annotations

from typing import Any

from rlbench.errors import StateError
from rlbench.workers.replica.state import ReplicaState


def release(executor: Any, held: ReplicaState, state: str, tags: set[str], on_cpu: bool) -> None:
    """Bring what `tags` name to `cpu` or `meta`; on a host `cpu` releases the KV cache alone."""
    if "weights" in tags and not on_cpu:
        if tags != {"weights", "kv_cache"}:
            raise StateError("vLLM on a GPU releases weights only together with the KV cache: leave the tags out")
        if executor.sleeping_tags:  # vLLM ignores a second sleep, also a deeper one
            executor.wake_up(sorted(executor.sleeping_tags))
        executor.sleep(1 if state == "cpu" and held.weights != "meta" else 2)
    else:
        drop = ["kv_cache", *(["weights"] if state == "meta" else [])]
        gone = executor.sleeping_tags
        if now := tuple(tag for tag in drop if tag in tags and tag not in gone):
            executor.discard(now)
    if "kv_cache" in tags:
        held.kv_cache = "meta"
    if "weights" in tags and (state == "meta" or held.weights == "cuda"):
        held.weights = state


def wake(executor: Any, held: ReplicaState, tags: set[str]) -> None:
    """Make room again for what `tags` name; weights that were discarded have no content then."""
    if asleep := sorted(tags & executor.sleeping_tags):
        executor.wake_up(asleep)
    if "kv_cache" in tags:
        held.kv_cache = "cuda"
    if "weights" in tags:
        held.weights = {"meta": "empty", "cpu": "cuda"}.get(held.weights, held.weights)
