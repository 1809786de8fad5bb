"""The training verbs as steps: reference log-probs, forward and backward over micro-batches, optimizer step.

Old log-probs: a batch is trained against the policy that saw it first. The first step on a batch uses its own
log-probs (ratio exactly 1); they are kept, so that further steps on the same tokens have ratios against them.
"""

from __future__ import annotations

import time
import warnings
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from rlbench.data import Ragged, TrainBatch
from rlbench.data.record.metrics import Metrics
from rlbench.dispatch import views
from rlbench.dispatch.chain import Steps
from rlbench.dispatch.views import View
from rlbench.engines import TrainEngine
from rlbench.engines.base import shared
from rlbench.engines.sync import rows_in_order
from rlbench.errors import DataError, LossError
from rlbench.session.record.sources import of_batch
from rlbench.session.state import step_copies
from rlbench.session.training.loss_check import NO_REFERENCE, ShippedLoss, ship, trusts_old_logprobs
from rlbench.trainers.update.options import PolicyOptions

if TYPE_CHECKING:
    from rlbench.session.core import SessionCore


def train_step_steps(
    session: SessionCore, batch: TrainBatch, loss: Any, options: PolicyOptions, lr: float | None
) -> Steps:
    """Exactly one optimizer step on `batch`; returns `Metrics` and records them."""
    begin = time.perf_counter()
    check_batch(batch, session)
    view = _view("train_step", batch)
    metrics = yield from forward_backward_steps(session, batch, loss, replace(options, whole_step=True), view)
    values = dict(metrics)
    stepped = yield from optim_step_steps(session, lr, whole_step=True)
    values |= {
        name: stepped[name] for name in ("step", "version", "grad_norm", "lr", "skipped", "lr_usual") if name in stepped
    }
    total = time.perf_counter() - begin
    values["seconds"] = values["seconds"] | {"optimizer": stepped["seconds"]["step"], "total": total}
    values["tokens_per_s"] = float(batch.lengths.sum()) / total
    session.record({k: v for k, v in values.items() if not isinstance(v, np.ndarray)})
    yield from step_copies.after_step_steps(session)
    if view is not None:
        view.close(values)
    return Metrics(values, metrics.tokens)


def forward_backward_steps(
    session: SessionCore, batch: TrainBatch, loss: Any, options: PolicyOptions, view: View | None = None
) -> Steps:
    """Accumulate the gradient of `loss` on `batch`; returns `Metrics` with the per-token channels.

    `view`: of the verb this is a part of, which shows the progress; None: it has one of its own.
    """
    begin = time.perf_counter()
    check_batch(batch, session)
    own_view = _view("forward_backward", batch) if view is None else None
    sources = of_batch(batch)
    batch = session.anchors.applied(batch)
    shipped: ShippedLoss = ship(loss, batch, session.reference is not None or batch.ref_logprobs is not None)
    _tell_stale(session, batch, shipped)
    checked = time.perf_counter()
    if shipped.needs_reference and batch.ref_logprobs is None:
        batch = yield from reference_steps(session, batch, options)
    referenced = time.perf_counter()
    merged = yield session.train.call_all(
        "policy_forward_backward",
        shared(batch),
        shipped.blob,
        options,
        finish=merged_parts,
        what="train_step",
        track=True,
        observer=view or own_view,
    )
    tokens = {name: Ragged.from_rows(rows, np.float32).values for name, rows in merged.pop("channels").items()}
    session.anchors.keep(batch, tokens["logprobs"])
    values = batch_metrics(batch) | merged["metrics"]
    values |= {
        "loss_name": shipped.name,
        "loss_hash": shipped.hash,
        "loss_source": shipped.source,
        **sources,
        **{name: merged[name] for name in ("aggregation", "head", "micro_batches", "padding", "peak_bytes")},
        "seconds": {
            "check": checked - begin,
            "reference": referenced - checked,
            "forward_backward": time.perf_counter() - referenced,
        },
    }
    if own_view is not None:
        own_view.close(values)
    return Metrics(values, tokens)


