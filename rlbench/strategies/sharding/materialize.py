"""From a sharded module on meta to one with its weights: each rank copies its own slice of every tensor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from rlbench.checkpoint.tensor_files import part_of
from rlbench.errors import BuildError, nearest, some
from rlbench.nn import BaseTrainModule
from rlbench.nn.lora import Adapted, initial, plain_name
from rlbench.nn.quantised import QuantisedLinear, quantised_layers
from rlbench.strategies.optim.gradients import full_shape, local
from rlbench.strategies.sharding.sources import TensorSource, open_source, through_transformers


def allocate(module: nn.Module, device: torch.device) -> None:
    """Give every parameter on meta uninitialised memory; ties stay, buffers keep their values and move there."""
    buffers = {name: buffer.detach().clone() for name, buffer in module.named_buffers() if not buffer.is_meta}
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    module.to_empty(device=device)
    for first, *others in names.values():
        for other in others:  # where nothing is sharded, torch made each name a parameter of its own
            owner, _, attribute = other.rpartition(".")
            setattr(module.get_submodule(owner), attribute, module.get_parameter(first))
    for name, buffer in module.named_buffers():
        if name in buffers:
            buffer.copy_(buffers[name])


def full_shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the full shape of each of `targets`, and of quantised weights."""
    shapes = {name: full_shape(tensor) for name, tensor in targets(module).items()}
    return shapes | {name: layer.shape for name, layer in quantised_weights(module).items()}


def quantised_weights(module: nn.Module) -> dict[str, QuantisedLinear]:
    """Return the quantised layers by the name that a checkpoint has for their weight."""
    return {plain_name(f"{path}.weight"): layer for path, layer in quantised_layers(module).items()}


def targets(module: nn.Module) -> dict[str, Tensor]:
    """Return what a checkpoint may fill: parameters under all their names, and persistent buffers; those of an adapted
    layer's base also under the names they have without adapters."""
    tensors: dict[str, Tensor] = dict(module.named_parameters(remove_duplicate=False))
    if Adapted.of(module):
        tensors |= {plain_name(name): tensor for name, tensor in tensors.items()}
    for prefix, child in module.named_modules():
        for name, buffer in child.named_buffers(recurse=False):
            if name not in child._non_persistent_buffers_set:
                tensors[f"{prefix}.{name}" if prefix else name] = buffer
    return tensors


@torch.no_grad()
def materialize(module: nn.Module, source: Any, seed: int, own_names: bool = False) -> str:
    """Fill the local shards of an allocated module and return where the weights came from. No collective.

    `source`: what `materialization_source()` gave, or a checkpoint that replaces it. Its names go through the module's
    `preprocess_input_named_parameters`, if it has that, unless they are its `own_names`, as in its state dict.
    """
    opened = open_source(source, full_shapes(module), getattr(module, "_source_revision", None), seed)
    own, quantised = targets(module), quantised_weights(module)
    if not isinstance(source, dict) and _needs_transformers(module, opened, own):
        opened = through_transformers(module, opened)
    hook = None if own_names else getattr(module, "preprocess_input_named_parameters", None)
    filled: set[int] = set()
    unknown: list[str] = []
    misshaped: list[str] = []
    for source_name in opened.names:
        mapped = source_name, opened.read(source_name)
        if hook is not None and (mapped := hook(*mapped)) is None:
            continue
        name, tensor = mapped
        target = own.get(name)
        if (layer := quantised.get(name)) is not None and tuple(tensor.shape) == layer.shape:
            layer.fill(tensor)
            filled.add(id(layer))
        elif target is None:
            unknown.append(name)
        elif tuple(tensor.shape) != full_shape(target):
            misshaped.append(f"{name} is {tuple(tensor.shape)}, the module wants {full_shape(target)}")
        else:
            local(target).copy_(part_of(tensor, target))
            filled.add(id(target))
    adapters = Adapted.of(module).adapter_names()
    missing = [name for name, layer in quantised.items() if id(layer) not in filled]
    for name, parameter in module.named_parameters():
        if id(parameter) not in filled and name in adapters:  # no checkpoint of the base has them
            local(parameter).copy_(part_of(initial(name, full_shape(parameter), seed), parameter))
        elif id(parameter) not in filled:
            missing.append(name)
    problems = {
        "parameters are missing": (missing, unknown),
        "tensors have no parameter": (unknown, list(own)),
        "have another shape": (misshaped, []),
    }
    misfits = [
        f"{len(names)} {problem} ({some(names)}{nearest(names[0], near)})"
        for problem, (names, near) in problems.items()
        if names
    ]
    if misfits:
        raise BuildError(
            f"the weights of {opened.label} do not fit {type(module).__name__}: {'; '.join(misfits)}. Give the right "
            "checkpoint, or map names in preprocess_input_named_parameters(name, param) (None drops a tensor)."
        )
    return opened.label


@torch.no_grad()
def load_adapter(module: nn.Module, folder: Path) -> None:
    """Fill the local shards of a module's adapter from a folder of peft's. No collective."""
    file = folder / "adapter_model.safetensors"
    if not file.is_file():
        raise BuildError(f"{folder} holds no {file.name}: save the adapter again, by peft or session.export")
    held, own = load_file(file), dict(Adapted.of(module).peft_parameters())
    other = [name for name, tensor in own.items() if name not in held or held[name].shape != tensor.shape]
    if other or len(held) != len(own):
        raise BuildError(
            f"the adapter in {folder} is of another base: it has {len(held)} tensors, {type(module).__name__} wants "
            f"{len(own)} ({some(other) or some(sorted(set(held) - set(own)))} differ in name or shape)"
        )
    for name, parameter in own.items():
        local(parameter).copy_(part_of(held[name], parameter))


def _needs_transformers(module: nn.Module, opened: TensorSource, own: dict[str, Tensor]) -> bool:
    """Whether a transformers checkpoint has other names than the module, which the user's own hook does not map."""
    plain = BaseTrainModule.preprocess_input_named_parameters
    if getattr(type(module), "preprocess_input_named_parameters", plain) is not plain:
        return False
    ids, quantised = {id(own[name]) for name in opened.names if name in own}, quantised_weights(module)
    adapters = Adapted.of(module).adapter_names()
    needed = (id(parameter) in ids for name, parameter in module.named_parameters() if name not in adapters)
    direct = all(name in own or name in quantised for name in opened.names) and all(needed)
    return hasattr(module, "_keys_to_ignore_on_load_unexpected") and not direct
