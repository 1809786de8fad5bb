"""Let a model's output layer give log-probs and entropies in place of logits, for the length of one forward.

The layer's `forward` is replaced on the instance, so it runs where the layer runs: inside its FSDP unit, on the
gathered weight. What it gives leaves the unit as the model's own `logits`, so that FSDP gathers the weight again
when their gradient arrives. A model that does anything to its logits cannot be served so; `Head.run` notices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.functional import linear

from rlbench.errors import EngineError
from rlbench.rl.linear import linear_token_stats
from rlbench.trainers.passes.token_keeper import TokenGradients
from rlbench.trainers.passes.token_stats import token_stats


class UnfitHead(EngineError):
    """The model's logits are not simply what its output layer gives."""


@dataclass(frozen=True)
class Head:
    """The output layer of one model; a plain `nn.Linear`."""

    layer: nn.Linear

    @classmethod
    def of(cls, module: nn.Module) -> Head:
        """Find it by transformers' `get_output_embeddings`.

        Raises:
            UnfitHead: there is none, or it is more than an `nn.Linear`.
        """
        name = type(module).__name__
        find = getattr(module, "get_output_embeddings", None)
        layer = find() if callable(find) else None
        if layer is None:
            raise UnfitHead(f"{name} does not say which is its output layer (get_output_embeddings)")
        plain = [kind for kind in type(layer).__bases__ if kind is not FSDPModule]
        if type(layer) is not nn.Linear and not (isinstance(layer, FSDPModule) and plain == [nn.Linear]):
            raise UnfitHead(f"the output layer of {name} is a {type(layer).__name__}, not an nn.Linear")
        watched = layer._forward_hooks and not isinstance(layer, FSDPModule)
        if "forward" in vars(layer) or watched:
            raise UnfitHead(f"the output layer of {name} has a hook or a forward of its own")
        return cls(layer)

    def run(
        self,
        model: Callable[[], Tensor],
        positions: Tensor | None,
        targets: Tensor,
        temperature: float,
        watch: TokenGradients | None = None,
        chunk_rows: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies (R,) of `targets`.

        Args:
            model: runs the forward and returns its logits as the model gives them.
            positions: (R,) rows of the layer's flattened input to take; None: all, in order.
            targets: (R,) int64.
            temperature: divides the logits.
            watch: takes the gradient of the layer's input.
            chunk_rows: rows of logits held at once, at most; None: what suits the device.

        Raises:
            UnfitHead: the layer was not called just once, or what it gave did not come out untouched.
        """
        given: list[tuple[Tensor, int]] = []

        def forward(hidden: Tensor) -> Tensor:
            states = hidden.reshape(-1, hidden.shape[-1])
            if positions is not None:
                states = states[positions]
            if watch is not None:
                watch.watch_hidden(states)
            logprobs, entropy = self._stats(states, targets, temperature, chunk_rows)
            # no view: FSDP's hook on the output of a unit would be lost with an in-place operation on one
            stats = torch.stack((logprobs[None], entropy[None]), dim=-1)
            given.append((stats, stats._version))
            return stats

        self.layer.forward = forward  # type: ignore[method-assign]
        try:
            logits = model()
        finally:
            del self.layer.forward
        if len(given) != 1:
            raise UnfitHead(f"the output layer was called {len(given)} times in one forward")
        stats, version = given[0]
        if logits is not stats or stats._version != version:
            raise UnfitHead("the model changes its logits after the output layer")
        logprobs, entropy = stats[0].unbind(-1)
        return logprobs, entropy

    def _stats(
        self, states: Tensor, targets: Tensor, temperature: float, chunk_rows: int | None
    ) -> tuple[Tensor, Tensor]:
        weight, bias = self.layer.weight, self.layer.bias
        if isinstance(weight, DTensor):
            raise UnfitHead("the output layer's weight is not gathered when the layer runs")
        if len(states) != len(targets):
            raise UnfitHead(f"the output layer saw {len(states)} positions for {len(targets)} tokens")
        if len(targets) == 0:  # nothing to compute, and gradients of zero all the same
            return token_stats(linear(states, weight, bias), targets, temperature)
        tile = None if chunk_rows is None else chunk_rows * len(weight)
        return linear_token_stats(states, weight, targets, temperature, bias, tile)


@contextmanager
def watched_head(module: nn.Module, watch: TokenGradients | None, positions: Tensor | None) -> Iterator[None]:
    """While the model runs with its logits, let `watch` take the gradient of its output layer's input, where the model
    says which layer that is."""
    find = getattr(module, "get_output_embeddings", None)
    layer = find() if callable(find) and watch is not None else None
    if watch is None or not isinstance(layer, nn.Module):
        yield
        return
    hook = layer.register_forward_pre_hook(lambda _, given: watch.watch_hidden(given[0], positions))
    try:
        yield
    finally:
        hook.remove()


def token_bytes(module: nn.Module, item_size: int) -> int:
    """Estimate of what one token holds for the backward, in bytes: inputs and outputs of the linear layers,
    and half as much again for norms, activations and attention. With gradient checkpointing: one layer's
    share, and the residual stream once per layer."""
    linears = [m for m in module.modules() if isinstance(m, nn.Linear)]
    layers = [m for m in linears if not _is_output(module, m)]
    held = 1.5 * sum(m.in_features + m.out_features for m in layers)
    if getattr(module, "is_gradient_checkpointing", False):
        config: Any = getattr(module, "config", None)
        count = int(getattr(config, "num_hidden_layers", 1) or 1)
        width = int(getattr(config, "hidden_size", 0) or 0)
        held = held / count + count * width
    return max(1, int(held * item_size))


def _is_output(module: nn.Module, layer: nn.Module) -> bool:
    find = getattr(module, "get_output_embeddings", None)
    return callable(find) and find() is layer
