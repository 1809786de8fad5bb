"""The FSDP2 strategy: one object between a module's methods and torch on a rank.

Surface after LightRFT's `FSDPV2Strategy`. One rule of gradient scale: `backward` is the only place that
scales a loss. With `reduction="mean"` (a user's own loss, a mean over the rank's data) it divides by the
accumulation steps and FSDP averages over ranks. With `reduction="sum"` the loss is this rank's term of a
sum that is already normalised over the whole optimizer step: nothing is divided, and FSDP's mean over ranks
is undone.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, TypedDict

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from rlbench.errors import BuildError, EngineError, nearest
from rlbench.strategies import memory
from rlbench.strategies.control import ControlGroup
from rlbench.strategies.device import RankDevice
from rlbench.strategies.gradients import global_norm, scale_gradients

HALF = (torch.float16, torch.bfloat16)
KNOWN_ARGS = ("adam_offload",)


class StepResult(TypedDict):
    """What `optimizer_step` did. `grad_norm` is that before clipping, None where gradients still
    accumulate."""

    stepped: bool
    grad_norm: float | None
    skipped: str | None


class FSDPV2Strategy:
    """Shard a module, make its optimizer, scale its losses, step it, move it.

    Args:
        seed: of `set_seed` and of initialisers.
        max_norm: global gradient norm above which gradients are scaled down; 0 means no clipping.
        micro_train_batch_size: sequences one rank takes through one backward.
        train_batch_size: sequences of one optimizer step over all ranks; the quotient is the accumulation.
        bf16: compute in bfloat16 over float32 shards, with gradients reduced in float32.
        args: mapping or namespace; `adam_offload`: `maybe_offload_optimizer` moves optimizer state to the
            host.
        device: of this rank; the process group must be there.
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
        self.seed = seed
        self.max_norm = max_norm
        self.bf16 = bf16
        self.micro_train_batch_size = micro_train_batch_size
        self.train_batch_size = train_batch_size
        self.args = dict(args) if isinstance(args, Mapping) else dict(vars(args)) if args is not None else {}
        self.device = device or RankDevice.pick(dist.get_rank())
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.control = ControlGroup()
        self._calls: defaultdict[str, int] = defaultdict(int)
        unknown = [name for name in self.args if name not in KNOWN_ARGS]
        if unknown:
            raise BuildError(f"the strategy has no option {unknown[0]!r}{nearest(unknown[0], KNOWN_ARGS)}.")
        self.accumulation = self._accumulation()

    def _accumulation(self) -> int:
        """Backward calls per optimizer step and rank."""
        per_pass = self.micro_train_batch_size * self.world_size
        if self.train_batch_size <= self.micro_train_batch_size:
            return 1
        if self.train_batch_size % per_pass:
            raise BuildError(
                f"train_batch_size={self.train_batch_size} is not a multiple of micro_train_batch_size x "
                f"ranks ({self.micro_train_batch_size} x {self.world_size}); change one of them."
            )
        return self.train_batch_size // per_pass

    # -- preparing -------------------------------------------------------------------------------------------

    def prepare_model(
        self,
        model: nn.Module,
        is_training: bool = False,
        shard_size: int = -1,
        reshard_after_forward: bool = True,
    ) -> nn.Module:
        """Shard `model` in place and return it. It may still be on meta.

        Args:
            model: `non_split_modules`, if it has that, names the types gathered as one unit.
            is_training: keep half-precision parameters as float32 masters, which small updates need.
            shard_size: ranks the parameters are sharded over; the others hold replicas. -1: all ranks.
            reshard_after_forward: free gathered layers after their forward; False holds them until the
                backward. The root is always freed: a gathered root left by a forward without backward would
                be used again,
                stale, after the next optimizer step.
        """
        if hasattr(model, "tie_weights"):
            model.tie_weights()  # making a module on meta gives each name its own parameter
        if is_training:
            _to_float32_masters(model)
        mesh = self._mesh(shard_size)
        policy = MixedPrecisionPolicy()
        if self.bf16:
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        units = tuple(getattr(model, "non_split_modules", ()))
        for module in list(model.modules()) if units else []:
            if isinstance(module, units) and module is not model:
                fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward)
        fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
        return model

    def _mesh(self, shard_size: int) -> DeviceMesh:
        kind = self.device.device.type
        if shard_size in (-1, self.world_size):
            return init_device_mesh(kind, (self.world_size,), mesh_dim_names=("shard",))
        if shard_size < 1 or self.world_size % shard_size:
            raise BuildError(
                f"shard_size={shard_size} does not divide {self.world_size} ranks; choose a divisor."
            )
        shape = (self.world_size // shard_size, shard_size)
        return init_device_mesh(kind, shape, mesh_dim_names=("replicate", "shard"))

    def create_optimizer(self, model: nn.Module, **kwargs: Any) -> torch.optim.AdamW:
        """AdamW over the trainable parameters, grouped by dtype, shard size and weight decay.

        Args:
            model: sharded or not.
            kwargs: AdamW's (`lr`, `betas`, `eps`, …). `weight_decay` (default 0.01) spares biases and norms
                (one dimension). `fused` defaults to True: one kernel per group, exact, and the fastest on
                CPU too.
        """
        decay = float(kwargs.pop("weight_decay", 0.01))
        groups: defaultdict[tuple[Any, ...], list[nn.Parameter]] = defaultdict(list)
        for parameter in model.parameters():
            if parameter.requires_grad:
                shards = parameter.device_mesh.size() if isinstance(parameter, DTensor) else 1
                groups[parameter.dtype, shards, decay if parameter.dim() > 1 else 0.0].append(parameter)
        if not groups:
            raise EngineError(
                f"{type(model).__name__} has no trainable parameter; set requires_grad on some first."
            )
        grouped = [{"params": params, "weight_decay": own} for (_, _, own), params in groups.items()]
        return torch.optim.AdamW(grouped, **{"fused": True, **kwargs})

    # -- training --------------------------------------------------------------------------------------------

    def backward(
        self, loss: Tensor, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, *,
        reduction: str = "mean",
    ) -> None:  # fmt: skip
        """Add the gradients of `loss`. `reduction` is described at the top of this module."""
        if reduction == "mean":
            (loss / self.accumulation).backward()
        elif reduction == "sum":
            (loss * self._averaging_ranks(model)).backward()
        else:
            raise EngineError(f"reduction={reduction!r}: it is 'mean' or 'sum'.")

    def _averaging_ranks(self, model: nn.Module) -> int:
        """Ranks over which FSDP averages gradients."""
        return self.world_size if isinstance(model, FSDPModule) else 1

    def optimizer_step(
        self, optimizer: torch.optim.Optimizer, model: nn.Module, scheduler: Any = None, name: str = "model"
    ) -> StepResult:
        """Step optimizer and scheduler with every accumulation-th call of this `name`; clip before."""
        self._calls[name] += 1
        if self._calls[name] % self.accumulation:
            return StepResult(stepped=False, grad_norm=None, skipped=None)
        return self.step_now(optimizer, model, scheduler)

    def step_now(
        self,
        optimizer: torch.optim.Optimizer,
        model: nn.Module,
        scheduler: Any = None,
        max_norm: float | None = None,
    ) -> StepResult:
        """Clip (to `max_norm`, by default the strategy's), step and clear the gradients, whatever has
        accumulated.

        A norm that is not finite clears the gradients and leaves parameters and optimizer untouched; the
        result says so.
        """
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        norm = global_norm(parameters)
        if not math.isfinite(norm):
            optimizer.zero_grad(set_to_none=True)
            reason = (
                f"the gradient norm is {norm}; gradients were cleared, parameters and optimizer are untouched"
            )
            self.print(f"optimizer step skipped: {reason}")
            return StepResult(stepped=False, grad_norm=norm, skipped=reason)
        limit = self.max_norm if max_norm is None else max_norm
        if limit > 0 and norm > limit:
            scale_gradients(parameters, limit / norm)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        optimizer.zero_grad(set_to_none=True)
        return StepResult(stepped=True, grad_norm=norm, skipped=None)

    # -- memory ----------------------------------------------------------------------------------------------

    def maybe_offload_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Move optimizer state to the host if `adam_offload` is set; on a CPU host it is there already."""
        if self.args.get("adam_offload"):
            self.offload_optimizer(optimizer)
        return optimizer

    def maybe_load_optimizer(
        self, optimizer: torch.optim.Optimizer, device: torch.device | None = None
    ) -> torch.optim.Optimizer:
        """Move optimizer state back to the device (the rank's own by default) if `adam_offload` is set."""
        if self.args.get("adam_offload"):
            memory.move_optimizer(optimizer, device or self.device.device)
        return optimizer

    def offload_optimizer(self, optimizer: torch.optim.Optimizer) -> int:
        """Move optimizer state to the host; return the bytes that moved."""
        moved = memory.move_optimizer(optimizer, torch.device("cpu"))
        self.device.release_cache()
        return moved

    def report_memory(self, prefix: str = "") -> dict[str, int]:
        """Print (rank 0) and return what this process holds, in bytes."""
        found = self.device.allocated()
        said = ", ".join(f"{name} {size / 2**20:,.0f} MiB" for name, size in found.items())
        self.print(f"{prefix + ': ' if prefix else ''}{said}")
        return found

    # -- ranks -----------------------------------------------------------------------------------------------

    def is_rank_0(self) -> bool:
        """True on the first rank."""
        return self.rank == 0

    def print(self, *values: Any) -> None:
        """Print on rank 0 alone."""
        if self.is_rank_0():
            print(*values)

    def set_seed(self, seed: int | None = None) -> None:
        """Seed torch, numpy and random alike on all ranks."""
        import numpy as np

        chosen = self.seed if seed is None else seed
        random.seed(chosen)
        np.random.seed(chosen % 2**32)
        torch.manual_seed(chosen)

    def all_reduce(self, data: Tensor | float, op: str = "mean") -> Tensor | float:
        """Reduce a number or tensor over all ranks: "mean", "sum", "max" or "min"; collective."""
        if op not in ("mean", "sum", "max", "min"):
            raise EngineError(f"op={op!r}: all_reduce knows mean, sum, max and min.")
        tensor = data.detach().clone() if isinstance(data, Tensor) else torch.tensor(float(data))
        tensor = tensor.to(self.device.device)
        dist.all_reduce(tensor, op=getattr(dist.ReduceOp, "SUM" if op == "mean" else op.upper()))
        if op == "mean":
            tensor = tensor / self.world_size
        return tensor.to(data.device) if isinstance(data, Tensor) else float(tensor)

    def all_gather(self, data: Tensor | float) -> Tensor | list[float]:
        """Join equal-shaped tensors of all ranks along the first dimension, or numbers into a list;
        collective."""
        tensor = data.detach() if isinstance(data, Tensor) else torch.tensor([float(data)])
        tensor = tensor.to(self.device.device).contiguous()
        parts = [torch.empty_like(tensor) for _ in range(self.world_size)]
        dist.all_gather(parts, tensor)
        if isinstance(data, Tensor):
            return torch.cat(parts).to(data.device)
        return [float(part) for part in parts]


def _to_float32_masters(model: nn.Module) -> None:
    """Turn half-precision parameters into float32 ones, in place and keeping ties; buffers stay as they
    are."""
    for parameter in model.parameters():
        if parameter.dtype in HALF and parameter.requires_grad:
            parameter.data = parameter.data.float()
