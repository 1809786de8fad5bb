"""What is private of FSDP, of process groups and of attention, and this package leans on: look here on an upgrade.

`sharding/unsplit.py` derives from FSDP2's own classes as well. `tests/strategies/test_internals.py` fails by name where
one of them has gone.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.fsdp._common_utils import HandleTrainingState
from torch.distributed.fsdp._runtime_utils import _post_backward_final_callback, _reshard
from torch.distributed.tensor._collective_utils import MeshTopoInfo
from torch.distributed.tensor._redistribute import _gen_transform_infos, clear_redistribute_planner_cache
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

flash_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
"""scaled_dot_product_attention's kernel on a CPU, which also returns each query's log-sum-exp."""


def fsdp_groups(module: nn.Module) -> list[Any]:
    """Return FSDP2's groups of parameters in a module."""
    parts = (part for part in module.modules() if isinstance(part, FSDPModule))
    return [group for part in parts for group in part._get_fsdp_state()._fsdp_param_groups]


def fsdp_dtype(part: FSDPModule) -> torch.dtype | None:
    """Return what FSDP2 casts a module's parameters to where it computes; None: nothing is cast."""
    dtype: torch.dtype | None = part._get_fsdp_state()._mp_policy.param_dtype
    return dtype


def is_fsdp_root(part: FSDPModule) -> bool:
    """Whether passes begin at this module."""
    return bool(part._get_fsdp_state()._is_root)


def leave_fsdp1_pass(root: FullyShardedDataParallel) -> None:
    """Do what FSDP1 does at the end of a backward, after a pass that did not come to it: free what is gathered, and be
    ready for the next. Harmless between two passes."""
    if root.check_is_root():
        for part in FullyShardedDataParallel.fsdp_modules(root):
            handle = part._handle
            if handle is not None and (handle._prefetched or handle._training_state is not HandleTrainingState.IDLE):
                _reshard(part, handle, handle.uses_sharded_strategy)
        _post_backward_final_callback(root, root)


def process_groups() -> list[Any]:
    """Return all process groups that this process is in."""
    return list(dist.distributed_c10d._world.pg_map)


def issued_in(groups: Iterable[Any]) -> int:
    """Count the collectives that this process has issued in `groups`: of each backend, as a group asks one alone."""
    backends = {group._get_backend(device) for group in groups for device in group._device_types}
    return sum(backend._get_sequence_number_for_group() for backend in backends)


def forget_shardings() -> None:
    """Drop what DTensor remembers by the names of process groups, which the next groups will have again, and by their
    meshes, which keep old groups alive: each has a thread that wakes a hundred times a second."""
    _clear_sharding_prop_cache()
    clear_redistribute_planner_cache()
    _gen_transform_infos.cache_clear()
    MeshTopoInfo.build_from_mesh.cache_clear()


def has_attention(config: Any) -> bool:
    """Whether a transformers model's config says which attention it computes with."""
    return hasattr(config, "_attn_implementation")


def attention_of(config: Any) -> str | None:
    """Return the name of the attention a transformers model computes with; None: transformers chooses."""
    name: str | None = config._attn_implementation
    return name


def set_attention(config: Any, name: str | None) -> None:
    """Have a model compute with another attention from now on, without transformers' checks of what it can."""
    config._attn_implementation_internal = name
