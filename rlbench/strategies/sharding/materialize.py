"""From a sharded module on meta to one with its weights: each rank copies its own slice of every tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from rlbench.errors import BuildError, nearest
from rlbench.nn import BaseTrainModule
from rlbench.strategies.sharding.sources import TensorSource, open_source, through_transformers

SHOWN = 4


def allocate(module: nn.Module, device: torch.device) -> None:
    """Give every parameter on meta uninitialised memory on `device`; ties stay, buffers keep their values and
    move there."""
    buffers = {name: buffer.detach().clone() for name, buffer in module.named_buffers()}
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    module.to_empty(device=device)
    for first, *others in names.values():
        for other in others:  # where nothing is sharded, torch made each name a parameter of its own
            owner, _, attribute = other.rpartition(".")
            setattr(module.get_submodule(owner), attribute, module.get_parameter(first))
    for name, buffer in module.named_buffers():
        buffer.copy_(buffers[name])


def full_shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """Full shape of each parameter and persistent buffer, by every name it has (tied ones have several)."""
    return {name: tuple(tensor.shape) for name, tensor in targets(module).items()}


def targets(module: nn.Module) -> dict[str, Tensor]:
    """What a checkpoint may fill: parameters under all their names, and persistent buffers."""
    found: dict[str, Tensor] = dict(module.named_parameters(remove_duplicate=False))
    for prefix, child in module.named_modules():
        for name, buffer in child.named_buffers(recurse=False):
            if name not in child._non_persistent_buffers_set:
                found[f"{prefix}.{name}" if prefix else name] = buffer
    return found


@torch.no_grad()
def materialize(module: nn.Module, source: Any, seed: int, own_names: bool = False) -> str:
    """Fill the local shards of `module` from `source` and return where the weights came from. No collective.

    Args:
        module: sharded (or not) and allocated; names of the source go through its
            `preprocess_input_named_parameters`, if it has that.
        source: what `materialization_source()` gave, or a checkpoint that replaces it.
        seed: of initialisers.
        own_names: the source has the module's own names, as its state dict does: no hook maps them.

    Raises:
        BuildError: missing, left over or mis-shaped tensors; the sentence names some, and the nearest names.
    """
    opened = open_source(source, full_shapes(module), getattr(module, "_source_revision", None), seed)
    if _needs_transformers(module, opened, source):
        opened = through_transformers(module, opened)
    held = targets(module)
    hook = None if own_names else getattr(module, "preprocess_input_named_parameters", None)
    mapping = hook or (lambda name, tensor: (name, tensor))
    filled: set[int] = set()
    unknown: list[str] = []
    misshaped: list[str] = []
    for source_name in opened.names:
        mapped = mapping(source_name, opened.read(source_name))
        if mapped is None:
            continue
        name, tensor = mapped
        target = held.get(name)
        if target is None:
            unknown.append(name)
        elif tuple(tensor.shape) != tuple(target.shape):
            misshaped.append(f"{name} is {tuple(tensor.shape)}, the module wants {tuple(target.shape)}")
        else:
            _fill(target, tensor)
            filled.add(id(target))
    missing = [name for name, parameter in module.named_parameters() if id(parameter) not in filled]
    _refuse(type(module).__name__, opened, missing, unknown, misshaped, list(held))
    return opened.label


def _needs_transformers(module: nn.Module, opened: TensorSource, source: Any) -> bool:
    """True for a transformers checkpoint whose names are not the module's, unless the user's own hook maps
    them."""
    if not hasattr(module, "_keys_to_ignore_on_load_unexpected") or isinstance(source, dict):
        return False
    plain = BaseTrainModule.preprocess_input_named_parameters
    if getattr(type(module), "preprocess_input_named_parameters", plain) is not plain:
        return False
    held = targets(module)
    ids = {id(held[name]) for name in opened.names if name in held}
    direct = all(name in held for name in opened.names) and all(id(p) in ids for p in module.parameters())
    return not direct


def _fill(target: Tensor, tensor: Tensor) -> None:
    if isinstance(target, DTensor):
        local = distribute_tensor(tensor, target.device_mesh, target.placements, src_data_rank=None).to_local()
        target.to_local().copy_(local)
    else:
        target.copy_(tensor)


def _refuse(
    owner: str,
    opened: TensorSource,
    missing: list[str],
    unknown: list[str],
    misshaped: list[str],
    held: list[str],
) -> None:
    """Say in one sentence what does not fit."""
    said = []
    if missing:
        said.append(f"{len(missing)} parameters are missing ({_some(missing)}{nearest(missing[0], unknown)})")
    if unknown:
        said.append(f"{len(unknown)} tensors have no parameter ({_some(unknown)}{nearest(unknown[0], held)})")
    if misshaped:
        said.append(f"{len(misshaped)} have another shape ({_some(misshaped)})")
    if said:
        raise BuildError(
            f"the weights of {opened.label} do not fit {owner}: {'; '.join(said)}. Give the right "
            "checkpoint, or map names in preprocess_input_named_parameters(name, param) (None drops a "
            "tensor)."
        )


def _some(names: list[str]) -> str:
    return ", ".join(names[:SHOWN]) + (", …" if len(names) > SHOWN else "")
