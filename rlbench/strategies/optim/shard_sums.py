"""Numbers of parameters added up over the ranks that hold their shards; replicas count once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard


@torch.no_grad()
def over_shards(parameters: Sequence[Tensor], values: Tensor, highest: bool = False) -> Tensor:
    """Reduce what each rank found on its shards; collective where parameters are sharded.

    Args:
        parameters: P, in the same order on all ranks.
        values: (P, …), of this rank's parts, on the parameters' device.
        highest: the greatest of the ranks' values instead of their sum.

    Returns:
        (P, …), of the whole parameters; equal on all ranks.
    """
    groups: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    for i, parameter in enumerate(parameters):
        if isinstance(parameter, DTensor):
            groups[parameter.device_mesh, tuple(parameter.placements)].append(i)
    whole = values.clone()
    for (mesh, placements), rows in groups.items():
        part = whole[rows]
        for dimension, placement in enumerate(placements):
            if isinstance(placement, Shard) and mesh.size(dimension) > 1:
                op = dist.ReduceOp.MAX if highest else dist.ReduceOp.SUM
                dist.all_reduce(part, op=op, group=mesh.get_group(dimension))
        whole[rows] = part
    return whole
