"""A loss that keeps a state, as a value: what that is called, a loss with another one, what its update makes of it.

It has `state`, tensors by name as they begin, and `update(metrics)`, which puts new ones there. The kernel tries losses
with this alone, which imports nothing that only a rank needs; what the ranks hold of a loss: `loss_state.py`.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rlbench.errors import LossError
from rlbench.rl import Loss
from rlbench.user_code import user_code

Tensors = dict[str, Tensor]


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
    put_state(made, held[state_name(loss)])
    return made


def updated_state(loss: Loss, held: Mapping[str, Tensor], metrics: Mapping[str, float]) -> Tensors:
    """Return what a loss's `update` makes of a state; the loss's own stays. Raises LossError where it is none."""
    name, first = state_name(loss), loss.state  # type: ignore[attr-defined]
    put_state(loss, {key: value.clone() for key, value in held.items()})
    try:
        with user_code(), torch.no_grad():
            loss.update(dict(metrics))  # type: ignore[attr-defined]
        return checked(name, loss.state, held)  # type: ignore[attr-defined]
    finally:
        put_state(loss, first)


def checked(name: str, state: Any, like: Mapping[str, Tensor] | None = None) -> Tensors:
    """Return a state as plain tensors; refuse what is none, other shapes than before, and what is not finite."""
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise LossError(f"`{name}`.state must be a dict of tensors by name, and is {state!r:.80}.")
    if like is not None and layout(state) != layout(like):
        raise LossError(f"`{name}`.update made a state of {layout(state)}, where there was {layout(like)}.")
    for key, value in state.items():
        if value.is_floating_point() and not torch.isfinite(value).all():
            raise LossError(f"`{name}`.state[{key!r}] is not finite. No step was taken.")
    return {key: value.detach().clone() for key, value in state.items()}


def layout(state: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a state."""
    return {key: tuple(value.shape) for key, value in state.items()}


def put_state(loss: Loss, state: Mapping[str, Tensor]) -> None:
    """Have a loss see a state."""
    object.__setattr__(loss, "state", state)  # also of a frozen dataclass
