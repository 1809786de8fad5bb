"""The verbs of a session for working on the algorithm: redefine, method, gradients, loss_lab."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np

from rlbench.data import TrainBatch
from rlbench.engines.redefine import Redefined
from rlbench.session.inspection import gradient_steps
from rlbench.session.lab_steps import lab_steps
from rlbench.session.recording import recorded
from rlbench.trainers.options import PolicyOptions

if TYPE_CHECKING:
    from rlbench.session.session import Session

F = TypeVar("F")


class LabVerbs:
    """What `Session` inherits."""

    def redefine(self, cls: type, replace: str | None = None) -> Redefined:
        """Put an edited class in the place of the live one of its name in the policy, or in the modules inside it;
        weights and optimizer stay. See `TrainEngine.redefine`."""
        return cast("Session", self).train.redefine(cls, replace)

    def method(self, fn: F) -> F:
        """Decorator: add a function to the live policy as a method, callable as `session.train.name(…)`; see
        `TrainEngine.method`."""
        found: F = cast("Session", self).train.method(fn)  # type: ignore[type-var]
        return found

    @recorded
    def gradients(self, block: bool = True) -> Any:
        """Look at the gradients that wait for a step, before clipping; nothing is changed.

        By parameter (`.names`, `.norms`, `.largest`, `.zero_share`, `.relative` to the weights, `.broken`), by layer
        and module (`.by_layer()`, `.by_module(depth)`, the same numbers with fewer rows), and by token of each batch
        that waits (`.tokens`: ∂L/∂log-prob, and the norm of ∂L/∂hidden; `.channels()` for the rollout viewer).

        Returns:
            `Gradients` (or a `Pending`).

        Raises:
            StateError: no gradient waits: `forward_backward(batch, loss)` makes one.
        """
        me = cast("Session", self)
        return me._run("gradients", gradient_steps(me), block)

    @recorded
    def loss_lab(
        self,
        batch: TrainBatch,
        losses: Mapping[str, Any] | Iterable[Any],
        *,
        aggregation: Any = None,
        parameter_gradients: bool = False,
        turns: np.ndarray | None = None,
        token_budget: int | None = None,
        packing: bool = True,
        head: str = "auto",
        block: bool = True,
    ) -> Any:
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
            block: False returns a `Pending` at once.

        Returns:
            `LossLab` (or a `Pending`): shows itself; `lab.table()`, `lab[name].step()`, `lab.sweep(name, field,
            values)`, `lab.what_if()`, `lab.on(rollouts)`. A loss that failed is in `.failed`, with its error.

        Raises:
            LossError: no losses. DataError: a batch without trained tokens. Stopped: nothing was changed.
        """
        me = cast("Session", self)
        options = PolicyOptions(aggregation=aggregation, token_budget=token_budget, packing=packing, head=head)
        return me._run("loss_lab", lab_steps(me, batch, losses, options, parameter_gradients, turns), block)
