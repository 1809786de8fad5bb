"""FSDP2 without its copies where a shard is the whole parameter: on one rank, or where each rank holds a replica.

torch copies such a parameter for each pass as if it had gathered it, and each gradient twice as if it had reduced it.
Here a pass computes with the shard itself, or with a cast of it that is made in one go for a layer, and autograd's
gradient becomes the shard's, or is added to it. All else stays FSDP's: the classes, DTensors outside of passes,
offloading and the reduction over replicas.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, ShardedState
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from rlbench.strategies.internals import fsdp_groups


@dataclass(slots=True)
class _Shown:
    """A parameter that is shown as the shard itself, and the modules that have it, with its name there."""

    param: FSDPParam
    shard: Tensor
    pointer: int
    whole: nn.Parameter
    modules: list[tuple[nn.Module, str]]

    @property
    def is_there(self) -> bool:
        """Whether all of it is as it was."""
        param = self.param
        return (
            param._sharded_param_data is self.shard
            and self.shard.data_ptr() == self.pointer
            and param._unsharded_param is self.whole
            and self.whole.requires_grad == param.sharded_param.requires_grad
        )


class UnsplitGroup(FSDPParamGroup):
    """A group of parameters that are each whole on this rank."""

    fsdp_params: list[FSDPParam]
    _shown: list[_Shown] | None = None  # of a group in which all are shards; nothing else changes from pass to pass

    def wait_for_unshard(self) -> None:
        """Show the shards, or casts of them, as the gathered parameters; what lies on the host FSDP copies."""
        if not self._all_gather_result:
            return
        every = self.fsdp_params
        if self._shown is not None and all(one.is_there for one in self._shown):
            self.fsdp_params = []
            try:
                super().wait_for_unshard()
            finally:
                self.fsdp_params = every
            for one in self._shown:
                for module, name in one.modules:
                    module._parameters[name] = one.whole
                one.param.sharded_state = ShardedState.UNSHARDED
            return
        here = [p for p in every if _is_here(p)]
        self.fsdp_params = [p for p in every if not _is_here(p)]
        try:
            super().wait_for_unshard()
        finally:
            self.fsdp_params = every
        _cast([p for p in here if p.param_dtype is not None])
        _show([p for p in here if p.param_dtype is None])
        for p in here:
            p.to_unsharded()
        self._shown = _shown_by(every) if len(here) == len(every) else None

    def _to_sharded(self) -> None:
        if self._shown is None or self.is_sharded:
            super()._to_sharded()
            return
        for one in self._shown:
            for module, name in one.modules:
                module._parameters[name] = one.param.sharded_param
            one.param.sharded_state = ShardedState.SHARDED
        self._sharded_state = ShardedState.SHARDED

    def post_backward(self, *unused: Any) -> None:
        """Give each shard the gradient of the parameter it was shown as."""
        trained = [p for p in self.fsdp_params if p.sharded_param.requires_grad and hasattr(p, "_unsharded_param")]
        if not self._only_moves(trained):
            super().post_backward(*unused)
            return
        self._training_state = TrainingState.POST_BACKWARD
        held: list[Tensor] = []
        added: list[Tensor] = []
        for p in trained:
            gradient, p._unsharded_param.grad = p._unsharded_param.grad, None
            if gradient is None:
                continue
            if p.sharded_param.grad is None:
                p.sharded_param.grad = p.to_sharded_dtensor(gradient.to(p.orig_dtype))
            else:
                held.append(p.sharded_param.grad._local_tensor)
                added.append(gradient)
        if held:
            torch._foreach_add_(held, added)
        if self.reshard_after_backward:
            self.reshard()

    def _only_moves(self, trained: list[FSDPParam]) -> bool:
        """Whether a reduction would only copy and cast: one rank, no factor, nobody who listens."""
        alone = self.mesh_info.mesh.size() == 1 and self._all_reduce_hook is None
        return (
            alone
            and self.gradient_divide_factor is None
            and self.reduce_grads
            and len(self.modules) == 1
            and all(
                _is_here(p) and p.unsharded_accumulated_grad is None and not p.sharded_param._post_accumulate_grad_hooks
                for p in trained
            )
        )


def leave_whole(model: nn.Module) -> None:
    """Spare FSDP's copies in a model that was sharded over one rank, or of which each rank holds a replica."""
    for group in fsdp_groups(model):
        if group.mesh_info.shard_mesh_size == 1 and type(group) is FSDPParamGroup:
            group.__class__ = UnsplitGroup


def _is_here(p: FSDPParam) -> bool:
    """Whether the shard is a plain tensor on the device that computes."""
    shard = p._sharded_param_data
    plain = type(shard) is torch.Tensor and shard.device == p.device
    return plain and not p.offload_to_cpu and p._unsharded_dtensor_spec is None


def _cast(params: list[FSDPParam]) -> None:
    """Let the gathered parameters be casts of the shards, made in one call; FSDP frees them as it frees its own."""
    if not params:
        return
    with torch.inference_mode(False), torch.no_grad():
        for p in params:
            assert p.param_dtype is not None
            p.init_all_gather_outputs([p._sharded_param_data.numel()], [p.param_dtype], 1, p.device)
            p.alloc_all_gather_outputs()
        casts = [p.all_gather_outputs[0] for p in params]
        with torch.autograd._unsafe_preserve_version_counter(tuple(casts)):
            torch._foreach_copy_(casts, [p._sharded_param_data for p in params])
        for p in params:
            p.init_unsharded_param()


def _show(params: list[FSDPParam]) -> None:
    """Let the gathered parameters be views of the shards, wherever those lie now."""
    moved = [p for p in params if not _is_shown(p)]
    if not moved:
        return
    with torch.inference_mode(False), torch.no_grad():
        for p in moved:
            shard = p._sharded_param_data
            whole = shard.as_strided(p._orig_size, p._contiguous_orig_stride, shard.storage_offset())
            if hasattr(p, "_unsharded_param"):
                p._unsharded_param.data = whole
            else:
                p._unsharded_param = nn.Parameter(whole, requires_grad=p.sharded_param.requires_grad)


def _shown_by(params: list[FSDPParam]) -> list[_Shown] | None:
    """Describe how these parameters are shown; None where one is a cast, or in a module that sets its own its way."""
    shown = []
    for p in params:
        info = p._module_info
        names = [info.param_name, *info.shared_param_names]
        modules = list(zip([info.module, *info.shared_modules], names, strict=True))
        if any(type(module).__setattr__ is not nn.Module.__setattr__ for module, _ in modules):
            return None
        if p.param_dtype is not None or p.all_gather_outputs or p._unsharded_inner_tensors:
            return None
        shard = p._sharded_param_data
        shown.append(_Shown(p, shard, shard.data_ptr(), p._unsharded_param, modules))
    return shown


def _is_shown(p: FSDPParam) -> bool:
    return hasattr(p, "_unsharded_param") and p._unsharded_param.data_ptr() == p._sharded_param_data.data_ptr()
