"""What a rank's tensors weigh, where they are, and how their memory is truly given back and taken again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rlbench.checkpoint.flat_parts import mark_of
from rlbench.errors import StateError
from rlbench.nn.quantised import QuantisedLinear, quantised_layers
from rlbench.nn.walk import every_module
from rlbench.strategies.internals import fsdp_groups
from rlbench.strategies.optim.gradients import local


@torch.no_grad()  # in which a sharded tensor gives its part at once
def weight_tensors(module: nn.Module) -> list[Tensor]:
    """Return local parts of the parameters, and the numbers of quantised weights."""
    packed = [buffer for layer in quantised_layers(module).values() for buffer in layer.buffers(recurse=False)]
    # `.data` of a sharded parameter would be a new sharded tensor, at six times the time
    return [local(parameter).data for parameter in module.parameters()] + packed


@torch.no_grad()
def gradient_tensors(module: nn.Module) -> list[Tensor]:
    """Return local parts of the gradients there are."""
    return [local(parameter.grad) for parameter in module.parameters() if parameter.grad is not None]


@torch.no_grad()
def optimizer_tensors(optimizers: Iterable[torch.optim.Optimizer]) -> list[Tensor]:
    """Return local parts of the optimizers' state."""
    return [
        local(value)
        for optimizer in optimizers
        for state in list(optimizer.state.values())
        for value in list(state.values())
        if isinstance(value, Tensor)
    ]


def model_nbytes(models: Iterable[nn.Module], device: torch.device) -> tuple[int, int]:
    """Return the bytes of weights and of gradients on `device`, in one walk that makes no view of any: what
    `weight_tensors` and `gradient_tensors` weigh, at a fifth of the time, for whoever counts after each call."""
    weights, gradients = [], []
    for layer in (layer for model in models for layer in every_module(model)):
        parameters = [parameter for parameter in layer._parameters.values() if parameter is not None]
        weights += [_part(parameter) for parameter in parameters]
        gradients += [_part(parameter.grad) for parameter in parameters if parameter.grad is not None]
        if isinstance(layer, QuantisedLinear):
            weights += layer.buffers(recurse=False)
    return nbytes(on_device(weights, device)), nbytes(on_device(gradients, device))


def _part(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def nbytes(tensors: Iterable[Tensor]) -> int:
    """Return bytes of the storages behind the tensors, each counted once; a released storage has none."""
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def on_device(tensors: Iterable[Tensor], device: torch.device) -> list[Tensor]:
    """Return those that take memory of this kind of device; on a host without a GPU all tensors are in host memory."""
    return [tensor for tensor in tensors if tensor.device.type == device.type]


def beyond(parts: Mapping[str, int], device: torch.device) -> dict[str, int]:
    """Return what torch's allocator holds on a GPU beside `parts` (bytes by owner); empty on a host, which has none.

    `activations`: allocated to nothing that is known, so to what a pass computes; `other`: reserved and not in use.
    """
    if device.type != "cuda":
        return {}
    allocated = int(torch.cuda.memory_allocated(device))
    reserved = int(torch.cuda.memory_reserved(device))
    return {
        "allocated": allocated,
        "reserved": reserved,
        "activations": max(0, allocated - sum(parts.values())),
        "other": reserved - allocated,
    }


Released = list[tuple[torch.UntypedStorage, int]]
"""Storages whose memory was given back, with the bytes each had."""


def release(tensors: Iterable[Tensor]) -> Released:
    """Give the memory back and keep the tensor objects, so that optimizers and FSDP still know them."""
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
    released = [(storage, storage.nbytes()) for storage in storages.values()]
    for storage, _ in released:
        storage.resize_(0)
    return released


@torch.no_grad()
def own_storages(module: nn.Module) -> None:
    """Move weights whose storage cannot be resized (somebody made a numpy view of it) into storages that can."""
    moved = False
    for parameter in module.parameters():
        tensor = _part(parameter)
        if tensor.numel() and not tensor.untyped_storage().resizable():
            if mark_of(parameter) is not None:
                raise StateError(
                    "the weights cannot be released: somebody holds a numpy view of a parameter, and FSDP1 has all "
                    "of a unit in one piece of memory. Drop the view, then call again"
                )
            tensor.set_(tensor.clone())
            moved = True
    for group in fsdp_groups(module) if moved else ():
        for sharded in group.fsdp_params:
            sharded.reset_sharded_param()  # FSDP keeps a view of the storage, as after module.to()


def regain(released: Released) -> int:
    """Take the same memory again, zeroed, and return its bytes: as remembered, since FSDP pads a shard that does not
    divide evenly, and gathers the padding too."""
    for storage, size in released:
        storage.resize_(size)
        torch.tensor([], dtype=torch.uint8, device=storage.device).set_(storage).zero_()
    return sum(size for _, size in released)


def move_optimizer(optimizer: torch.optim.Optimizer, device: torch.device) -> int:
    """Move the optimizer's state to `device`; return the bytes that moved. Step counters stay where they are."""
    moved = 0
    for state in optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, Tensor) and value.dim() > 0 and value.device.type != device.type:
                moved += local(value).untyped_storage().nbytes()
                state[key] = value.to(device)
    return moved
