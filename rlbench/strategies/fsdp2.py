"""The FSDP2 strategy: one object between a module's methods and torch on a rank.

Surface after LightRFT's `FSDPV2Strategy`; what it does beside sharding is in `base` and its sides.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from rlbench.errors import BuildError
from rlbench.strategies.base import StrategyBase
from rlbench.strategies.memory.device import RankDevice
from rlbench.strategies.optim.mp_optimizer import FSDPadaptOptimizer, is_mp_optimizer
from rlbench.strategies.options.config import StrategyConfig
from rlbench.strategies.ranks.control import ControlGroup
from rlbench.strategies.sharding.preparation import ModelOptimPair, ModelOrModelOptimPair, set_dtypes
from rlbench.strategies.sharding.wrapping import manual_transformer_cls_names_to_wrap, units
from rlbench.strategies.surface.step_side import StepResult

__all__ = [
    "FSDPV2Strategy",
    "FSDPadaptOptimizer",
    "ModelOptimPair",
    "ModelOrModelOptimPair",
    "StepResult",
    "is_mp_optimizer",
    "manual_transformer_cls_names_to_wrap",
]

TIMEOUT = timedelta(minutes=60)


class FSDPV2Strategy(StrategyBase):
    """Shard a module, make its optimizer, scale its losses, step it, move it, keep it.

    Args:
        seed: of `set_seed` and of initialisers.
        max_norm: global gradient norm above which gradients are scaled down; 0 means no clipping.
        micro_train_batch_size: sequences one rank takes through one backward.
        train_batch_size: sequences of one optimizer step over all ranks; the quotient is the accumulation. 1, the
            default, asks for none.
        bf16: compute in bfloat16 over float32 shards, with gradients reduced in float32.
        args: further options by name, see `StrategyConfig`: `adam_offload`, `fsdp_cpu_offload`, `use_mp_opt`, …
        device: of this rank; by default the GPU that `local_rank` names, or the host.

    The process group is the one there is (on the ranks of an engine); else it is joined as `torchrun` says.

    Example:
        strategy = FSDPV2Strategy(max_norm=1.0, micro_train_batch_size=2, train_batch_size=16)
        model = strategy.prepare_model(model, is_training=True)
        optimizer = strategy.create_optimizer(model, lr=1e-5)
        strategy.backward(loss, model, optimizer)
        strategy.optimizer_step(optimizer, model, scheduler, name="actor")
    """

    def __init__(
        self,
        seed: int = 42,
        max_norm: float = 0.0,
        micro_train_batch_size: int = 1,
        train_batch_size: int = 1,
        bf16: bool = True,
        args: Any = None,
        *,
        device: RankDevice | None = None,
    ) -> None:
        config = StrategyConfig.of(args)
        device = device or RankDevice.pick(local_rank(config))
        join_ranks(device)
        device.let_scripts_wait()
        super().__init__(
            seed,
            max_norm,
            micro_train_batch_size,
            train_batch_size,
            bf16,
            args,
            device=device,
            control=ControlGroup(),
        )

    # -- preparing -------------------------------------------------------------------------------------------

    def shard(
        self,
        model: nn.Module,
        is_training: bool = False,
        shard_size: int = -1,
        reshard_after_forward: bool = True,
    ) -> nn.Module:
        """Shard `model` in place and return it. It may still be on meta, and stays there; arguments as of
        `prepare_model`.

        The root is always freed after its forward: a gathered root left by a forward without backward would be used
        again, stale, after the next optimizer step.
        """
        if hasattr(model, "tie_weights"):
            model.tie_weights()  # making a module on meta gives each name its own parameter
        masters_in_optimizer = set_dtypes(model, is_training, self.bf16, self.config.use_mp_opt)
        options: dict[str, Any] = {
            "mesh": self._mesh(shard_size),
            "mp_policy": self._precision(masters_in_optimizer),
            "offload_policy": self._offload(is_training),
        }
        for part in units(model):
            fully_shard(part, reshard_after_forward=reshard_after_forward, **options)
        fully_shard(model, reshard_after_forward=True, **options)
        return model

    def _precision(self, masters_in_optimizer: bool) -> MixedPrecisionPolicy:
        if masters_in_optimizer:  # the parameters are in half precision themselves
            return MixedPrecisionPolicy(reduce_dtype=torch.float32)
        if self.bf16:
            return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        return MixedPrecisionPolicy()

    def _offload(self, is_training: bool) -> OffloadPolicy:
        if is_training and self.config.fsdp_cpu_offload:
            return CPUOffloadPolicy(pin_memory=self.device.is_gpu)
        return OffloadPolicy()

    def _mesh(self, shard_size: int) -> DeviceMesh:
        kind = self.device.device.type
        if shard_size in (-1, self.world_size):
            return init_device_mesh(kind, (self.world_size,), mesh_dim_names=("shard",))
        if shard_size < 1 or self.world_size % shard_size:
            raise BuildError(f"shard_size={shard_size} does not divide {self.world_size} ranks; choose a divisor.")
        shape = (self.world_size // shard_size, shard_size)
        return init_device_mesh(kind, shape, mesh_dim_names=("replicate", "shard"))

    # -- training --------------------------------------------------------------------------------------------

    def backward_scale(self, model: nn.Module) -> int:
        """By what `backward` multiplies a sum: the ranks over which FSDP averages gradients."""
        return self.world_size if isinstance(model, FSDPModule) else 1


def local_rank(config: StrategyConfig) -> int:
    """Which GPU of its node this rank takes: `local_rank`, else LOCAL_RANK, else the rank."""
    if config.local_rank >= 0:
        return config.local_rank
    if "LOCAL_RANK" in os.environ:
        return int(os.environ["LOCAL_RANK"])
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))


def join_ranks(device: RankDevice) -> None:
    """Form the process group that `torchrun` describes in the environment, unless there is one.

    Raises:
        BuildError: neither.
    """
    if dist.is_initialized():
        return
    absent = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if absent:
        raise BuildError(
            f"this process is no rank ({absent[0]} is not set): make the strategy in a %%ranks cell or in "
            "train.run(fn), start the script with torchrun, or take get_fake_strategy(args), which needs no ranks."
        )
    dist.init_process_group(device.backend, timeout=TIMEOUT)
