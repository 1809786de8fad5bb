"""What a model computes with, kept in host memory while it holds other weights, and put back to the bit."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

PACKED = ("cpu_linear", "moe_kernel")
"""Attributes by which vLLM's layers hold packed copies of weights: loading makes new ones, and leaves the old whole."""

CACHE = "kv_cache"
"""By this name vLLM's attention layers hold their part of the KV cache: no weight, and most of a device's memory."""


class Aside:
    """The tensors of a model and what its layers packed of them."""

    def __init__(self, model: nn.Module) -> None:
        """Copy all tensors: parameters, buffers, and those that are plain attributes; the KV cache stays as it is."""
        self._places: list[tuple[dict[str, Any], dict[str, Any]]] = []
        copies: dict[int, tuple[Tensor, Tensor]] = {}
        for module in model.modules():
            for holder in (module._parameters, module._buffers, vars(module)):
                items = [(name, value) for name, value in holder.items() if name != CACHE]
                held = {name: value for name, value in items if isinstance(value, Tensor) or name in PACKED}
                self._places.append((holder, held))
                for tensor in (value for value in held.values() if isinstance(value, Tensor)):
                    if id(tensor) not in copies:
                        copies[id(tensor)] = tensor, tensor.detach().to("cpu", copy=True)
        self._copies = list(copies.values())

    @torch.no_grad()
    def put_back(self) -> None:
        """Have the model's own tensors, at the addresses they had, hold what they held."""
        for holder, held in self._places:
            holder.update(held)
        for tensor, copy in self._copies:
            tensor.data.copy_(copy)
