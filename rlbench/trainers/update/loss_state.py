"""Losses that keep a state: tensors on the ranks that change once with each optimizer step, and go back with it.

A loss has one where it has `state` and `update(metrics)` (`stateful_loss.py`). Its calls read the state and leave it;
then `update` is called, before the step is taken, with the means of the loss's metrics over the whole step: these are
equal on all ranks, and so is what it makes. Where the step is skipped or fails, so is the update. The state lies at the
module under `state_name`, the class's name unless said, and is a part of each snapshot and checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from rlbench.checkpoint.rank_state import loss_states_of
from rlbench.errors import LossError
from rlbench.rl import Loss
from rlbench.strategies.ranks.control import ControlGroup
from rlbench.trainers.passes.metrics import MetricSums
from rlbench.trainers.update.stateful_loss import (
    Tensors,
    checked,
    has_state,
    layout,
    put_state,
    state_name,
    updated_state,
)


@dataclass(frozen=True)
class Due:
    """What a call of a step says to the update of its loss; dropped with the step's gradients."""

    loss: Loss
    sums: MetricSums

    def scale(self, factor: float) -> None:
        """Means over tokens stay what they are."""


class LossStates:
    """The states that the losses of one module keep on this rank."""

    def __init__(self, module: nn.Module, control: ControlGroup, device: torch.device) -> None:
        self.held, self._control, self._device = loss_states_of(module), control, device

    @contextmanager
    def lent(self, loss: Loss) -> Iterator[Callable[[], None]]:
        """Let the loss see what the ranks hold while it is called; what is given takes it back when it was. That
        raises LossError where a call has changed it."""
        if not has_state(loss):
            yield lambda: None
            return
        name, first = state_name(loss), loss.state  # type: ignore[attr-defined]
        held = self._state_of(loss)
        if layout(held) != layout(first):
            raise LossError(
                f"the ranks keep a state {name!r} of {layout(held)}, and this loss begins with {layout(first)}: give "
                "it a state_name of its own, and it begins anew"
            )
        put_state(loss, {key: value.clone() for key, value in held.items()})

        def take_back() -> None:
            now = loss.state  # type: ignore[attr-defined]
            put_state(loss, first)
            if now.keys() != held.keys() or any(not torch.equal(now[key], held[key]) for key in held):
                raise LossError(f"`{name}` changes its state in a call, of which a step has many: use update(metrics).")

        try:
            yield take_back
        finally:
            put_state(loss, first)

    def updated(self, due: Sequence[Due]) -> dict[str, Tensors]:
        """Call the `update` of each loss of a step; returns their new states, to be `kept` with the step. Collective:
        where one rank fails, or holds another state than its peers, all do."""
        calls: dict[str, list[Due]] = {}
        for one in due:
            calls.setdefault(state_name(one.loss), []).append(one)
        doing, made = "the loss's update", {}
        for name, own in calls.items():
            made[name] = self._control.together(doing, partial(self._made, own))
        for name, new in made.items():
            said = self._control.gather({key: value.cpu() for key, value in new.items()})
            if any(not torch.equal(other[key], said[0][key]) for other in said for key in said[0]):
                raise LossError(f"`{name}`: its update made another state on each rank; does it draw random numbers?")
        return made

    def keep(self, made: Mapping[str, Tensors]) -> None:
        """Hold new states: their step was taken."""
        self.held.update(made)

    def _made(self, calls: Sequence[Due]) -> Tensors:
        loss = calls[-1].loss
        metrics = MetricSums.joined(one.sums for one in calls).result()
        return updated_state(loss, self._state_of(loss), metrics)

    def _state_of(self, loss: Loss) -> Tensors:
        """What is held of a loss, or as it begins, on the rank's device."""
        state = self.held.get(state_name(loss)) or checked(state_name(loss), loss.state)  # type: ignore[attr-defined]
        return {key: value.to(self._device) for key, value in state.items()}
