"""Weight sync from the kernel: the training engine's end of `rlbench.weights.sync`, and whether two engines agree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from rlbench.data.batches.sequences import as_batch
from rlbench.dispatch import views
from rlbench.dispatch.chain import Chain, Steps
from rlbench.dispatch.link import shm_prefix
from rlbench.errors import BuildError, StateError, WeightSyncError
from rlbench.weights.manifest import Manifest, merged
from rlbench.weights.proof import allowed_gap, largest_gap, probe_tokens
from rlbench.weights.sync import asked, per_replica, send_while_applying, sync_steps
from rlbench.weights.transport import Choice, Facts

if TYPE_CHECKING:
    from rlbench.engines.inference import InferenceEngine
    from rlbench.engines.train import TrainEngine

PROBE_OPTIONS = {"packing": False, "head": "plain"}
"""What every causal model can compute; whether it can run packed is another question."""


def sync_weights(
    train: TrainEngine, infer: InferenceEngine, version: int | None = None, transport: str | None = None
) -> Chain:
    """Start a sync; its result is a `Synced`.

    Args:
        train, infer: both sides.
        version: what the replicas then hold; None: one more than they hold.
        transport: "shm", "ipc", "broadcast", or None for the best that works (`rlbench.weights.transport.choose`).
    """

    def steps() -> Steps:
        source = EngineSource(train, infer, version)
        done = yield from sync_steps(source, infer, transport)
        if source.view is not None:
            source.view.close(done)
        return done

    return Chain("weight sync", train.link.held("weight sync", steps()))


def agreement_steps(train: TrainEngine, infer: InferenceEngine) -> Steps:
    """Refuse, as soon as both engines are built, a model whose weights could never be synced between them.

    Compares names and shapes of what would be sent, and both sides' log-probs on the probe. Where the two were asked to
    compute in different dtypes there is nothing to compare, and a sync says so.

    Raises:
        BuildError: with what differs.
    """
    dtype = str(train.info["dtype"])
    if dtype != infer.info["dtype"]:
        return
    tokens = probe_tokens(int(infer.info["vocab_size"]))
    try:
        layout = yield train.call_all("weight_layout", finish=lambda parts: parts[0], what="comparing names")
        yield infer.call_all("check_weights", layout, what="comparing names")
        expected = yield from probe_steps(train, tokens, "comparing log-probs")
        got = yield infer.call_all("prompt_logprobs", tokens, what="comparing log-probs")
    except WeightSyncError as error:
        raise BuildError(
            f"the weights of {train.info['architecture']} cannot be brought from the trainer to the replica: {error}"
        ) from error
    gap, allowed = largest_gap(expected, got), allowed_gap(dtype)
    if not gap <= allowed:
        raise BuildError(
            f"{infer.executor} and transformers compute different log-probs from the same checkpoint of "
            f"{train.info['architecture']}: up to {gap:.2g} (allowed in {dtype}: {allowed:g}), so what is rolled out "
            "would not be the trained policy's. docs/models.md lists families that agree"
        )


def probe_steps(train: TrainEngine, tokens: list[list[int]], what: str) -> Steps:
    """Return the log-probs of each sequence, from its second token on, under a training engine's weights."""
    return (yield train.call_logprobs(as_batch(tokens), PROBE_OPTIONS, what))


