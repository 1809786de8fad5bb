"""A module's tensors as a checkpoint holds them: whole, and by its names."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from rlbench.nn import BaseTrainModule
from rlbench.nn.lora import NAME, Adapted, plain_name
from rlbench.nn.quantised import QuantisedLinear, quantised_layers
from rlbench.strategies.optim.gradients import full_shape, gathered
from rlbench.weights.manifest import AdapterInfo
from rlbench.weights.names import to_checkpoint_names, unique_parameters


def whole_tensor(tensor: Tensor) -> Tensor:
    """The whole of a sharded tensor, on the ranks' device even where its shards live in host memory; collective."""
    if not isinstance(tensor, DTensor):
        return gathered(tensor)
    own, device_type = tensor.to_local(), tensor.device_mesh.device_type
    if own.device.type != device_type:  # fsdp_cpu_offload, on a GPU
        own, tensor = own.to(device_type), tensor.to(device_type)
    return own if tensor.device_mesh.size() == 1 else tensor.full_tensor()


def adapter_info(module: torch.nn.Module, number: int) -> AdapterInfo:
    """Describe the adapter of a module that has one, and that has `number` in the replicas."""
    layers = Adapted.of(module).layers
    first = next(iter(layers.values()))
    targets = tuple(sorted({path.rpartition(".")[2] for path in layers}))
    return AdapterInfo(number, int(first.r[NAME]), float(first.lora_alpha[NAME]), targets)


def shape_only(tensor: Tensor) -> Tensor:
    """Return a tensor of meta with type and shape of the whole of one that may be sharded."""
    return torch.empty(full_shape(tensor), dtype=tensor.dtype, device="meta")


def weight_of(layer: QuantisedLinear, full: Callable[[Tensor], Tensor]) -> Tensor:
    """The whole weight of a quantised layer, or, where shapes alone are wanted, that."""
    return layer.whole() if full is whole_tensor else torch.empty(layer.shape, dtype=layer.dtype, device="meta")


def checkpoint_names(module: torch.nn.Module) -> dict[str, str] | None:
    """Checkpoint name of each parameter where the architecture only renames; None where it merges or splits."""
    adapters = Adapted.of(module).adapter_names()
    held = [*unique_parameters(module), *(f"{path}.weight" for path in quantised_layers(module))]
    names = [plain_name(name) for name in held if name not in adapters]
    probes = {name: torch.empty(2, 2, device="meta") for name in names}
    by_id = {id(probe): name for name, probe in probes.items()}
    try:
        converted = to_checkpoint_names(module, dict(probes))
    except Exception:  # a conversion looked into the tensors, which probes do not have
        return None
    renamed = {by_id.get(id(tensor)): name for name, tensor in converted.items()}
    return None if None in renamed or len(renamed) != len(names) else {old: new for old, new in renamed.items() if old}


def own_hook(module: torch.nn.Module) -> Callable[..., tuple[str, Tensor] | None] | None:
    """Return the `postprocess_output_named_parameters` of the user's own; None where it is the plain one."""
    plain = BaseTrainModule.postprocess_output_named_parameters
    hook: Callable[..., tuple[str, Tensor] | None] = getattr(
        module, "postprocess_output_named_parameters", MethodType(plain, module)
    )
    return None if getattr(hook, "__func__", None) is plain else hook


@torch.no_grad()
def checksum(module: torch.nn.Module) -> str:
    """sha256 over names and full values of all parameters; collective, equal on all ranks and for any sharding."""
    digest = hashlib.sha256()
    for name, tensor in sorted(unique_parameters(module).items()):
        full: Any = whole_tensor(tensor)
        digest.update(name.encode())
        digest.update(full.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
