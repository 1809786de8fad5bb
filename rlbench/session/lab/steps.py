"""A loss lab on a session: the ranks' log-probs, the reference's, the lab, and where asked for gradients."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from rlbench.data import TrainBatch
from rlbench.data.base.ragged import rows_in_order
from rlbench.dispatch.chain import ChainStep, Steps
from rlbench.errors import LossError
from rlbench.session.core import SessionCore
from rlbench.session.lab.entry import Bound
from rlbench.session.lab.gradients import ParameterGradients
from rlbench.session.lab.inputs import need_room_for, scored
from rlbench.session.lab.loss_lab import LossLab, make_lab, named_losses
from rlbench.session.training.loss_check import ShippedLoss, ship
from rlbench.session.training.steps import check_batch, reference_steps
from rlbench.trainers.update.options import PolicyOptions


def loss_lab(
    core: SessionCore,
    batch: TrainBatch,
    losses: Mapping[str, Any] | Iterable[Any],
    *,
    aggregation: Any = None,
    parameter_gradients: bool = False,
    token_budget: int | None = None,
    packing: bool | None = None,
    share_prompts: bool = False,
    head: str = "auto",
) -> Generator[ChainStep, Any, LossLab]:
    """Compare losses on one batch: one forward without gradient for all of them; nothing is stepped.

    Args:
        batch: as for `train_step`.
        losses: by name, names, values or functions as for `train_step`; or a list of these.
        aggregation: one for all; None: each by its own, as `train_step` does.
        parameter_gradients: compare the whole gradients of the parameters as well, in `lab.parameters`. Each loss
            costs a forward and a backward more, and all but one a copy of the gradients in host memory. Gradients
            that wait for a step stay as they are.
        token_budget, packing, share_prompts, head: as for `train_step`.

    Returns:
        `LossLab`: shows itself; `lab.table()`, `lab[name].step()`, `lab.sweep(name, field, values)`, `lab.what_if()`,
        `lab.on(rollouts)`. A loss that failed is in `.failed`, with its error.
    """
    from rlbench.trainers.update.stateful_loss import has_state, with_state

    options = PolicyOptions(token_budget, packing, aggregation, head=head, share_prompts=share_prompts)
    check_batch(batch, "loss_lab")
    named = named_losses(losses)
    bound = Bound(core, batch, core.version, options)
    batch = core.anchors.applied(batch)
    has_reference = core.has_reference or batch.ref_logprobs is not None
    shipped: dict[str, ShippedLoss] = {}
    failed: dict[str, LossError] = {}  # those that a training step would refuse
    for name, loss in named.items():
        try:
            shipped[name] = ship(loss, batch, has_reference, core.train.info)
        except LossError as error:
            failed[name] = error
    if batch.ref_logprobs is None and any(loss.needs_reference for loss in shipped.values()):
        batch = yield from reference_steps(core, batch, options)
    needs = tuple(dict.fromkeys(need for loss in shipped.values() for need in loss.needs))
    need_room_for(batch, needs, core.train.info)
    rows = yield core.train.call_all(
        "policy_forward", batch, replace(options, needs=needs), finish=rows_in_order, what="loss_lab", track=True
    )
    fit = {name: named[name] for name in shipped}
    if any(map(has_state, fit.values())):
        held = yield core.ask_ranks("loss_states", what="loss_lab")
        fit = {name: with_state(loss, held) for name, loss in fit.items()}
    tokens = {name: held.values for name, held in rows.items()}
    lab = make_lab(scored(batch, tokens), fit, options.aggregation, failed, bound, core.options.path)
    if not parameter_gradients or not len(lab):
        return lab
    return (yield from _with_gradients(core, lab, shipped, options))


def _with_gradients(
    core: SessionCore, lab: LossLab, shipped: Mapping[str, ShippedLoss], options: PolicyOptions
) -> Steps:
    """Return the lab with its losses' whole gradients, from the ranks; a loss that fails there moves to `failed`."""
    sent = {name: (shipped[name].blob, lab.aggregation) for name in lab}
    found = yield core.ask_ranks("gradients_of_losses", lab.batch, sent, options, what="loss_lab", track=True)
    compared = ParameterGradients(tuple(found["losses"]), tuple(found["names"]), np.asarray(found["gram"]))
    failed = {name: LossError(text) for name, text in found["failed"].items()}
    if failed:
        kept = {name: entry.given for name, entry in lab.entries.items() if name not in failed}
        lab = lab.of(kept, {**lab.failed, **failed})
    return replace(lab, parameters=compared)
