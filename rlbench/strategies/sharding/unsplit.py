"""FSDP2 without its copies where a shard is the whole parameter: on one rank, or where each rank holds a replica.

torch copies such a parameter for each pass as if it had gathered it, and each gradient twice as if it had reduced it.
Here a pass computes with the shard itself, and autograd's gradient becomes the shard's. All else stays FSDP's: the
classes, DTensors outside of passes, casts, offloading and the reduction over replicas.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from rlbench.strategies.internals import fsdp_groups


class UnsplitGroup(FSDPParamGroup):
    """A group of parameters that are each whole on this rank."""

    fsdp_params: list[FSDPParam]

    def wait_for_unshard(self) -> None:
        """Show the shards as the gathered parameters; those that FSDP casts or brings from the host it copies."""
        if not self._all_gather_result:
            return
        every = self.fsdp_params
        shown = [p for p in every if _stays(p)]
        self.fsdp_params = [p for p in every if not _stays(p)]
        try:
            super().wait_for_unshard()
        finally:
            self.fsdp_params = every
        for p in shown:
            _show(p)
            p.to_unsharded()

    def post_backward(self, *unused: Any) -> None:
        """Give each shard the gradient of the parameter it was shown as."""
        trained = [p for p in self.fsdp_params if p.sharded_param.requires_grad and hasattr(p, "_unsharded_param")]
        if not self._only_moves(trained):
            super().post_backward(*unused)
            return
        self._training_state = TrainingState.POST_BACKWARD
        for p in trained:
            gradient, p._unsharded_param.grad = p._unsharded_param.grad, None
            if gradient is None:
                continue
            if p.sharded_param.grad is None:
                p.sharded_param.grad = p.to_sharded_dtensor(gradient)
            else:
                p.sharded_param.grad._local_tensor += gradient
        if self.reshard_after_backward:
            self.reshard()

    def _only_moves(self, trained: list[FSDPParam]) -> bool:
        """Whether a reduction would only copy: one rank, no cast, no factor, nobody who listens."""
        alone = self.mesh_info.mesh.size() == 1 and self._all_reduce_hook is None
        plain = self._reduce_dtype in (None, self._orig_dtype) and self.gradient_divide_factor is None
        return (
            alone
            and plain
            and self.reduce_grads
            and len(self.modules) == 1
            and all(
                _stays(p) and p.unsharded_accumulated_grad is None and not p.sharded_param._post_accumulate_grad_hooks
                for p in trained
            )
        )


def leave_whole(model: nn.Module) -> None:
    """Spare FSDP's copies in a model that was sharded over one rank, or of which each rank holds a replica."""
    for group in fsdp_groups(model):
        if group.mesh_info.shard_mesh_size == 1 and type(group) is FSDPParamGroup:
            group.__class__ = UnsplitGroup


def _stays(p: FSDPParam) -> bool:
    """Whether a parameter computes as it lies there."""
    shard = p._sharded_param_data
    plain = type(shard) is torch.Tensor and shard.device == p.device
    return plain and p.param_dtype is None and not p.offload_to_cpu and p._unsharded_dtensor_spec is None


def _show(p: FSDPParam) -> None:
    """Let the gathered parameter be a view of the shard, wherever that lies now."""
    shard = p._sharded_param_data
    with torch.inference_mode(False), torch.no_grad():
        whole = shard.as_strided(p._orig_size, p._contiguous_orig_stride, shard.storage_offset())
        if not hasattr(p, "_unsharded_param"):
            p._unsharded_param = nn.Parameter(whole, requires_grad=p.sharded_param.requires_grad)
        elif p._unsharded_param.data_ptr() != whole.data_ptr():
            p._unsharded_param.data = whole
