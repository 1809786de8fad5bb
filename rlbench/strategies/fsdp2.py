"""The FSDP2 strategy: one object between a module's methods and torch on a rank, after LightRFT's `FSDPV2Strategy`."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from rlbench.errors import BuildError
from rlbench.strategies.base import StrategyBase
from rlbench.strategies.internals import fsdp_dtype, fsdp_groups
from rlbench.strategies.memory.device import RankDevice
from rlbench.strategies.options.config import StrategyConfig, need_no_deepspeed
from rlbench.strategies.ranks.control import ControlGroup
from rlbench.strategies.sharding.preparation import set_dtypes
from rlbench.strategies.sharding.tensor_parallel import TENSOR, split_layers
from rlbench.strategies.sharding.unsplit import leave_whole
from rlbench.weights.gloo import share_devices

TIMEOUT = timedelta(minutes=60)
manual_transformer_cls_names_to_wrap = [
    "Embedding",
    "Qwen2VLDecoderLayer",
    "Qwen2VLVisionBlock",
    "Qwen2_5_VLVisionBlock",
    "Qwen2_5_VLDecoderLayer",
    "Qwen2DecoderLayer",
    "LlamaDecoderLayer",
    "DeepseekDecoderLayer",
]
"""Names of classes that are units in any model that does not name its own; append to it before `prepare_model`."""


class FSDPV2Strategy(StrategyBase):
    """Shard a module, make its optimizer, scale its losses, step it, move it, keep it; arguments as of `StrategyBase`.

    The device is the GPU that `local_rank` names, or the host. The process group is the one there is (on the ranks of
    an engine); else it is joined as `torchrun` says.

    Example:
        strategy = FSDPV2Strategy(max_norm=1.0, micro_train_batch_size=2, train_batch_size=16)
        model = strategy.prepare_model(model, is_training=True)
        optimizer = strategy.create_optimizer(model, lr=1e-5)
        strategy.backward(loss, model, optimizer)
        strategy.optimizer_step(optimizer, model, scheduler, name="actor")
    """

    def join(self, device: RankDevice | None) -> tuple[RankDevice, ControlGroup]:
        """Join the ranks, unless this process has."""
        need_no_deepspeed(self.config)
        device = device or RankDevice.pick(local_rank(self.config))
        join_ranks(device)
        device.let_scripts_wait()
        self._meshes: dict[tuple[int, ...], DeviceMesh] = {}  # each has groups of its own
        return device, ControlGroup()

    def shard(
        self, model: nn.Module, is_training: bool = False, shard_size: int = -1, reshard_after_forward: bool = True
    ) -> nn.Module:
        """Shard `model` in place and return it. It may still be on meta, and stays there; arguments as of
        `prepare_model`.

        The root is always freed after its forward: a gathered root left by a forward without backward would be used
        again, stale, after the next optimizer step.
        """
        if hasattr(model, "tie_weights"):
            model.tie_weights()  # making a module on meta gives each name its own parameter
        masters_in_optimizer = set_dtypes(model, is_training, self.half, self.config.use_mp_opt)
        mesh = self._mesh(shard_size)
        if self.config.tensor_parallel > 1:
            split_layers(model, mesh[TENSOR])
        options: dict[str, Any] = {
            "mesh": mesh[tuple(name for name in mesh.mesh_dim_names or () if name != TENSOR)],
            "mp_policy": self._precision(masters_in_optimizer),
            "offload_policy": self._offload(is_training),
        }
        for part in units(model):
            fully_shard(part, reshard_after_forward=reshard_after_forward, **options)
        fully_shard(model, reshard_after_forward=True, **options)
        leave_whole(model)
        if self.needs_scale(model):
            self.in_float16.add(model)
        return model

    def _precision(self, masters_in_optimizer: bool) -> MixedPrecisionPolicy:
        if masters_in_optimizer:  # the parameters are in half precision themselves
            return MixedPrecisionPolicy(reduce_dtype=torch.float32)
        if self.half is not None:
            return MixedPrecisionPolicy(param_dtype=self.half, reduce_dtype=torch.float32)
        return MixedPrecisionPolicy()

    def _offload(self, is_training: bool) -> OffloadPolicy:
        if is_training and self.config.fsdp_cpu_offload:
            return CPUOffloadPolicy(pin_memory=self.device.is_gpu)
        return OffloadPolicy()

    def _mesh(self, shard_size: int) -> DeviceMesh:
        """Return the ranks by what they do: those that compute layers together are neighbours."""
        split, together = self.data_ranks if shard_size == -1 else shard_size, self.config.tensor_parallel
        if split < 1 or self.data_ranks % split:
            beside = "" if together == 1 else f" (of {self.world_size}, by {together} that compute layers together)"
            raise BuildError(f"shard_size={split} does not divide {self.data_ranks} ranks{beside}; choose a divisor.")
        sizes = {"replicate": self.data_ranks // split, "shard": split, TENSOR: together}
        held = {name: size for name, size in sizes.items() if size > 1 or name == "shard"}
        shape, kind = tuple(held.values()), self.device.device.type
        if shape not in self._meshes:
            self._meshes[shape] = init_device_mesh(kind, shape, mesh_dim_names=tuple(held))
        return self._meshes[shape]

    def needs_scale(self, model: nn.Module) -> bool:
        """Whether FSDP casts the model's parameters to float16; whoever sharded it."""
        return isinstance(model, FSDPModule) and fsdp_dtype(model) == torch.float16

    @contextmanager
    def unscaling(self, models: Collection[nn.Module], scale: float) -> Iterator[None]:
        """Let FSDP divide by `scale`, too, where it takes the mean of a gradient in float32.

        NCCL alone can divide while it reduces, so FSDP is told to add up and divide afterwards; but not where nothing
        is scattered: there it divides by itself, and would then do it twice.
        """
        groups = [group for model in models for group in fsdp_groups(model)]
        held = [(group.gradient_divide_factor, group.force_sum_reduction_for_comms) for group in groups]
        try:
            for group, (factor, _) in zip(groups, held, strict=True):
                group.gradient_divide_factor = (factor or self.data_ranks) * scale
                group.force_sum_reduction_for_comms = group._reduce_scatter_process_group.size() > 1
            yield
        finally:
            for group, (factor, added_up) in zip(groups, held, strict=True):
                group.gradient_divide_factor, group.force_sum_reduction_for_comms = factor, added_up

    def backward_scale(self, model: nn.Module) -> int:
        """Return by what `backward` multiplies a sum: the ranks over which FSDP averages gradients."""
        return self.data_ranks if isinstance(model, FSDPModule) else 1


