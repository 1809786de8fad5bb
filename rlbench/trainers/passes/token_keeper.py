"""Per-token values of a pass on the host, and what a backward says of each token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlbench.data.base.ragged import Ragged, offsets_of
from rlbench.data.batches.batch import TrainBatch


class TokenKeeper:
    """Per-row channels on the host: those that every micro-batch gave.

    Flat, as an array of its own for each row would cost more to send than a step of short rows takes.
    """

    def __init__(self, *names: str) -> None:
        self._rows: list[np.ndarray] = []
        self._lengths: list[np.ndarray] = []
        self._channels: dict[str, list[np.ndarray]] = {name: [] for name in names}

    def add(self, rows: np.ndarray, part: TrainBatch, channels: dict[str, Tensor]) -> None:
        """Keep flat (R, …) values of a micro-batch."""
        if not self._rows:
            self._channels = {name: [] for name in channels}
        self._rows.append(rows)
        self._lengths.append(part.response_lengths)
        self._channels = {name: kept for name, kept in self._channels.items() if name in channels}
        for name, kept in self._channels.items():
            kept.append(channels[name].detach().float().cpu().numpy())

    def result(self) -> dict[str, Any]:
        """`rows` (n,) int64 and, in the same order, each channel by name in `channels`, ragged float32."""
        rows, offsets = _joined(self._rows, np.int64), offsets_of(_joined(self._lengths, np.int64))
        channels = {name: Ragged(_joined(kept, np.float32), offsets) for name, kept in self._channels.items()}
        return {"rows": rows, "channels": channels}

    def scale(self, factor: float) -> None:
        """Multiply every value, as the gradients they belong to were."""
        for kept in self._channels.values():
            kept[:] = [values * np.float32(factor) for values in kept]


def _joined(arrays: list[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate(arrays) if arrays else np.zeros(0, dtype)


class TokenGradients:
    """What one backward gives each of its R response tokens, taken by hooks while it runs.

    `coefficient`: ∂L/∂log-prob. `entropy_coefficient`: ∂L/∂entropy. `hidden_gradient`: 2-norm of ∂L/∂h of the hidden
    state that predicts the token, as it enters the output layer; not there where the model does not say which that is.
    `scale`, by which the loss is multiplied before its backward, is undone.
    """

    NAMES = ("coefficient", "entropy_coefficient", "hidden_gradient")

    def __init__(self, scale: float) -> None:
        self._scale = scale
        self._found: dict[str, Tensor] = {}
        self._count = 0

    def watch(self, logprobs: Tensor, entropy: Tensor, joined: Callable[[Tensor], Tensor]) -> None:
        """Take the gradients of these (R,) tensors; `joined` gives all R from those of which hidden states are here."""
        self._count, self._joined = len(logprobs), joined
        for name, values in (("coefficient", logprobs), ("entropy_coefficient", entropy)):
            self._found[name] = torch.zeros_like(values.detach())
            values.register_hook(lambda gradient, name=name: self._take(name, gradient))

    def watch_hidden(self, states: Tensor, positions: Tensor | None = None) -> None:
        """Take the gradient of hidden states (…, D): the R rows at `positions` of the flattened ones, or all."""

        def take(gradient: Tensor | None) -> None:
            if gradient is not None:
                rows = gradient.detach().reshape(-1, gradient.shape[-1])
                rows = rows if positions is None else rows[positions]
                self._take("hidden_gradient", rows.float().norm(dim=-1))

        if states.requires_grad:
            count = states[..., 0].numel() if positions is None else len(positions)
            self._found["hidden_gradient"] = torch.zeros(count, device=states.device)
            states.register_hook(take)

    def channels(self) -> dict[str, Tensor]:
        """Each (R,); collective where ranks split sequences."""
        if "hidden_gradient" in self._found:
            self._found["hidden_gradient"] = self._joined(self._found["hidden_gradient"])
        return {name: values for name, values in self._found.items() if len(values) == self._count}

    def _take(self, name: str, gradient: Tensor | None) -> None:
        if gradient is not None:  # autograd's word for a gradient of 0
            self._found[name] = gradient.detach() / self._scale
