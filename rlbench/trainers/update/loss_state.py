"""Losses that keep a state: tensors on the ranks that change once with each optimizer step, and go back with it.

A loss has one where it has `state`, tensors by name as they begin, and `update(metrics)`, which puts new ones there.
Its calls read the state and leave it; then `update` is called, before the step is taken, with the means of the loss's
metrics over the whole step: these are equal on all ranks, and so is what it makes. Where the step is skipped or fails,
so is the update. The state lies at the module under `state_name`, the class's name unless said, and is a part of each
snapshot and checkpoint.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rlbench.checkpoint.rank_state import loss_states_of
from rlbench.errors import LossError
from rlbench.rl import Loss
from rlbench.strategies.ranks.control import ControlGroup
from rlbench.trainers.passes.metrics import MetricSums
from rlbench.user_code import user_code

Tensors = dict[str, Tensor]


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
        if _layout(held) != _layout(first):
            raise LossError(
                f"the ranks keep a state {name!r} of {_layout(held)}, and this loss begins with {_layout(first)}: give "
                "it a state_name of its own, and it begins anew"
            )
        _put(loss, {key: value.clone() for key, value in held.items()})

        def take_back() -> None:
            now = loss.state  # type: ignore[attr-defined]
            _put(loss, first)
            if now.keys() != held.keys() or any(not torch.equal(now[key], held[key]) for key in held):
                raise LossError(f"`{name}` changes its state in a call, of which a step has many: use update(metrics).")

        try:
            yield take_back
        finally:
            _put(loss, first)

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
        state = self.held.get(state_name(loss)) or _checked(state_name(loss), loss.state)  # type: ignore[attr-defined]
        return {key: value.to(self._device) for key, value in state.items()}


def has_state(loss: object) -> bool:
    """Whether a loss keeps a state."""
    return isinstance(getattr(loss, "state", None), dict) and callable(getattr(loss, "update", None))


def state_name(loss: object) -> str:
    """Return under which name the ranks keep it."""
    return str(getattr(loss, "state_name", type(loss).__name__)).replace("/", "-")


def with_state(loss: Loss, held: Mapping[str, Tensors]) -> Loss:
    """Return a copy of a loss whose state is what the ranks hold."""
    if not has_state(loss) or state_name(loss) not in held:
        return loss
    made = copy.copy(loss)
    _put(made, held[state_name(loss)])
    return made


def updated_state(loss: Loss, held: Mapping[str, Tensor], metrics: Mapping[str, float]) -> Tensors:
    """Return what a loss's `update` makes of a state; the loss's own stays. Raises LossError where it is none."""
    name, first = state_name(loss), loss.state  # type: ignore[attr-defined]
    _put(loss, {key: value.clone() for key, value in held.items()})
    try:
        with user_code(), torch.no_grad():
            loss.update(dict(metrics))  # type: ignore[attr-defined]
        return _checked(name, loss.state, held)  # type: ignore[attr-defined]
    finally:
        _put(loss, first)


def _checked(name: str, state: Any, like: Mapping[str, Tensor] | None = None) -> Tensors:
    """Return a state as plain tensors; refuse what is none, other shapes than before, and what is not finite."""
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise LossError(f"`{name}`.state must be a dict of tensors by name, and is {state!r:.80}.")
    if like is not None and _layout(state) != _layout(like):
        raise LossError(f"`{name}`.update made a state of {_layout(state)}, where there was {_layout(like)}.")
    for key, value in state.items():
        if value.is_floating_point() and not torch.isfinite(value).all():
            raise LossError(f"`{name}`.state[{key!r}] is not finite. No step was taken.")
    return {key: value.detach().clone() for key, value in state.items()}


def _layout(state: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {key: tuple(value.shape) for key, value in state.items()}


def _put(loss: Loss, state: Mapping[str, Tensor]) -> None:
    object.__setattr__(loss, "state", state)  # also of a frozen dataclass