def units(model: nn.Module) -> list[nn.Module]:
    """Return the modules to shard as units, inner ones first; `model` itself is not among them.

    A model of `rlbench.nn` says itself which types they are (`non_split_modules`). Any other: the classes named by
    its `_no_split_modules` (transformers) and by `manual_transformer_cls_names_to_wrap`. A part that shares a
    parameter with another one (a tied embedding) stays with the root: sharded apart, the two would no longer be one.
    """
    own = getattr(model, "non_split_modules", None)
    if own is not None:
        parts = [part for part in model.modules() if isinstance(part, tuple(own))]
    else:
        names = {*(getattr(model, "_no_split_modules", None) or ()), *manual_transformer_cls_names_to_wrap}
        parts = [part for part in model.modules() if type(part).__name__ in names]
    total = _holders(model)
    whole = [part for part in parts if all(total[key] == count for key, count in _holders(part).items())]
    return [part for part in reversed(whole) if part is not model]  # modules() gives parents first


def _holders(model: nn.Module) -> Counter[int]:
    """Count the modules that hold each parameter, by the parameter's identity."""
    parameters = (parameter for part in model.modules() for parameter in part._parameters.values())
    return Counter(id(parameter) for parameter in parameters if parameter is not None)


def local_rank(config: StrategyConfig) -> int:
    """Return which GPU of its node this rank takes: `local_rank`, else LOCAL_RANK, else the rank."""
    if config.local_rank >= 0:
        return config.local_rank
    if "LOCAL_RANK" in os.environ:
        return int(os.environ["LOCAL_RANK"])
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))


def join_ranks(device: RankDevice) -> None:
    """Form the process group that `torchrun` describes in the environment, unless there is one."""
    if dist.is_initialized():
        return
    absent = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if absent:
        raise BuildError(
            f"this process is no rank ({absent[0]} is not set): make the strategy in a %%ranks cell or in "
            "train.run(fn), start the script with torchrun, or take get_fake_strategy(args), which needs no ranks."
        )
    share_devices()
    dist.init_process_group(timeout=TIMEOUT, **device.group_arguments())
