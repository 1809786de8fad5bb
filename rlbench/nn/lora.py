"""Modules with LoRA adapters of peft: which parameters are the base's and which the adapters', their start, their sum.

peft puts a layer with `lora_A` and `lora_B` around each adapted one, which becomes its `base_layer`. A checkpoint knows
nothing of that: it fills the base under the names it had, and a replica receives W + alpha / rank · B A under them.

Source: Hu et al. 2021, https://arxiv.org/abs/2106.09685
"""

from __future__ import annotations

import hashlib
import logging
import math
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from rlbench.errors import BuildError, nearest, some

BASE = ".base_layer"
NAME = "default"
"""What peft calls an adapter that nobody named."""
PEFT_PREFIX = "base_model.model."
"""What stands before a layer's path in peft's files."""


@dataclass(frozen=True)
class Adapted:
    """The adapted layers of a module by path; none in one without adapters."""

    layers: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, module: nn.Module) -> Adapted:
        """Find them; without peft imported there are none."""
        peft = sys.modules.get("peft.tuners.lora.layer")
        if peft is None:
            return cls()
        layers: dict[str, Any] = {}
        seen, waiting = set(), [("", module)]
        while waiting:  # in the order of `named_modules`, but not into the dozen of parts that each adapted layer has
            path, part = waiting.pop()
            if isinstance(part, peft.LoraLayer):
                layers[path] = part
            elif part not in seen:
                seen.add(part)
                below = f"{path}." if path else ""
                inner = [(f"{below}{name}", child) for name, child in part._modules.items() if child is not None]
                waiting += reversed(inner)
        return cls(layers)

    def __bool__(self) -> bool:
        return bool(self.layers)

    def adapter_names(self) -> set[str]:
        """Return the names of the adapters' own parameters in the module."""
        return {
            f"{path}.{name}"
            for path, layer in self.layers.items()
            for name, _ in layer.named_parameters()
            if not name.startswith(f"{BASE[1:]}.")
        }

    def parameters(self) -> Iterator[tuple[str, str, Tensor]]:
        """Give path of the layer, "lora_A" or "lora_B", and parameter (its part on this rank) of the adapter."""
        for path, layer in self.layers.items():
            for kind in ("lora_A", "lora_B"):
                yield path, kind, getattr(layer, kind)[NAME].weight

    def linears(self) -> Iterator[nn.Module]:
        """Give the adapters' own linear layers."""
        for layer in self.layers.values():
            yield from (part for kind in ("lora_A", "lora_B") for part in getattr(layer, kind).values())

    def width(self) -> int:
        """Return how many numbers of one token the adapters hold for the backward: inner ones, and dropped inputs."""
        inner = sum(rank for layer in self.layers.values() for rank in layer.r.values())
        drops = [(layer, drop) for layer in self.layers.values() for drop in layer.lora_dropout.values()]
        return inner + sum(layer.in_features for layer, drop in drops if isinstance(drop, nn.Dropout))

    def peft_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Give the adapter's parameters (their parts on this rank) by their names in peft's files."""
        for path, kind, parameter in self.parameters():
            yield f"{PEFT_PREFIX}{path}.{kind}.weight", parameter

    def merged(self, name: str, weight: Tensor, full: Callable[[Tensor], Tensor]) -> Tensor:
        """Return parameter `name` of the module as the active adapters make it; `weight`: that of the base, whole.

        `full` makes a sharded tensor whole, which may be collective: call it on all ranks. Where it gives tensors on
        meta, so does this.
        """
        layer = self.layers.get(name.removesuffix(f"{BASE}.weight")) if name.endswith(f"{BASE}.weight") else None
        if layer is None or layer.merged:
            return weight
        whole = weight
        for adapter in layer.active_adapters:
            if adapter in layer.lora_A:
                down, up = full(layer.lora_A[adapter].weight.detach()), full(layer.lora_B[adapter].weight.detach())
                delta = (up.float() @ down.float()).mul_(layer.scaling[adapter])
                whole = whole.float() + (delta.T if layer.fan_in_fan_out else delta)
        return whole.to(weight.dtype)


def plain_name(name: str) -> str:
    """Return what a parameter of an adapted layer's base is called in a checkpoint."""
    return name.replace(f"{BASE}.", ".")


