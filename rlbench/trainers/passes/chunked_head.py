"""Let a model's output layer give log-probs and entropies in place of logits, for the length of one forward, and
beside them what else is asked for: log-probs of more tokens, its own input.

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
from transformers.pytorch_utils import Conv1D

from rlbench.errors import EngineError
from rlbench.nn.lora import Adapted
from rlbench.nn.quantised import QuantisedLinear
from rlbench.nn.walk import every_module
from rlbench.rl.linear import linear_token_stats, linear_top_ids
from rlbench.trainers.passes.outputs import NO_MORE, Request, TokenOutputs, of_logits, with_candidates
from rlbench.trainers.passes.token_keeper import TokenGradients


class UnfitHead(EngineError):
    """The model's logits are not simply what its output layer gives."""


@dataclass(frozen=True)
class Head:
    """The output layer of one model; a plain `nn.Linear`."""

    layer: nn.Linear

    @classmethod
    def of(cls, module: nn.Module) -> Head:
        """Find it by transformers' `get_output_embeddings`; raises UnfitHead where it is no plain `nn.Linear`."""
        name, layer = type(module).__name__, output_layer(module)
        if layer is None:
            raise UnfitHead(f"{name} does not say which is its output layer (get_output_embeddings)")
        plain = [kind for kind in type(layer).__bases__ if kind is not FSDPModule]
        if type(layer) is not nn.Linear and not (isinstance(layer, FSDPModule) and plain == [nn.Linear]):
            raise UnfitHead(f"the output layer of {name} is a {type(layer).__name__}, not an nn.Linear")
        if "forward" in vars(layer) or (layer._forward_hooks and not isinstance(layer, FSDPModule)):
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
        request: Request = NO_MORE,
    ) -> TokenOutputs:
        """Log-probs and entropies of `targets` (R,), from a forward that returns its logits as the model gives them.

        `positions`: rows of the layer's flattened input to take, None: all; `watch` takes the gradient of that input;
        `chunk_rows`: rows of logits held at once, None: what suits the device; `request`: what else, but logits.
        Raises UnfitHead where the layer was not called just once, or what it gave did not come out untouched.
        """
        given: list[tuple[Tensor, int, Tensor | None]] = []

        def forward(hidden: Tensor) -> Tensor:
            states = hidden.reshape(-1, hidden.shape[-1])
            if positions is not None:
                states = states[positions]
            if watch is not None:
                watch.watch_hidden(states)
            weight, bias = self.layer.weight, self.layer.bias
            if isinstance(weight, DTensor):
                raise UnfitHead("the output layer's weight is not gathered when the layer runs")
            if len(states) != len(targets):
                raise UnfitHead(f"the output layer saw {len(states)} positions for {len(targets)} tokens")
            tile = None if chunk_rows is None else chunk_rows * len(weight)
            candidates = request.candidates
            if len(targets) == 0:  # nothing to compute, and gradients of zero all the same
                found = of_logits(linear(states, weight, bias), targets, temperature, request)
                logprobs, entropy = found.logprobs[:, None], found.entropy
                candidates = None
            else:
                if request.top_k:
                    candidates = linear_top_ids(states, weight, request.top_k, bias, tile)
                wanted = with_candidates(targets, candidates)
                logprobs, entropy = linear_token_stats(states, weight, wanted, temperature, bias, tile)
            parts = [logprobs, entropy[:, None]]
            if request.hidden_states:  # as a part of what leaves the unit: FSDP's hook sees all gradients
                parts.append(states.to(entropy.dtype))
            # no view: FSDP's hook on the output of a unit would be lost with an in-place operation on one
            stats = torch.cat([part[None] for part in parts], dim=-1)
            given.append((stats, stats._version, candidates))
            return stats

        self.layer.forward = forward  # type: ignore[method-assign]
        try:
            logits = model()
        finally:
            del self.layer.forward
        if len(given) != 1:
            raise UnfitHead(f"the output layer was called {len(given)} times in one forward")
        stats, version, candidates = given[0]
        if logits is not stats or stats._version != version:
            raise UnfitHead("the model changes its logits after the output layer")
        more = 0 if candidates is None else candidates.shape[1]
        rows = stats[0]
        return TokenOutputs(
            logprobs=rows[:, 0],
            entropy=rows[:, 1 + more],
            candidates=candidates,
            candidate_logprobs=None if candidates is None else rows[:, 1 : 1 + more],
            hidden_states=rows[:, 2 + more :] if request.hidden_states else None,
        )


def output_layer(module: nn.Module) -> Any:
    """The output layer that a model names, or None."""
    find = getattr(module, "get_output_embeddings", None)
    return find() if callable(find) else None


@contextmanager
def watched_head(
    module: nn.Module, watch: TokenGradients | None, positions: Tensor | None, keep: bool = False
) -> Iterator[list[Tensor]]:
    """While the model runs with its logits, let `watch` take the gradient of its output layer's input, where the model
    says which layer that is, and `keep` the input itself: its rows at `positions` of the flattened ones, or all."""
    kept: list[Tensor] = []
    layer = output_layer(module)
    if not isinstance(layer, nn.Module) or (watch is None and not keep):
        yield kept
        return

    def seen(_: nn.Module, given: tuple[Tensor, ...]) -> None:
        if watch is not None:
            watch.watch_hidden(given[0], positions)
        if keep:
            states = given[0].reshape(-1, given[0].shape[-1])
            kept.append(states if positions is None else states[positions])

    hook = layer.register_forward_pre_hook(seen)
    try:
        yield kept
    finally:
        hook.remove()


def hidden_size(module: nn.Module) -> int | None:
    """The width of its output layer's input; None where the model does not say which layer that is."""
    width = getattr(output_layer(module), "in_features", None)
    return None if width is None else int(width)


def _widths(part: nn.Module) -> tuple[int, ...]:
    """Return how wide a linear layer's input and output are; nothing of another."""
    if isinstance(part, nn.Linear | QuantisedLinear):
        return part.in_features, part.out_features
    return tuple(part.weight.shape) if isinstance(part, Conv1D) else ()


def token_bytes(module: nn.Module, item_size: int) -> int:
    """Estimate what one token holds for the backward, in bytes: inputs and outputs of the linear layers, and half as
    much again for norms, activations and attention. With gradient checkpointing: one layer's share, and the residual
    stream once per layer. An adapter holds its inner vector beside its layer, and what its dropout passes on."""
    output, adapted = output_layer(module), Adapted.of(module)
    beside = {id(part) for part in adapted.linears()} | {id(output)}
    widths = (_widths(part) for part in every_module(module) if id(part) not in beside)
    held = 1.5 * (sum(map(sum, widths)) + adapted.width())
    if getattr(module, "is_gradient_checkpointing", False):
        config: Any = getattr(module, "config", None)
        count = int(getattr(config, "num_hidden_layers", 1) or 1)
        held = held / count + count * int(getattr(config, "hidden_size", 0) or 0)
    return max(1, int(held * item_size))
