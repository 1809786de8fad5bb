"""The training verbs as steps: reference log-probs, forward and backward over micro-batches, optimizer step.

Old log-probs: a batch is trained against the policy that saw it first. The first step on a batch uses its own
log-probs (ratio exactly 1); they are kept, so that further steps on the same tokens have ratios against them.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from rlbench.data import Ragged, TrainBatch
from rlbench.data.metrics import Metrics
from rlbench.dispatch.chain import Steps
from rlbench.engines import TrainEngine
from rlbench.engines.base import shared
from rlbench.engines.sync import rows_in_order
from rlbench.errors import DataError, LossError, WorkerDied
from rlbench.session import snapshots
from rlbench.session.loss_check import NO_REFERENCE, ShippedLoss, ship

if TYPE_CHECKING:
    from rlbench.session.session import Session


@dataclass(frozen=True)
class StepOptions:
    """How one forward/backward is done; the options a rank reads, see `rlbench.trainers.options`."""

    aggregation: Any = None
    token_budget: int | None = None
    packing: bool = True
    head: str = "auto"

    def to_worker(self) -> dict[str, Any]:
        """The options a rank reads; LossError for an unknown aggregation."""
        from rlbench.rl import Aggregation

        if self.aggregation is not None:
            Aggregation.of(self.aggregation)
        return {"aggregation": self.aggregation, "token_budget": self.token_budget, "packing": self.packing,
                "head": self.head}  # fmt: skip


def train_step_steps(
    session: Session, batch: TrainBatch, loss: Any, options: StepOptions, lr: float | None
) -> Steps:
    """Exactly one optimizer step on `batch`; returns `Metrics` and records them."""
    begin = time.perf_counter()
    metrics = yield from forward_backward_steps(session, batch, loss, options)
    values = dict(metrics)
    stepped = yield from optim_step_steps(session, lr)
    values |= {name: stepped[name] for name in ("step", "version", "grad_norm", "lr", "skipped")}
    total = time.perf_counter() - begin
    values["seconds"] = values["seconds"] | {"optimizer": stepped["seconds"]["step"], "total": total}
    values["tokens_per_s"] = float(batch.lengths.sum()) / total
    session.record({k: v for k, v in values.items() if not isinstance(v, np.ndarray)})
    return Metrics(values, metrics.tokens)


def forward_backward_steps(session: Session, batch: TrainBatch, loss: Any, options: StepOptions) -> Steps:
    """Accumulate the gradient of `loss` on `batch`; returns `Metrics` with the per-token channels."""
    begin = time.perf_counter()
    _check_batch(batch, session)
    batch = session.anchors.applied(batch)
    worker_options = options.to_worker()
    shipped: ShippedLoss = ship(loss, batch, session.reference is not None or batch.ref_logprobs is not None)
    checked = time.perf_counter()
    if shipped.needs_reference and batch.ref_logprobs is None:
        batch = yield from reference_steps(session, batch, options)
    referenced = time.perf_counter()
    merged = yield session.train.call_all(
        "policy_forward_backward", shared(batch), shipped.blob, worker_options,
        finish=merged_parts, what="train_step", track=True,
    )  # fmt: skip
    tokens = {name: flat_in_order(merged, name, batch) for name in ("logprobs", "entropy")}
    session.anchors.keep(batch, tokens["logprobs"])
    values = batch_metrics(batch) | merged["metrics"]
    values |= {
        "loss_name": shipped.name, "loss_hash": shipped.hash,
        "aggregation": merged["aggregation"], "head": merged["head"],
        "seconds": {"check": checked - begin, "reference": referenced - checked,
                    "forward_backward": time.perf_counter() - referenced},
    }  # fmt: skip
    return Metrics(values, tokens)


def optim_step_steps(session: Session, lr: float | None) -> Steps:
    """Step the optimizer on the accumulated gradients; the trainer's version goes up unless the step was skipped."""
    options = {} if lr is None else {"lr": lr}
    kept = yield from snapshots.before_step_steps(session)
    try:
        done = yield session.train.call_all(
            "policy_optim_step", options, finish=lambda v: v[0], what="optim_step"
        )
    except WorkerDied:  # what was kept is what heal() goes on from; a later step makes it give way
        snapshots.keep_for_undo(session, kept)
        raise
    except BaseException:
        yield from snapshots.after_step_steps(session, kept, stepped=False)
        raise
    yield from snapshots.after_step_steps(session, kept, bool(done["stepped"]))
    step, version = session.advance(stepped=bool(done["stepped"]))
    return done["metrics"] | {
        "skipped": done["skipped"],
        "seconds": done["seconds"],
        "step": step,
        "version": version,
    }


def reference_steps(session: Session, batch: TrainBatch, options: StepOptions) -> Steps:
    """The batch with the reference policy's log-probs."""
    reference = session.reference
    if reference is None:
        raise LossError(NO_REFERENCE)
    flat = yield from logprob_steps(reference, batch, options)
    return batch.replace(ref_logprobs=flat)


def logprob_steps(engine: TrainEngine, batch: TrainBatch, options: StepOptions) -> Steps:
    """Log-probs of the batch's responses under an engine's weights, flat float32."""
    merged = yield engine.call_all("policy_forward", shared(batch), options.to_worker(), finish=rows_in_order)
    return np.concatenate(merged["logprobs"]).astype(np.float32)


def merged_parts(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """The ranks' parts as one: rows in order, and the metrics, which the ranks have already made equal."""
    own = {"metrics": dict(parts[0]["metrics"]), **{k: parts[0][k] for k in ("aggregation", "head")}}
    return rows_in_order(parts) | own


def flat_in_order(merged: dict[str, Any], name: str, batch: TrainBatch) -> np.ndarray:
    """A per-row channel as one flat array in the order of `batch.responses.values`."""
    return Ragged.from_rows(merged[name], np.float32).values


def batch_metrics(batch: TrainBatch) -> dict[str, Any]:
    """What is known of a batch before training on it."""
    lengths = batch.response_lengths
    values: dict[str, Any] = {
        "sequences": len(batch), "tokens": int(batch.mask.sum()),
        "length": float(lengths.mean()), "length_max": int(lengths.max()),
        "truncated": None if batch.truncated is None else float(batch.truncated.mean()),
        "reward": None, "reward_std": None,
        "data_version": int(batch.weight_version.min()),
    }  # fmt: skip
    if batch.rewards is not None:
        values |= {"reward": float(batch.rewards.mean()), "reward_std": float(batch.rewards.std())}
    return values


def _check_batch(batch: Any, session: Session) -> None:
    if not isinstance(batch, TrainBatch):
        hint = "rollouts.score(reward_fn).batch(advantage=rb.rl.group_normalized())"
        raise DataError(f"train_step wants a TrainBatch, got {type(batch).__name__}: {hint}")
    if not len(batch) or not batch.mask.any():
        raise DataError("the batch has no token to train on: its mask is all False")
