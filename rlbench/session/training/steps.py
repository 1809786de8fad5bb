"""The verbs that train. A batch is trained against the policy that saw it first: the first step's own log-probs (ratio
exactly 1) are kept, so that further steps on the same tokens have ratios against them."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Generator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from rlbench.data import TrainBatch
from rlbench.data.base.ragged import rows_in_order
from rlbench.data.record.metrics import NO_SIGNAL, Metrics
from rlbench.dispatch import views
from rlbench.dispatch.chain import ChainStep, Steps
from rlbench.dispatch.views import View
from rlbench.engines import TrainEngine
from rlbench.errors import DataError, LossError, Stopped
from rlbench.options import OptionError
from rlbench.session.core import SessionCore
from rlbench.session.record.sources import of_batch
from rlbench.session.state import step_copies
from rlbench.session.state.reference import followed_steps, forget_moved
from rlbench.session.training.loss_check import (
    NO_REFERENCE,
    ShippedLoss,
    has_advantages,
    ship,
    trusts_old_logprobs,
    weighs_by_advantages,
)
from rlbench.trainers.update.options import PolicyOptions

STEPPED = ("step", "version", "grad_norm", "lr", "skipped", "lr_usual", "loss_scale")


def train_step(
    core: SessionCore,
    batch: TrainBatch,
    loss: Any = "grpo",
    *,
    aggregation: Any = None,
    token_budget: int | None = None,
    packing: bool | None = None,
    share_prompts: bool = False,
    head: str = "auto",
    lr: float | None = None,
    no_signal: str = "step",
) -> Generator[ChainStep, Any, Metrics]:
    """Exactly one optimizer step: `forward_backward` over micro-batches, then `optim_step`.

    Args:
        batch: from `rollouts.score(…).batch(…)`; of texts, `rb.data.demonstrations(…)`, `rb.data.pairs(…)`.
        loss: a name, a loss value, or a function `(LossInputs) -> (per_token, metrics)` as written in a cell; or
            several by name, some with a weight, which are added: `{"grpo": rb.rl.grpo(), "aux": (my_loss, 0.1)}`.
        aggregation: how per-token losses become one: a mode's name or an `rb.rl.Aggregation`; None: the one the
            loss is meant for (`loss.aggregation`), "token-mean" for a function of your own.
        token_budget: tokens per micro-batch and rank; None: what keeps its activations near 4 GiB, or an eighth of a
            GPU of more than 32 GiB.
        packing: several sequences in one row without padding; False pads. None: without where the model computes the
            same so; where it does not (layers that recur) a warning says once that rows are padded.
        share_prompts: compute a prompt once for all its sequences in a micro-batch, in which they go together: the
            gain is large where prompts are long beside their responses, and numbers are equal to rounding. The
            metrics' `shared` says which part of the batch's tokens was not computed again.
        head: "chunked" never holds the logits, "plain" does; "auto": chunked where the model allows it. The
            metrics' `head` says which it was, and why.
        lr: learning rate of this step alone; `session.lr = …` changes it for good. Groups of the optimizer that
            have rates of their own keep their ratio to the first one's.
        no_signal: what to do where all advantages are 0: "step" all the same, by which the loss's other terms and the
            optimizer's moments still move the weights; or "skip", which leaves weights and optimizer as they are.

    Returns:
        `Metrics` (or a `PendingVerb` with `block=False`); of its `seconds`, `copies` are those of what `undo` and
        `heal` go back to. An interrupt raises `rb.Stopped`: gradients are cleared and the optimizer is untouched.
    """
    begin = time.perf_counter()
    if no_signal not in ("step", "skip"):
        raise OptionError(f"no_signal={no_signal!r}: 'step' or 'skip'")
    options = PolicyOptions(token_budget, packing, aggregation, head=head, whole_step=True, share_prompts=share_prompts)
    view = _view("train_step", batch)
    metrics, anchored = yield from _backward(core, batch, loss, options, view)
    values = dict(metrics)

    def record(stepped: Mapping[str, Any], trained: int) -> list[dict[str, Any]]:
        total, spent = time.perf_counter() - begin, stepped["seconds"]
        values.update({name: stepped[name] for name in STEPPED if name in stepped})
        values.update(_staleness(batch, trained))
        values["seconds"] |= {"optimizer": spent["step"], "copies": spent.get("copies", 0.0), "total": total}
        values["tokens_per_s"] = float(batch.lengths.sum()) / total
        return [{"do": "record", "record": {k: v for k, v in values.items() if not isinstance(v, np.ndarray)}}]

    skip = NO_SIGNAL if no_signal == "skip" and values["no_signal"] == 1 else None
    _, trained = yield from _stepped(core, lr, record, whole_step=True, skip=skip)
    _check_stale(batch, anchored, trained)
    if view is not None:
        view.close(values)
    return Metrics(values, metrics.tokens)


def forward_backward(
    core: SessionCore,
    batch: TrainBatch,
    loss: Any = "grpo",
    *,
    aggregation: Any = None,
    token_budget: int | None = None,
    packing: bool | None = None,
    share_prompts: bool = False,
    head: str = "auto",
) -> Generator[ChainStep, Any, Metrics]:
    """Accumulate the gradient of `loss` on `batch`; `optim_step()` uses it, `zero_grad()` drops it."""
    view = _view("forward_backward", batch)
    options = PolicyOptions(token_budget, packing, aggregation, head=head, share_prompts=share_prompts)
    metrics, anchored = yield from _backward(core, batch, loss, options, view)
    version = core.version
    _check_stale(batch, anchored, version)
    metrics = Metrics({**metrics, **_staleness(batch, version)}, metrics.tokens)
    if view is not None:
        view.close(dict(metrics))
    return metrics


def optim_step(core: SessionCore, lr: float | None = None) -> Generator[ChainStep, Any, Metrics]:
    """One optimizer step on the accumulated gradients, at rate `lr` where one is given; returns its `Metrics`."""
    stepped, _ = yield from _stepped(core, lr)
    return Metrics(stepped)


def logprobs(core: SessionCore, batch: TrainBatch) -> Generator[ChainStep, Any, np.ndarray]:
    """The trainer's log-probs of a batch's responses, flat float32."""
    return (yield from _logprobs(core.train, batch, PolicyOptions()))


# -- parts


def reference_steps(core: SessionCore, batch: TrainBatch, options: PolicyOptions) -> Steps:
    """Return the batch with the reference policy's log-probs."""
    if not core.has_reference:
        raise LossError(NO_REFERENCE)
    engine, options = (
        (core.train, replace(options, adapters=False)) if core.reference is None else (core.reference, options)
    )
    return batch.replace(ref_logprobs=(yield from _logprobs(engine, batch, options)))


