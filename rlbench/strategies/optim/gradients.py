"""Global gradient norm and clipping over sharded parameters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor, or the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def global_norm(parameters: Iterable[Tensor]) -> float:
    """Return the 2-norm of all gradients over all shards; collective where parameters are sharded.

    Gradients are grouped by mesh, since parameters of different meshes cannot be reduced together; replicated
    dimensions are counted once. Accumulated in float64 across tensors.
    """
    groups: dict[tuple[Any, ...], list[Tensor]] = defaultdict(list)
    for parameter in parameters:
        if parameter.grad is not None:
            gradient = parameter.grad
            key = (gradient.device_mesh, gradient.placements) if isinstance(gradient, DTensor) else ()
            groups[key].append(local(gradient))
    total = 0.0
    for key, gradients in groups.items():
        norms = torch.stack(torch._foreach_norm(gradients, 2.0, dtype=torch.float32))
        square = norms.double().square().sum()
        if key:
            mesh, placements = key
            square = square.to(mesh.device_type)  # FSDP may keep gradients in host memory (fsdp_cpu_offload)
            for dimension, placement in enumerate(placements):
                if isinstance(placement, Shard) and mesh.size(dimension) > 1:
                    dist.all_reduce(square, group=mesh.get_group(dimension))
        total += float(square)
    return float(total**0.5)


@torch.no_grad()
def scale_gradients(parameters: Iterable[Tensor], factor: float) -> None:
    """Multiply every gradient by `factor`, in place."""
    gradients = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    if gradients and factor != 1.0:
        torch._foreach_mul_(gradients, factor)