def inject(
    module: nn.Module, rank: int, alpha: float, targets: Sequence[str], dropout: float, whole: Sequence[str] = ()
) -> None:
    """Put adapters into a module on meta and freeze all the rest, but for the layers `whole`, which get none.

    Args:
        module: not sharded yet.
        rank, alpha: see `rlbench.trainers.models.lora.Lora`.
        targets: ends of layers' names, or "all-linear" alone (all but the output layer).
        dropout: of what the adapters take in, in passes with a gradient alone.
    """
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # peft imports it, and it tells of kernels not used here
    from peft import LoraConfig, inject_adapter_in_model

    from rlbench.nn.lora_layer import plain_layers

    config = LoraConfig(
        r=rank,
        lora_alpha=alpha,
        target_modules=_known_targets(module, targets),
        lora_dropout=dropout,  # type: ignore[arg-type]
        exclude_modules=list(whole) or None,
    )
    module.requires_grad_(False)
    with _linear_layers_alone(module), warnings.catch_warnings(action="ignore", category=UserWarning):
        inject_adapter_in_model(config, module, NAME, low_cpu_mem_usage=True)  # warns of GPT-2's layers, transposed
    for name in whole:
        module.get_submodule(name).requires_grad_(True)
    layers = list(Adapted.of(module).layers.values())
    for layer in layers:
        for drops in layer.lora_dropout.values():
            drops.register_forward_pre_hook(_drop_in_training_passes)
    plain_layers(layers)


@contextmanager
def _linear_layers_alone(module: nn.Module) -> Iterator[None]:
    """Keep peft from going around experts and routers of a mixture as well, for names of linear layers that they had
    in another version of transformers: they are parameters, and stay the base's."""
    config = getattr(module, "config", None)
    if config is None:
        yield
        return
    own = vars(config).get("model_type")
    config.model_type = ""  # by which peft knows the architectures of such names
    try:
        yield
    finally:
        if own is None:
            del config.model_type  # the class has it
        else:
            config.model_type = own


def _drop_in_training_passes(drops: nn.Module, _: Any) -> None:
    drops.training = torch.is_grad_enabled()  # the module itself computes as in evaluation, so that ratios are exact


def _known_targets(module: nn.Module, targets: Sequence[str]) -> str | list[str]:
    """Refuse names of layers that the module does not have, or that are none an adapter goes around."""
    if list(targets) == ["all-linear"]:
        return "all-linear"
    linear = [path for path, layer in module.named_modules() if type(layer).__name__ in ("Linear", "Conv1D")]
    unknown = [name for name in targets if not any(f".{path}".endswith(f".{name}") for path in linear)]
    if unknown:
        ends = sorted({path.rpartition(".")[2] for path in linear})
        raise BuildError(
            f"lora targets: {type(module).__name__} has no linear layer called {some(unknown)}"
            f"{nearest(unknown[0], ends)}; it has {some(ends, 12) or 'none'}, and 'all-linear' takes all but the last."
        )
    return list(targets)


@torch.no_grad()
def initial(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """Return the start of an adapter's parameter, whole, the same on every rank: B zero, A as peft draws it.

    float32, of `shape`; drawn from `seed` and the name, so that the sharding changes nothing.
    """
    tensor = torch.zeros(shape)
    if ".lora_A." in name:
        digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        nn.init.kaiming_uniform_(tensor, a=math.sqrt(5), generator=generator)
    return tensor


@contextmanager
def adapters_off(module: nn.Module) -> Iterator[None]:
    """Compute with the base alone; in passes without a gradient, as peft's own switch would also freeze."""
    layers = Adapted.of(module).layers.values()
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False