def check_batch(batch: Any, verb: str) -> None:
    """Refuse what is no batch, or has nothing to train on."""
    if not isinstance(batch, TrainBatch):
        hint = "rollouts.score(reward_fn).batch(advantage=rb.rl.group_normalized())"
        raise DataError(f"{verb} wants a TrainBatch, got {type(batch).__name__}: {hint}")
    if not len(batch) or not batch.mask.any():
        raise DataError(f"{verb}: the batch has no token to train on: its mask is all False")


def _view(verb: str, batch: TrainBatch) -> View | None:
    """Return what shows the progress of a training verb, of a batch that can be trained on."""
    check_batch(batch, verb)
    return views.make("train", what=verb, tokens=int(batch.lengths.sum()), trained=int(batch.mask.sum()))


def _backward(core: SessionCore, batch: TrainBatch, loss: Any, options: PolicyOptions, view: View | None) -> Steps:
    """Accumulate the gradient; returns `Metrics` with the per-token channels, and the loss where its old log-probs are
    those of this pass."""
    begin = time.perf_counter()
    sources = of_batch(batch)
    batch = core.anchors.applied(batch)
    has_reference = core.has_reference or batch.ref_logprobs is not None
    shipped = ship(loss, batch, has_reference, core.train.info, scored=not core.samples)
    checked = time.perf_counter()
    if shipped.needs_reference and batch.ref_logprobs is None:
        batch = yield from reference_steps(core, batch, options)
    referenced = time.perf_counter()
    running = core.train.call_all(
        "policy_forward_backward",
        batch,
        shipped.blob,
        options,
        finish=_merged,
        what="train_step",
        track=True,
        observer=view,
    )
    known = _batch_metrics(batch) | {"no_signal": _no_signal(batch, shipped)}  # while the ranks compute
    merged = yield running
    tokens = {name: rows.values for name, rows in merged.pop("channels").items()}
    if why := merged.pop("padded_as"):
        warnings.warn(f"sequences are padded: {why}", stacklevel=2)
    if core.samples:
        core.anchors.keep(batch, tokens["logprobs"])
    core.trackers.training_on(batch)
    values = known | merged.pop("metrics") | merged | sources
    values |= {"loss_name": shipped.name, "loss_hash": shipped.hash, "loss_source": shipped.source}
    seconds = {"check": checked - begin, "reference": referenced - checked}
    values["seconds"] = seconds | {"forward_backward": time.perf_counter() - referenced}
    return Metrics(values, tokens), shipped if batch.old_logprobs is None else None


