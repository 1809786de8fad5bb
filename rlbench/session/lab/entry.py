"""One loss in a lab: its numbers, and the step with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from rlbench.errors import StateError, Suggesting
from rlbench.session.core import SessionCore
from rlbench.session.training.steps import train_step
from rlbench.session.verb import run
from rlbench.units import format_number, format_percent

if TYPE_CHECKING:
    from rlbench.data import TrainBatch
    from rlbench.rl.types import Loss
    from rlbench.trainers.update.options import PolicyOptions


@dataclass(frozen=True, eq=False)
class Bound:
    """Where a lab's losses can be stepped with: its session, the batch as it was given, the weights' version then."""

    core: SessionCore
    batch: TrainBatch
    version: int
    options: PolicyOptions


@dataclass(frozen=True, eq=False)
class LabEntry(Suggesting):
    """One loss on the lab's batch. Arrays are flat float32 in the order of `batch.responses.values`, 0 where untrained.

    Attributes:
        name: as the lab was given it.
        loss: the loss itself.
        given: the loss as the lab was given it, a name among them.
        hash: what identifies it in the records.
        aggregation: how the per-token losses became one.
        value: the loss on the whole batch.
        coefficients: ∂L/∂log-prob of each token; negative: a step makes the token more likely.
        entropy_coefficients: ∂L/∂entropy, None for a loss without an entropy term.
        per_token: the loss of each token, not aggregated.
        metrics: the loss's own metrics, means over the trained tokens.
        shares: by "advantage", "length" and "turn": the part of sum |coefficients| that each bucket has.
        zeros: share of the trained tokens whose coefficient is exactly 0.
        leaks: whether untrained tokens get a gradient, too, which a loss must not give them.
    """

    name: str
    loss: Loss
    given: Any
    hash: str
    aggregation: str
    value: float
    coefficients: np.ndarray
    entropy_coefficients: np.ndarray | None
    per_token: np.ndarray
    metrics: Mapping[str, float]
    shares: Mapping[str, np.ndarray]
    zeros: float
    leaks: bool
    bound: Bound | None = field(default=None, repr=False)

    @property
    def norm(self) -> float:
        """Euclidean norm of the coefficients."""
        return float(np.linalg.norm(self.coefficients.astype(np.float64)))

    @property
    def clip_fraction(self) -> float | None:
        """Share of the trained tokens whose gradient the loss's clipping took away; None where it does not say."""
        return self.metrics.get("clip_fraction")

    def step(self, *, anyway: bool = False, lr: float | None = None, block: bool = True) -> Any:
        """Take the step: `session.train_step` on the lab's batch with this loss and the lab's options.

        `anyway`: also when the weights have moved since the lab's forward, whose numbers are not this step's then.
        """
        bound = self.bound
        if bound is None:
            raise StateError("this lab has no session to step: session.loss_lab(batch, losses) makes one that has")
        version = bound.core.version
        if version != bound.version and not anyway:
            raise StateError(
                f"the weights have moved since the lab's forward (v{bound.version}, now v{version}), so its numbers "
                "are not those of this step: make the lab again, or step(anyway=True)"
            )
        options = {"lr": lr, **bound.options.of_verbs}
        return run(bound.core, train_step, (bound.batch, self.given), options, block)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"bound": None}  # a session stays where it is

    def __repr__(self) -> str:
        clip = "" if self.clip_fraction is None else f", clip {format_percent(self.clip_fraction)}"
        loss, norm = format_number(self.value), format_number(self.norm)
        return f"{self.name}: loss {loss}, |coef| {norm}{clip}, {self.aggregation}"