def optim_step_steps(session: SessionCore, lr: float | None, whole_step: bool = False) -> Steps:
    """Step the optimizer on the accumulated gradients; the trainer's version goes up unless the step was skipped.

    The caller keeps the state after it, once the step is on record.
    """
    options = {"whole_step": whole_step} | ({} if lr is None else {"lr": lr})
    before = yield from step_copies.before_step_steps(session)
    done = yield session.train.call_all("policy_optim_step", options, finish=lambda v: v[0], what="optim_step")
    if done["stepped"]:
        step_copies.can_be_undone(session, before)
    for note in done["notes"]:
        warnings.warn(note, stacklevel=2)
    step, version = session.advance(stepped=bool(done["stepped"]))
    return done["metrics"] | {
        "skipped": done["skipped"],
        "seconds": done["seconds"],
        "step": step,
        "version": version,
    }


def _tell_stale(session: SessionCore, batch: TrainBatch, shipped: ShippedLoss) -> None:
    """Warn where the policy that sampled a batch is not the one its old log-probs will be taken from."""
    if batch.old_logprobs is not None:
        return
    if batch.weight_version.min() < session.version and trusts_old_logprobs(shipped, batch):
        mend = (
            'anchor="sampler" compares with the sampler\'s, mismatch= reweighs by them (both of the losses of rb.rl), '
            "batch.replace(old_logprobs=…) gives your own"
        )
        if batch.reshaped_by:  # the sampler's are of another distribution
            mend = "batch.replace(old_logprobs=…) gives your own, or draw them again after session.sync_weights()"
        warnings.warn(  # one text, so that Python shows it once
            "sequences of this batch were sampled from older weights than the trainer's, no old log-probs of theirs "
            f"are known, and `{shipped.name}` compares with the trainer's of now: the ratio is 1, and nothing corrects "
            f"for what changed since. {mend}",
            stacklevel=2,
        )


def reference_steps(session: SessionCore, batch: TrainBatch, options: PolicyOptions) -> Steps:
    """The batch with the reference policy's log-probs."""
    reference = session.reference
    if reference is None:
        raise LossError(NO_REFERENCE)
    flat = yield from logprob_steps(reference, batch, options)
    return batch.replace(ref_logprobs=flat)


def logprob_steps(engine: TrainEngine, batch: TrainBatch, options: PolicyOptions) -> Steps:
    """Log-probs of the batch's responses under an engine's weights, flat float32."""
    merged = yield engine.call_all("policy_forward", shared(batch), options, finish=rows_in_order)
    return np.concatenate(merged["logprobs"]).astype(np.float32)


def merged_parts(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """The ranks' parts as one: per-token channels in order; the metrics are equal on all ranks.

    `padding`: share of the computed tokens; `peak_bytes`: of the rank with the highest, None where not all measured.
    """
    own = {"metrics": dict(parts[0]["metrics"]), **{k: parts[0][k] for k in ("aggregation", "head", "micro_batches")}}
    padding, computed = (sum(part[name] for part in parts) for name in ("padding", "computed"))
    peaks = [int(peak) for part in parts if (peak := part.get("peak_bytes")) is not None]
    own |= {"padding": padding / max(1, computed), "peak_bytes": max(peaks) if len(peaks) == len(parts) else None}
    return {"channels": rows_in_order(parts), **own}


def batch_metrics(batch: TrainBatch) -> dict[str, Any]:
    """What is known of a batch before training on it."""
    lengths = batch.response_lengths
    values: dict[str, Any] = {
        "sequences": len(batch),
        "tokens": int(batch.mask.sum()),
        "length": float(lengths.mean()),
        "length_max": int(lengths.max()),
        "truncated": None if batch.truncated is None else float(batch.truncated.mean()),
        "reward": None,
        "reward_std": None,
        "data_version": int(batch.weight_version.min()),
    }
    if batch.rewards is not None:
        values |= {"reward": float(batch.rewards.mean()), "reward_std": float(batch.rewards.std())}
    return values


def _view(what: str, batch: TrainBatch) -> View | None:
    """Whoever shows the progress of a training verb."""
    return views.make("train", what=what, tokens=int(batch.lengths.sum()), trained=int(batch.mask.sum()))


def check_batch(batch: Any, session: SessionCore, verb: str = "train_step") -> None:
    """Refuse what is no batch, or has nothing to train on."""
    if not isinstance(batch, TrainBatch):
        hint = "rollouts.score(reward_fn).batch(advantage=rb.rl.group_normalized())"
        raise DataError(f"{verb} wants a TrainBatch, got {type(batch).__name__}: {hint}")
    if not len(batch) or not batch.mask.any():
        raise DataError("the batch has no token to train on: its mask is all False")
