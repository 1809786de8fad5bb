"""The strategy of a module that torch's first FSDP holds: `FullyShardedDataParallel`, over parameters of its own."""

from __future__ import annotations

import weakref
from collections.abc import Collection
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import CustomPolicy

from rlbench.errors import BuildError, EngineError
from rlbench.nn.lora import Adapted
from rlbench.nn.quantised import quantised_layers
from rlbench.strategies.base import StrategyBase
from rlbench.strategies.flat.units import FlatUnits, Policy, flat_units
from rlbench.strategies.fsdp2 import join_ranks, local_rank, units
from rlbench.strategies.memory.device import RankDevice
from rlbench.strategies.options.config import KEEPS_GATHERED, OptionError, need_no_deepspeed, need_what_fsdp1_has
from rlbench.strategies.ranks.control import ControlGroup
from rlbench.strategies.sharding.preparation import set_dtypes


class FSDP1Strategy(StrategyBase):
    """Hold modules by FSDP1 with `use_orig_params`: between two passes a parameter is the row of its numbers that this
    rank has, of one dimension and perhaps empty. Arguments as of `StrategyBase`, ranks as of `FSDPV2Strategy`.

    Checkpoints are those of FSDP2: each goes on from the other's, on any number of ranks. `clip_grad_norm_` of torch
    sees the numbers of this rank alone; `optimizer_step`, and the method of that name of an `FsdpTrainModule`, all.
    """

    def join(self, device: RankDevice | None) -> tuple[RankDevice, ControlGroup]:
        """Join the ranks, unless this process has."""
        need_no_deepspeed(self.config)
        need_what_fsdp1_has(vars(self.config))
        device = device or RankDevice.pick(local_rank(self.config))
        join_ranks(device)
        device.let_scripts_wait()
        self._empty: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._meshes: dict[int, DeviceMesh] = {}  # each has groups of its own
        return device, ControlGroup()

    def shard(
        self, model: nn.Module, is_training: bool = False, shard_size: int = -1, reshard_after_forward: bool = True
    ) -> nn.Module:
        """Split `model` in place and return it. One on meta gets memory, which has no contents yet; arguments as of
        `prepare_model`."""
        if Adapted.of(model) or quantised_layers(model):
            raise BuildError(
                f"{type(model).__name__} has LoRA adapters or a quantised base, which FSDP2 holds and FSDP1 does not: "
                "inherit from Fsdp2TrainModule, or HuggingFaceFsdp2TrainModule"
            )
        if hasattr(model, "tie_weights"):
            model.tie_weights()  # making a module on meta gives each name its own parameter
        set_dtypes(model, is_training, None, use_mp_opt=False)
        if any(parameter.is_meta for parameter in model.parameters()):
            self._empty.add(model)
        if self.half == torch.float16:
            raise BuildError(
                "computing in float16 needs a scaled loss, which FSDP1 does not have here: bf16=True, or False for "
                "float32; or inherit from FSDP2's bases"
            )
        if not reshard_after_forward:
            raise OptionError(KEEPS_GATHERED)
        how = self._sharding(shard_size)
        if self.half is not None:
            how["mixed_precision"] = MixedPrecision(param_dtype=self.half, reduce_dtype=torch.float32)
        FlatUnits(model, wrap_policy(model), self.control, self.device.device, **how)
        return model

    def _sharding(self, shard_size: int) -> dict[str, Any]:
        """Return how FSDP1 is told of the ranks that split parameters, and of those that hold copies."""
        ranks = self.world_size
        split = ranks if shard_size == -1 else shard_size
        if split < 1 or ranks % split:
            raise BuildError(f"shard_size={split} does not divide {ranks} ranks; choose a divisor.")
        if split == 1:
            return {"sharding_strategy": ShardingStrategy.NO_SHARD}
        if split == ranks:
            return {"sharding_strategy": ShardingStrategy.FULL_SHARD}
        if split not in self._meshes:
            shape, names = (ranks // split, split), ("copy", "shard")
            self._meshes[split] = init_device_mesh(self.device.device.type, shape, mesh_dim_names=names)
        mesh = self._meshes[split]
        groups = mesh.get_group("shard"), mesh.get_group("copy")
        return {"sharding_strategy": ShardingStrategy.HYBRID_SHARD, "process_group": groups}

    def is_empty(self, model: nn.Module) -> bool:
        """Whether a model was made without memory, and has no weights yet."""
        return model in self._empty or super().is_empty(model)

    def note_weights(self, model: nn.Module) -> None:
        """Take note that a model has its weights now."""
        self._empty.discard(model)

    def clip_grad_norm_(self, model: nn.Module, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale a held model's gradients down to `max_norm`; return their norm before; collective."""
        held = flat_units(model)
        if held is None:
            return nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type)
        return held.root.clip_grad_norm_(max_norm, norm_type)

    def needs_scale(self, model: nn.Module) -> bool:
        """No: computing in float16 is refused."""
        return False

    def unscaling(self, models: Collection[nn.Module], scale: float) -> nullcontext[None]:
        """Nothing to do."""
        return nullcontext()

    def need_own(self, model: nn.Module) -> None:
        """Refuse a model that FSDP2 holds, whose gradients would be scaled and clipped wrongly."""
        if isinstance(model, FSDPModule):
            raise EngineError(
                f"FSDP2 holds {type(model).__name__}, and the strategy of these ranks is FSDP1's: prepare it by the "
                "rank's own strategy (self.strategy), or build the engine over FSDP2 (executor='fsdp2')"
            )

    def backward_scale(self, model: nn.Module) -> int:
        """Return by what `backward` multiplies a sum: the ranks over which FSDP1 averages gradients."""
        return self.world_size if flat_units(model) is not None else 1


def wrap_policy(model: nn.Module) -> Policy:
    """Return which parts of a model are units: as its `get_fsdp_wrap_policy()` says, else as with FSDP2."""
    asked = getattr(model, "get_fsdp_wrap_policy", None)
    given = asked() if callable(asked) else None
    if given is None:
        return _these(units(model))
    if isinstance(given, set | frozenset | list | tuple) and all(isinstance(one, type) for one in given):
        return _these([part for part in model.modules() if isinstance(part, tuple(given)) and part is not model])
    if callable(given):

        def policy(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
            return bool(given(module=module, recurse=recurse, nonwrapped_numel=nonwrapped_numel)) and (
                recurse or module is not model  # the whole is a unit in any case
            )

        return policy
    if isinstance(given, CustomPolicy):
        return given
    raise BuildError(
        f"get_fsdp_wrap_policy() of {type(model).__name__} returned {type(given).__name__}: it is a set of module "
        "classes, or a wrap policy as FullyShardedDataParallel(auto_wrap_policy=…) takes it"
    )


def _these(parts: list[nn.Module]) -> CustomPolicy:
    chosen = {id(part) for part in parts}
    return CustomPolicy(lambda part: id(part) in chosen)
