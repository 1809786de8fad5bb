"""A loss lab on a session as steps: the ranks' log-probs, the reference's, the lab, and where asked for gradients."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from rlbench.data import TrainBatch
from rlbench.dispatch.chain import Steps
from rlbench.engines.base import shared
from rlbench.engines.sync import rows_in_order
from rlbench.errors import LossError
from rlbench.session.lab.entry import Bound
from rlbench.session.lab.gradients import ParameterGradients
from rlbench.session.lab.inputs import scored
from rlbench.session.lab.loss_lab import LossLab, make_lab, named_losses
from rlbench.session.training.loss_check import ShippedLoss, ship
from rlbench.session.training.steps import check_batch, reference_steps
from rlbench.trainers.update.options import PolicyOptions

if TYPE_CHECKING:
    from rlbench.session.core import SessionCore


def lab_steps(
    session: SessionCore,
    batch: TrainBatch,
    losses: Mapping[str, Any] | Iterable[Any],
    options: PolicyOptions,
    parameter_gradients: bool,
    turns: np.ndarray | None,
) -> Steps:
    """Returns a `LossLab` that can be stepped with."""
    check_batch(batch, session, "loss_lab")
    named = named_losses(losses)
    bound = Bound(session, batch, session.version, options)
    given = session.anchors.applied(batch)
    has_reference = session.reference is not None or batch.ref_logprobs is not None
    shipped, failed = _shipped(named, given, has_reference)
    if given.ref_logprobs is None and any(loss.needs_reference for loss in shipped.values()):
        given = yield from reference_steps(session, given, options)
    rows = yield session.train.call_all(
        "policy_forward", shared(given), options, finish=rows_in_order, what="loss_lab", track=True
    )
    tokens = {name: np.concatenate(rows[name]).astype(np.float32) for name in ("logprobs", "entropy")}
    hashes = {name: loss.hash for name, loss in shipped.items()}
    lab = make_lab(
        scored(given, tokens, turns),
        {name: named[name] for name in shipped},
        options.aggregation,
        hashes,
        failed,
        bound,
        session.options.path,
    )
    if not parameter_gradients or not len(lab):
        return lab
    return (yield from _with_gradients(session, lab, shipped, options))


def _shipped(
    named: Mapping[str, Any], batch: TrainBatch, has_reference: bool
) -> tuple[dict[str, ShippedLoss], dict[str, LossError]]:
    """Every loss tried and pickled, and the errors of those that a training step would refuse."""
    shipped: dict[str, ShippedLoss] = {}
    failed: dict[str, LossError] = {}
    for name, loss in named.items():
        try:
            shipped[name] = ship(loss, batch, has_reference)
        except LossError as error:
            failed[name] = error
    return shipped, failed


def _with_gradients(
    session: SessionCore, lab: LossLab, shipped: Mapping[str, ShippedLoss], options: PolicyOptions
) -> Steps:
    """The lab with its losses' whole gradients, from the ranks; a loss that fails there moves to `failed`."""
    sent = {name: (shipped[name].blob, lab.aggregation) for name in lab}
    found = yield session.train.call_all(
        "gradients_of_losses",
        shared(lab.batch),
        sent,
        options,
        finish=lambda parts: parts[0],
        what="loss_lab",
        track=True,
    )
    compared = ParameterGradients(tuple(found["losses"]), tuple(found["names"]), np.asarray(found["gram"]))
    failed = {name: LossError(text) for name, text in found["failed"].items()}
    if failed:
        kept = {name: entry.as_given for name, entry in lab.entries.items() if name not in failed}
        hashes = {name: shipped[name].hash for name in kept}
        lab = make_lab(lab.scored, kept, lab.aggregation, hashes, {**lab.failed, **failed}, lab.bound, lab.tokenizer)
    return dataclasses.replace(lab, parameters=compared)
