"""Where a replica's weights and KV cache are, which version it holds, and what that forbids."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rlbench.dispatch.context import bringing_back, this_engine
from rlbench.errors import StateError, nearest

TAGS = ("weights", "kv_cache")
STATES = ("cuda", "cpu", "meta")

SYNC = "a sync (session.sync_weights(), or p2p_weight_sync(…) on the train engine)"


def _mend(weights: str) -> str | None:
    """What is wrong with weights in that state and the calls that mend it; None where nothing is."""
    of, reload = f"the weights of {this_engine()}", f"reload() on {this_engine()}"
    return {
        "cpu": f"{of} are offloaded: {bringing_back('weights')} first",
        "meta": f"{of} were discarded: {bringing_back()} reads them from the checkpoint; or {bringing_back('weights')} "
        f"and then {SYNC}",
        "empty": f"{of} have their room but nothing in it: {SYNC} fills it, or {reload}",
        "torn": f"a weight sync failed half-way, so {this_engine()} holds a mixture: {SYNC} again, or {reload}",
    }.get(weights)


@dataclass
class ReplicaState:
    """`weights`: cuda (resident), cpu (kept in host memory), meta (discarded), empty (room, no content) or torn (a sync
    failed half-way). `kv_cache`: cuda or meta. `version` is what was committed; `pending` means weights were applied
    that no version was committed for yet."""

    weights: str = "cuda"
    kv_cache: str = "cuda"
    version: int = 0
    pending: bool = False

    def require_ready(self, what: str, *, committed: bool = True) -> None:
        """Raise StateError, naming the call that mends it, unless the replica can compute.

        `committed`: also refuse while a sync was applied but not committed (rollouts need a version; its
        probe does not).
        """
        wrong = _mend(self.weights)
        if wrong is not None:
            raise StateError(f"{what}: {wrong}")
        if self.kv_cache != "cuda":
            raise StateError(f"{what}: the KV cache of {this_engine()} is released: {bringing_back('kv_cache')} first")
        if committed and self.pending:
            raise StateError(
                f"{what}: new weights were applied to {this_engine()} but the sync did not end, so they have no "
                f"version: {SYNC} again, or reload() on it"
            )

    def require_room(self, what: str) -> None:
        """Raise StateError unless weights can be written into the replica."""
        if self.weights in ("cpu", "meta"):
            raise StateError(
                f"{what}: the weights of {this_engine()} are on {self.weights}: {bringing_back('weights')} first"
            )


def check_tags(state: str, tags: list[str] | None) -> set[str]:
    """The tags a state change is about (None: all). Raises StateError for an unknown state or tag."""
    if state not in STATES:
        raise StateError(f"no device state {state!r}: one of {', '.join(STATES)}{nearest(state, STATES)}")
    for tag in tags or ():
        if tag not in TAGS:
            raise StateError(f"no tag {tag!r} on an inference engine: {' or '.join(TAGS)}{nearest(tag, TAGS)}")
    return set(tags) if tags else set(TAGS)


def moved(before: dict[str, Any], after: dict[str, Any], state: ReplicaState, **more: Any) -> dict[str, Any]:
    """What a state change did: states by tag, bytes resident by owner and bytes freed (negative: taken), measured."""
    return {
        "weights": state.weights,
        "kv_cache": state.kv_cache,
        "version": state.version,
        "memory": after,
        "freed_bytes": before["rss"] - after["rss"],
        **more,
    }
