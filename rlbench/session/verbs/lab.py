"""The verbs of a session for working on the algorithm: redefine, method, gradients, loss_lab."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping
from typing import Any, TypeVar

import numpy as np

from rlbench.data import TrainBatch
from rlbench.data.record.gradients import Gradients
from rlbench.dispatch.chain import Step
from rlbench.engines.redefine import Redefined
from rlbench.session.core import SessionCore
from rlbench.session.lab.inspection import gradient_steps
from rlbench.session.lab.loss_lab import LossLab
from rlbench.session.lab.steps import lab_steps
from rlbench.trainers.update.options import PolicyOptions

F = TypeVar("F", bound=Callable[..., Any])


def redefine(core: SessionCore, cls: type, replace: str | None = None) -> Redefined:
    """Put an edited class in the place of the live one of its name in the policy, or in the modules inside it;
    weights and optimizer stay. See `TrainEngine.redefine`."""
    return core.train.redefine(cls, replace)


def method(core: SessionCore, fn: F) -> F:
    """Decorator: add a function to the live policy as a method, callable as `session.train.name(…)`; see
    `TrainEngine.method`."""
    return core.train.method(fn)


def gradients(core: SessionCore) -> Generator[Step, Any, Gradients]:
    """Look at the gradients that wait for a step, before clipping; nothing is changed.

    By parameter (`.names`, `.norms`, `.largest`, `.zero_share`, `.relative` to the weights, `.broken`), by layer
    and module (`.by_layer()`, `.by_module(depth)`, the same numbers with fewer rows), and by token of each batch
    that waits (`.tokens`: ∂L/∂log-prob, and the norm of ∂L/∂hidden; `.channels()` for the rollout viewer).

    Returns:
        `Gradients` (or a `Pending`).

    Raises:
        StateError: no gradient waits: `forward_backward(batch, loss)` makes one.
    """
    return (yield from gradient_steps(core))


def loss_lab(
    core: SessionCore,
    batch: TrainBatch,
    losses: Mapping[str, Any] | Iterable[Any],
    *,
    aggregation: Any = None,
    parameter_gradients: bool = False,
    turns: np.ndarray | None = None,
    token_budget: int | None = None,
    packing: bool = True,
    head: str = "auto",
) -> Generator[Step, Any, LossLab]:
    """Compare losses on one batch: one forward without gradient for all of them; nothing is stepped.

    Args:
        batch: as for `train_step`.
        losses: by name, names, values or functions as for `train_step`; or a list of these.
        aggregation: one for all; None: each by its own, as `train_step` does.
        parameter_gradients: compare the whole gradients of the parameters as well, in `lab.parameters`. Each loss
            costs a forward and a backward more, and all but one a copy of the gradients in host memory. Gradients
            that wait for a step stay as they are.
        turns: the turn of each response token, from 0, flat; None: trained tokens in a row are one turn.
        token_budget, packing, head: as for `train_step`.

    Returns:
        `LossLab` (or a `Pending`): shows itself; `lab.table()`, `lab[name].step()`, `lab.sweep(name, field,
        values)`, `lab.what_if()`, `lab.on(rollouts)`. A loss that failed is in `.failed`, with its error.

    Raises:
        LossError: no losses. DataError: a batch without trained tokens. Stopped: nothing was changed.
    """
    options = PolicyOptions(aggregation=aggregation, token_budget=token_budget, packing=packing, head=head)
    return (yield from lab_steps(core, batch, losses, options, parameter_gradients, turns))
