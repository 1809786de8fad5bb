"""How a vLLM replica takes weights: compared by name first, then loaded by all its workers, or torn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlbench.dispatch.context import this_engine
from rlbench.errors import WeightSyncError
from rlbench.weights.manifest import ChannelInfo, Manifest
from rlbench.weights.names import check_adapter, check_names, checkpoint_shapes
from rlbench.weights.transport import PeerFailed

OF_WEIGHTS = ("start_weight_update", "update_weights", "finish_weight_update")
OF_ADAPTERS = ("start_adapter", "take_adapter", "finish_adapter")
"""Methods of a worker by which weights, or an adapter alone, come."""


class WeightReceiver:
    """The receiving side of one replica: `rpc` calls all workers, `folder` is the checkpoint whose names and shapes are
    expected, with an output head that is the embedding where `tied`."""

    def __init__(self, rpc: Callable[..., list[Any]], folder: str, tied: bool) -> None:
        self._rpc = rpc
        self._expected = checkpoint_shapes(folder)
        self._optional = ("lm_head.weight",) if tied else ()
        self.channel = ""
        """Token of the broadcast group that all workers are in; empty: none."""
        self._straight = True

    def by_reload(self) -> None:
        """Have vLLM's own reload load all weights from now on: some that were loaded were not proven, and it is not
        known why."""
        self._straight = False

    def check(self, manifest: Manifest) -> None:
        """Refuse names and shapes that are not those of the replica's checkpoint."""
        if manifest.adapter is not None:
            check_adapter(manifest.shapes, self._expected)
        else:
            check_names(manifest.shapes, self._expected, self._optional)

    def meet(self, channel: ChannelInfo) -> None:
        """Join the sender's group and wait until it begins; the weights are not touched yet."""
        self.channel = ""
        try:
            self._transfer("init_weight_transfer_engine", {"channel": channel})
        except WeightSyncError as error:
            raise type(error)(f"the broadcast did not begin, the replica keeps its weights: {error}") from None
        self.channel = channel.token

    def load(self, manifest: Manifest) -> None:
        """Load all buckets, on all workers; where it fails from the first on, the replica holds a mixture."""
        layout = _layout(manifest) if self._straight else 0
        start, take, finish = OF_WEIGHTS if manifest.adapter is None else OF_ADAPTERS
        try:
            if manifest.delta:
                self._transfer("begin_copies", manifest.follows)
            self._transfer(start, *(() if manifest.adapter is None else (manifest.adapter, layout)))
            update = {"transport": manifest.transport, "part": bool(manifest.unchanged), "delta": manifest.delta}
            update["layout"] = layout
            for bucket in manifest.buckets:
                self._transfer(take, update | {"bucket": bucket})
            self._transfer(finish)
            if manifest.delta:
                self._transfer("hold_copies", manifest.token)
        except Exception as error:
            self.channel = ""
            kind = type(error) if isinstance(error, WeightSyncError) else WeightSyncError
            raise kind(
                f"the replica could not load the weights, and now holds a mixture: {error}. "
                f"Sync again, or call reload() on {this_engine()}"
            ) from error

    def set_aside(self, adapter: int) -> None:
        """Have all workers keep what they serve: the adapter of that number, or with 0 the whole weights."""
        self._transfer("set_aside", adapter)

    def put_back(self) -> None:
        """Have all workers serve again what they set aside."""
        self._transfer("put_back")

    def _transfer(self, method: str, *args: Any) -> None:
        failures = [failure for failure in self._rpc("transfer", args=(method, *args)) if failure is not None]
        causes = [text for text, secondary in failures if not secondary]
        if causes:
            raise WeightSyncError(causes[0])
        if failures:
            raise PeerFailed(failures[0][0])


def _layout(manifest: Manifest) -> int:
    """Return a hash, of this process, of all tensors that are here then, those before too where only some come."""
    return hash(frozenset((e.name, e.dtype, e.shape) for e in (*manifest.entries, *manifest.left_out)))