def _stepped(
    core: SessionCore,
    lr: float | None,
    record: Callable[[Mapping[str, Any], int], list[dict[str, Any]]] = lambda stepped, trained: [],
    whole_step: bool = False,
    skip: str | None = None,
) -> Steps:
    """Step the optimizer between two copies; the trainer's version goes up unless the step was skipped.

    One call to the ranks, and one message to the monitor for all that it changed, with what `record` makes of it and of
    the version that was trained. Returns both. `skip`: why the ranks only drop the gradients.
    """
    options = {"whole_step": whole_step, "skip": skip} | ({} if lr is None else {"lr": lr})
    with core.stepping:
        state = core.link.state("step", "version", "highest", "undo", "spare", "snapshots")
        kept = step_copies.planned(core, state)
        name, args = ("policy_optim_step", (options,)) if kept is None else ("kept_optim_step", (options, kept.around))
        done = yield core.train.call_all(name, *args, finish=_of_all_ranks, what="optim_step")
        step, version = int(state["step"]) + 1, int(state["highest"] + 1 if done["stepped"] else state["version"])
        at = {"step": step, "version": version}
        stepped = done["metrics"] | {name: done[name] for name in ("skipped", "seconds")} | at
        moved, not_moved = yield from _moved(core, step)
        events = [] if kept is None else kept.before_events(done)
        events += [{"do": "set", "key": key, "value": value} for key, value in (at | moved).items()]
        events += record(stepped, int(state["version"]))
        core.link.apply(*events, *([] if kept is None else kept.after_events(done)))
        if kept is not None:
            yield from kept.recorded_steps(done)
        if moved:
            forget_moved(core)
    if not_moved is not None:
        raise not_moved
    for note in done["notes"]:
        warnings.warn(note, stacklevel=2)
    return stepped, int(state["version"])


def _moved(core: SessionCore, step: int) -> Steps:
    """Let the reference follow a step that the ranks have done, which goes on record whatever comes of it; returns what
    to set, and the error, if any, to raise afterwards."""
    try:
        place = yield from followed_steps(core, step)
    except (Exception, Stopped) as error:
        error.add_note(f"Step {step} is done and on record; the reference has not followed it.")
        return {}, error
    return ({} if place is None else {"reference": place}), None


def _of_all_ranks(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what the first rank says, with the sizes of what all of them wrote."""
    written = {
        name: parts[0][name]
        if "failed" in parts[0][name]
        else {key: sum(part[name][key] for part in parts) for key in parts[0][name]}
        for name in ("before", "after")
        if name in parts[0]
    }
    return parts[0] | written


def _check_stale(batch: TrainBatch, loss: ShippedLoss | None, version: int) -> None:
    """Say where the policy that sampled a batch is not the one its old log-probs, which `loss` trusts, come from."""
    drawn = batch.weight_version[batch.weight_version >= 0]
    if loss is None or drawn.min(initial=version) >= version or not trusts_old_logprobs(loss, batch):
        return
    warnings.warn(  # one text, so that Python shows it once
        "sequences of this batch were sampled from older weights than the trainer's, no old log-probs of theirs are "
        f"known, and `{loss.name}` compares with the trainer's of now: the ratio is 1, and nothing corrects for what "
        'changed since. batch.replace(old_logprobs=…) gives your own; anchor="sampler" compares with the sampler\'s, '
        "mismatch= reweighs by them (both of the losses of rb.rl, of tokens that no sampling option reshaped)",
        stacklevel=2,
    )


def _staleness(batch: TrainBatch, version: int) -> dict[str, float]:
    """Return how many versions the sampled sequences of a batch are behind weights of `version`."""
    behind = version - batch.weight_version[batch.weight_version >= 0]
    return {"staleness": float(behind.mean()), "staleness_max": int(behind.max())} if len(behind) else {}


def _logprobs(engine: TrainEngine, batch: TrainBatch, options: PolicyOptions) -> Steps:
    rows = yield engine.call_all("policy_forward", batch, options, finish=rows_in_order)
    return np.asarray(rows["logprobs"].values)


def _no_signal(batch: TrainBatch, loss: ShippedLoss) -> float | None:
    """Return the share of sequences without an advantage; None of a loss or a batch that has nothing to do with it."""
    if not has_advantages(batch):
        return None
    share = batch.no_signal
    return None if share == 1 and not weighs_by_advantages(loss, batch) else share


def _merged(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Join the ranks' parts: per-token channels in order; the metrics are equal on all ranks.

    `padding`: share of the computed tokens; `shared`: share of the rows' tokens that were not; `peak_bytes`: of the
    rank with the highest, None where not all measured.
    """
    own = {name: parts[0][name] for name in ("metrics", "aggregation", "head", "micro_batches", "padded_as")}
    padding, computed, saved = (sum(part[name] for part in parts) for name in ("padding", "computed", "shared"))
    peaks = [int(peak) for part in parts if (peak := part.get("peak_bytes")) is not None]
    peak = max(peaks) if len(peaks) == len(parts) else None
    shares = {"padding": padding / max(1, computed), "shared": saved / max(1, computed - padding + saved)}
    return {"channels": rows_in_order(parts), **own, **shares, "peak_bytes": peak}


def _batch_metrics(batch: TrainBatch) -> dict[str, Any]:
    """Return what is known of a batch before training on it."""
    lengths, rewards = batch.response_lengths, batch.rewards
    drawn = batch.weight_version[batch.weight_version >= 0]
    return {
        "sequences": len(batch),
        "tokens": int(batch.mask.sum()),
        "length": float(lengths.mean()),
        "length_max": int(lengths.max()),
        "truncated": None if batch.truncated is None else float(batch.truncated.mean()),
        "reward": None if rewards is None else float(rewards.mean()),
        "reward_std": None if rewards is None else float(rewards.std()),
        "data_version": None if len(drawn) == 0 else int(drawn.min()),
    }
