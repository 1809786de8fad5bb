"""A loss as it travels: pickled by value, known by its content, checked each time it is used."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from typing import Any

import cloudpickle
import torch
from torch import Tensor

from rlbench.dispatch.by_value import Watch, changes_itself
from rlbench.errors import LossError
from rlbench.rl import Loss, LossInputs, resolve
from rlbench.user_code import user_code

KEPT = 16


class LossCache:
    """Unpickled losses by the hash of their bytes."""

    def __init__(self) -> None:
        self._held: OrderedDict[str, tuple[Loss, Watch]] = OrderedDict()

    def load(self, blob: bytes) -> Loss:
        """Return the loss, or the standard loss a pickled name stands for."""
        key = hashlib.sha256(blob).hexdigest()
        if key not in self._held:
            try:
                with user_code():
                    value = cloudpickle.loads(blob)
            except Exception as error:  # whatever the user's own modules raise while they are imported
                raise LossError(
                    f"the loss cannot be rebuilt on the rank ({type(error).__name__}: {error}); define what "
                    "it needs in the notebook, or install it where the ranks run."
                ) from error
            self._held[key] = (resolve(value), Watch(blob, value))
        self._held.move_to_end(key)
        while len(self._held) > KEPT:
            self._held.popitem(last=False)
        return self._held[key][0]

    def need_unchanged(self, blob: bytes) -> None:
        """Refuse a loss that its calls have changed since it was loaded, and forget this copy of it."""
        key = hashlib.sha256(blob).hexdigest()
        loss, watch = self._held[key]
        if changed := watch.changed():
            del self._held[key]
            name = getattr(loss, "__name__", None) or type(loss).__name__
            raise LossError(f"`{name}` {changes_itself(changed)} Gradients were cleared.")


def evaluate(loss: Loss, inputs: LossInputs, weights: Tensor, name: str = "the loss") -> tuple[Tensor, dict[str, Any]]:
    """Return the loss's sum over trained tokens, times `weights` (S, T), and its metrics."""
    with user_code():
        given = loss(inputs)
    shape = tuple(inputs.mask.shape)
    if not (isinstance(given, tuple) and len(given) == 2 and isinstance(given[1], dict)):
        raise LossError(f"{name} returned {_kind(given)}; it must return (per_token, metrics): a tensor and a dict.")
    per_token, metrics = given
    if not isinstance(per_token, Tensor) or tuple(per_token.shape) != shape:
        raise LossError(f"{name} returned {_kind(per_token)}; it must be {shape}: one number per token.")
    if not per_token.requires_grad:
        raise LossError(
            f"{name} has no gradient: it must depend on inputs.logprobs (or inputs.entropy), undetached; of a "
            "reward model on inputs.scores."
        )
    total = (torch.where(inputs.mask, per_token.float(), 0.0) * weights).sum()
    need_finite(name, total, per_token, inputs.mask, "log or division of zero, or exp of a large ratio")
    return total, metrics


def need_finite(what: str, total: Tensor, per_token: Tensor, mask: Tensor, look_for: str) -> None:
    """Refuse a loss that is not finite, before a backward."""
    if not torch.isfinite(total):
        bad = int((~torch.isfinite(per_token) & mask).sum())
        raise LossError(
            f"{what} is {float(total.detach())}: {bad} of {int(mask.sum())} trained tokens are not finite; look for "
            f"{look_for}. No step was taken."
        )


def _kind(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
