"""Where weights are: on the replicas by a sync, in device memory or out of it."""

from __future__ import annotations

from rlbench.engines.moved import Moved
from rlbench.engines.sync import sync_weights as started_sync
from rlbench.session.core import SessionCore
from rlbench.session.verb import Pending
from rlbench.weights.sync import Synced


def sync_weights(core: SessionCore, transport: str | None = None) -> Pending[Synced]:
    """Send the trainer's weights to the replicas and prove it by log-probs.

    Args:
        transport: `"shm"`, `"ipc"` or `"broadcast"` (see `TrainEngine.p2p_weight_sync`); None: the best that works.

    Returns:
        `Synced`: `version`, `bytes`, `tensors`, `transport` and `gap` (or a `Pending`).
    """
    return started_sync(core.train, core.inference, core.version, transport)


def offload(core: SessionCore, engine: str, *parts: str) -> Moved:
    """Free device memory, `offload("train")` or `offload("inference", "kv_cache")`; returns what was measured."""
    return core.engine(engine).cpu(parts or None)


def onload(core: SessionCore, engine: str, *parts: str) -> Moved:
    """Make an engine, or parts of it, resident again."""
    return core.engine(engine).cuda(parts or None)
