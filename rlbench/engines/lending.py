"""Draws under the weights of a kept version: the session's ranks stage them, its replicas have them for one call.

Neither side changes: the ranks compute with the snapshot's weights for as long as they stage them, the replicas put
their own aside. Both go back to the bit. What else was asked of either waits meanwhile.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from rlbench.data.base.ragged import rows_in_order
from rlbench.data.batches.batch import as_batch
from rlbench.dispatch.chain import Chain, Steps
from rlbench.dispatch.link import shm_prefix
from rlbench.dispatch.pending import Pending
from rlbench.engines.base import Engine, live_engines
from rlbench.engines.under import own_adapter
from rlbench.errors import SessionError, WeightSyncError
from rlbench.weights.loan import Loan
from rlbench.weights.manifest import merged
from rlbench.weights.probe import PROBE_OPTIONS, Probe
from rlbench.weights.sync import allowed_gap, asked
from rlbench.weights.transport import choose

if TYPE_CHECKING:
    from rlbench.engines.inference import InferenceEngine

INSTEAD = "session.restore(…) it and session.sync_weights(), and draw with the weights that are there then"


def drawn_under(infer: InferenceEngine, snapshot: Mapping[str, Any], draw: Callable[[Loan], Pending]) -> Chain:
    """Start a draw under the weights of a snapshot, as it is on record."""
    if infer.executor != "vllm":
        raise SessionError(f"executor={infer.executor!r} lends its replicas no weights: {INSTEAD}")
    label, train = snapshot["label"], _trainer_of(infer)
    if train.info["dtype"] != infer.info["dtype"]:
        raise SessionError(
            f"the trainer computes in {train.info['dtype']} and the replicas in {infer.info['dtype']}, so what they "
            f"draw under {label!r} cannot be proven: {INSTEAD}"
        )
    what = f"drawing under {label!r}"
    return Chain(what, infer.link.held(what, _steps(train, infer, snapshot, draw)))


def _steps(
    train: Engine, infer: InferenceEngine, snapshot: Mapping[str, Any], draw: Callable[[Loan], Pending]
) -> Steps:
    try:
        choose(asked(train, "sync_facts"), asked(infer, "sync_facts"), "shm")
    except WeightSyncError as error:
        raise SessionError(f"weights of a kept version cannot be lent: {error}. Instead: {INSTEAD}") from error
    probe, prefix = Probe.of(infer.info), f"{shm_prefix(infer.link.name)}kept-{secrets.token_hex(3)}"
    staging = {"transport": "shm", "prefix": prefix, "adapter": own_adapter(infer)}
    try:
        parts = yield train.call_all(
            "lend_snapshot",
            snapshot["folder"],
            staging,
            as_batch(probe.tokens, probe.media),
            PROBE_OPTIONS,
            what=f"lending {snapshot['label']!r}",
            track=True,
        )
        expected = list(rows_in_order([part for _, part in parts])["logprobs"])
        manifest, version = merged([part for part, _ in parts]), int(snapshot["version"])
        allowed = allowed_gap(str(train.info["dtype"]))
        return (yield draw(Loan(snapshot["label"], version, manifest, probe, expected, allowed)))
    finally:
        yield train.call_all("forget_weights", prefix, what="lending")


def _trainer_of(infer: InferenceEngine) -> Engine:
    """Return the session's trainer, which has its snapshots."""
    trainers = [one for one in live_engines("train") if one.link is infer.link and one.name == "actor"]
    if not trainers:
        raise SessionError(f"session {infer.link.name!r} has no trainer in this kernel whose kept versions could draw")
    return trainers[0]