class EngineSource:
    """Training ranks as their kernel calls them: a `WeightSource`."""

    def __init__(self, train: TrainEngine, infer: InferenceEngine, version: int | None) -> None:
        self._train, self._infer, self._version = train, infer, version
        need_weights(train)
        self.dtype = str(train.info["dtype"])
        self.view = views.make("sync")

    def facts(self) -> list[Facts]:
        return asked(self._train, "sync_facts")

    def logprobs(self, tokens: list[list[int]]) -> Steps:
        return probe_steps(self._train, tokens, "weight sync")

    def stage(self, choice: Choice) -> Steps:
        prefix = f"{shm_prefix(self._train.link.name)}{self._train.name}"
        options = {"transport": choice.transport, "prefix": prefix, "ranks": choice.senders}
        what = "weight sync: staging"
        return (yield self._train.call_all("stage_weights", options, finish=joined, what=what, observer=self.view))

    def announce(self, sender: int, options: dict[str, Any]) -> Steps:
        what = "weight sync: announcing"
        return (yield self._train.call_all("announce_weights", options, finish=lambda parts: parts[sender], what=what))

    def broadcast(self, manifest: Manifest, workers: list[int]) -> Steps:
        yield Crossing(self._train, self._infer, manifest, workers)

    def release(self, choice: Choice) -> Steps:
        if choice.transport == "ipc":
            yield self._train.call_all("release_weights", what="weight sync")

    def new_version(self, held: Sequence[int]) -> int:
        return max(held) + 1 if self._version is None else self._version

    def committed(self, version: int, manifest: Manifest) -> None:
        if manifest.transport == "shm":  # these files outlive the ranks: what a rebuilt trainer may go on from
            self._train.note_staged(version, asdict(manifest))


class Crossing:
    """`send_weights` on all training ranks and `apply_weights` on every replica at once, as one step of a chain."""

    def __init__(self, train: TrainEngine, infer: InferenceEngine, manifest: Manifest, workers: list[int]) -> None:
        self._train, self._infer = train, infer
        self._sending = train.call_all("send_weights", infer.name, manifest, what="weight sync: sending")
        try:
            self._applying = list(infer.apply_each(per_replica(manifest, workers)))
        except BaseException as error:
            self._give_up(f"the replicas could not be called: {error}")
            raise

    def stop(self) -> None:
        """Ask the sender to stop; it does as long as it has not begun to send."""
        self._sending.stop()

    def result(self) -> None:
        """Wait for both sides.

        Raises:
            Stopped: stopped before anything was sent; the replicas keep their weights.
            WeightSyncError: a side failed or died; replicas that had begun refuse to generate until a sync succeeds.
        """
        error = send_while_applying(self._sending.result, self._applying, self._give_up, self._infer.name)
        if error is not None:
            raise error

    def _give_up(self, reason: str) -> None:
        """Tell the sender, and through it all members; to a dead sender there is nothing to tell."""
        for actor in self._train.workers:
            actor.control.remote("give_up_sync", self._infer.name, reason)


def need_weights(train: TrainEngine) -> None:
    """Refuse to read a trainer's weights where they are not whole, or not resident; StateError names the remedy."""
    status = train.status()
    if status["torn"] is not None:
        raise StateError(status["torn"])
    if status["weights"] != "cuda":
        raise StateError(f"the weights of {train.name} are offloaded: {train.name}.cuda('weights') first")


def joined(parts: Sequence[Manifest | None]) -> Manifest:
    """Join what the ranks staged into one manifest; ranks that staged nothing gave None."""
    return merged([part for part in parts if part is not None])


def logprob_rows(parts: list[dict[str, Any]]) -> list[np.ndarray]:
    """Join the ranks' log-probs in the batch's order."""
    return rows_in_order(parts)["logprobs"]


def rows_in_order(parts: list[dict[str, Any]]) -> dict[str, list[np.ndarray]]:
    """Join the ranks' per-row `channels` in the batch's order, each row once; by name."""
    parts = [part for part in parts if len(part["rows"])]
    rows = np.concatenate([part["rows"] for part in parts]).astype(np.int64)
    _, first = np.unique(rows, return_index=True)  # a row that was repeated to fill a rank counts once
    shared = [name for name in parts[0]["channels"] if all(name in part["channels"] for part in parts)]
    by_name = {name: [values for part in parts for values in part["channels"][name]] for name in shared}
    return {name: [np.asarray(values[i]) for i in first] for name, values in by_name.items()}
