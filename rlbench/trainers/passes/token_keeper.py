"""Per-token values of a pass on the host, and what a backward says of each token."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlbench.data.batches.batch import TrainBatch


class TokenKeeper:
    """Per-row channels on the host: those that every micro-batch gave."""

    def __init__(self, *names: str) -> None:
        self._rows: list[np.ndarray] = []
        self._channels: dict[str, list[np.ndarray]] = {name: [] for name in names}

    def add(self, rows: np.ndarray, part: TrainBatch, channels: dict[str, Tensor]) -> None:
        """Keep flat (R,) values of a micro-batch."""
        cuts = part.responses.offsets[1:-1]
        if not self._rows:
            self._channels = {name: [] for name in channels}
        self._rows.append(rows)
        self._channels = {name: kept for name, kept in self._channels.items() if name in channels}
        for name, kept in self._channels.items():
            kept += np.split(channels[name].detach().float().cpu().numpy(), cuts)

    def result(self) -> dict[str, Any]:
        """`rows` and, in the same order, each channel's arrays by name in `channels`."""
        rows = np.concatenate(self._rows) if self._rows else np.zeros(0, np.int64)
        return {"rows": rows, "channels": self._channels}

    def scale(self, factor: float) -> None:
        """Multiply every value, as the gradients they belong to were."""
        for kept in self._channels.values():
            kept[:] = [values * np.float32(factor) for values in kept]


class TokenGradients:
    """What one backward gives each of its R response tokens, taken by hooks while it runs.

    `coefficient`: ∂L/∂log-prob. `entropy_coefficient`: ∂L/∂entropy. `hidden_gradient`: 2-norm of ∂L/∂h of the hidden
    state that predicts the token, as it enters the output layer; not there where the model does not say which that is.

    Args:
        scale: by which the loss is multiplied before its backward; undone here.
    """

    NAMES = ("coefficient", "entropy_coefficient", "hidden_gradient")

    def __init__(self, scale: float) -> None:
        self._scale = scale
        self._found: dict[str, Tensor] = {}
        self._count = 0

    def watch(self, logprobs: Tensor, entropy: Tensor) -> None:
        """Take the gradients of these (R,) tensors."""
        self._count = len(logprobs)
        for name, values in (("coefficient", logprobs), ("entropy_coefficient", entropy)):
            self._found[name] = torch.zeros_like(values.detach())
            values.register_hook(lambda gradient, name=name: self._take(name, gradient))

    def watch_hidden(self, states: Tensor, positions: Tensor | None = None) -> None:
        """Take the gradient of hidden states (…, D): the R rows at `positions` of the flattened ones, or all."""

        def take(gradient: Tensor | None) -> None:
            if gradient is None:
                return
            rows = gradient.detach().reshape(-1, gradient.shape[-1])
            rows = rows if positions is None else rows[positions]
            self._take("hidden_gradient", rows.float().norm(dim=-1))

        if states.requires_grad:
            count = states[..., 0].numel() if positions is None else len(positions)
            self._found["hidden_gradient"] = torch.zeros(count, device=states.device)
            states.register_hook(take)

    def channels(self) -> dict[str, Tensor]:
        """Each (R,)."""
        return {name: values for name, values in self._found.items() if len(values) == self._count}

    def _take(self, name: str, gradient: Tensor | None) -> None:
        if gradient is not None:  # autograd's word for a gradient of 0
            self._found[name] = gradient.detach() / self._scale
