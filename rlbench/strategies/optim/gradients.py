"""Numbers over sharded parameters: this rank's part of a tensor, the global gradient norm, sums of all shards."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from rlbench.checkpoint.flat_parts import flat_part, whole_shape

KEEPER = "_keeps_gradients"


def keeper_of(model: nn.Module) -> Any:
    """Return what keeps a model's gradients between a backward and a step in the place of its parameters, and says
    whether any are `waiting`; None where the parameters do."""
    return vars(model).get(KEEPER)


def is_split(tensor: Tensor) -> bool:
    """Whether a parameter that is no DTensor is split over the ranks: by DeepSpeed's ZeRO 3, where it is empty between
    two uses, or by FSDP1, where it is a row of numbers."""
    return hasattr(tensor, "ds_id") or flat_part(tensor) is not None


def full_shape(tensor: Any) -> tuple[int, ...]:
    """Return the shape of the whole of a tensor that is split, or not."""
    return tuple(tensor.ds_shape) if hasattr(tensor, "ds_id") else whole_shape(tensor)


def numbers_of(tensors: Iterable[Tensor]) -> int:
    """Count the numbers of whole tensors, of which a rank may have a part."""
    return sum(math.prod(full_shape(tensor)) for tensor in tensors)


@torch.no_grad()
def gathered(tensor: Tensor) -> Tensor:
    """Return the whole of a tensor that FSDP or DeepSpeed has split over the ranks, else itself; collective."""
    if isinstance(tensor, DTensor):
        return tensor.full_tensor()
    if (part := flat_part(tensor)) is not None:
        whole = torch.zeros(part.total, dtype=tensor.dtype, device=tensor.device)
        whole[part.start : part.start + part.numel] = tensor
        dist.all_reduce(whole.view(torch.uint8), group=part.group)  # to the bit: each byte is one rank's, others zero
        return whole.view(part.shape)
    if not is_split(tensor):
        return tensor
    import deepspeed

    with deepspeed.zero.GatheredParameters([tensor]):
        return tensor.detach().clone()


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a sharded tensor, or the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    """Return by what tensors can be reduced together: mesh and placements, or FSDP1's group; () where it is whole."""
    if (part := flat_part(tensor)) is not None:
        return (part.group,)
    return (tensor.device_mesh, tuple(tensor.placements)) if isinstance(tensor, DTensor) else ()


def _reduce(values: Tensor, layout: tuple[Any, ...], op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
    """Reduce over the ranks that hold the shards of a layout, in place; replicas count once."""
    if len(layout) == 1:
        dist.all_reduce(values, op=op, group=layout[0])
        return
    mesh, placements = layout
    for dimension, placement in enumerate(placements):
        if not placement.is_replicate() and mesh.size(dimension) > 1:
            dist.all_reduce(values, op=op, group=mesh.get_group(dimension))


@torch.no_grad()
def global_norm(parameters: Iterable[Tensor]) -> float:
    """Return the 2-norm of all gradients over all shards, accumulated in float64 across tensors; collective where
    parameters are sharded."""
    groups: dict[tuple[Any, ...], list[Tensor]] = defaultdict(list)
    for parameter in parameters:
        if flat_part(parameter) is not None:  # none of its numbers may be here, and the others reduce all the same
            gradients = groups[_layout(parameter)]
            gradients.append(parameter.new_zeros(1) if parameter.grad is None else parameter.grad)
        elif parameter.grad is not None:
            groups[_layout(parameter.grad)].append(local(parameter.grad))
    total = 0.0
    for layout, gradients in groups.items():
        norms = torch.stack(torch._foreach_norm(gradients, 2.0, dtype=torch.float32))
        square = norms.double().square().sum()
        if layout:
            if isinstance(layout[0], DeviceMesh):  # FSDP may keep gradients in host memory (fsdp_cpu_offload)
                square = square.to(layout[0].device_type)
            _reduce(square, layout)
        total += float(square)
    return float(total**0.5)


@torch.no_grad()
def scale_gradients(parameters: Iterable[Tensor], factor: float) -> None:
    """Multiply every gradient by `factor`, in place."""
    gradients = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    if gradients and factor != 1.0:
        torch._foreach_mul_(gradients, factor)


def scale_waiting(model: nn.Module, factor: float) -> None:
    """Multiply the gradients of a model that wait for a step by `factor`."""
    if (keeper := keeper_of(model)) is not None:
        keeper.scale(factor)
    else:
        scale_gradients(model.parameters(), factor)


@torch.no_grad()
def over_shards(parameters: Sequence[Tensor], values: Tensor, highest: bool = False) -> Tensor:
    """Add up (or take the `highest` of) what each rank measured on its shards of P parameters, in the same order on all
    ranks: `values` (P, …), on the parameters' device. Return (P, …) of the whole parameters, equal on all ranks;
    collective where they are sharded."""
    groups: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    for i, parameter in enumerate(parameters):
        if layout := _layout(parameter):
            groups[layout].append(i)
    whole = values.clone()
    for layout, rows in groups.items():
        part = whole[rows]
        _reduce(part, layout, dist.ReduceOp.MAX if highest else dist.ReduceOp.SUM)
        whole[rows] = part
    return whole
