"""The DeepSpeed strategy: the same surface over ZeRO 1 to 3, after LightRFT's `DeepspeedStrategy`."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlbench.checkpoint.rank_state import State
from rlbench.errors import EngineError
from rlbench.strategies.base import StrategyBase
from rlbench.strategies.fsdp2 import join_ranks, local_rank
from rlbench.strategies.memory.device import RankDevice
from rlbench.strategies.memory.offloading import Offloading
from rlbench.strategies.optim.gradients import is_split
from rlbench.strategies.optim.optimizer_set import Stepped
from rlbench.strategies.ranks.control import ControlGroup
from rlbench.strategies.sharding.preparation import set_dtypes
from rlbench.strategies.steps import Steps
from rlbench.strategies.zero.engine import CopyGroup, Zero, join_deepspeed, zero_of
from rlbench.strategies.zero.settings import check, check_copies, settings, warn_of_hosts
from rlbench.strategies.zero.state import ZeroState


class DeepspeedStrategy(StrategyBase):
    """Train by DeepSpeed's ZeRO (`zero_stage` 1 to 3); arguments as of `StrategyBase`, ranks as of `FSDPV2Strategy`.

    A model stays the object it is: it is called itself, and `backward` and `optimizer_step` know what DeepSpeed holds
    of it, from `create_optimizer` on. With `bf16` or `fp16` it is held in that half precision, and the optimizer steps
    float32 weights that were made of those; in float16 the loss is scaled as with FSDP2, by `LossScale`. `adam_offload`
    keeps these and the optimizer's state in host memory while they are stepped there, by torch's AdamW;
    `fsdp_cpu_offload` the parameters of stage 3 too.

    Checkpoints are those of FSDP2: each strategy goes on from the other's, on any number of ranks. While a model is
    prepared each rank holds it whole once, and so does rank 0's host memory while a checkpoint is written.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.steps = ZeroSteps(self, self._hold)
        self.memory = ZeroOffloading(self.device, adam_offload=False)  # what is offloaded never is on the device

    def join(self, device: RankDevice | None) -> tuple[RankDevice, ControlGroup]:
        """Join the ranks, unless this process has, and let DeepSpeed join them."""
        check(self.config)
        device = device or RankDevice.pick(local_rank(self.config))
        join_ranks(device)
        check_copies(self.config, dist.get_world_size())
        device.let_scripts_wait()
        if not device.is_gpu and dist.get_rank() == 0:
            warn_of_hosts(self.config)
        self._deepspeed = join_deepspeed(device, local_rank(self.config))
        self._copies = CopyGroup(self._deepspeed, self.config.zpg)
        return device, ControlGroup()

    def shard(
        self, model: nn.Module, is_training: bool = False, shard_size: int = -1, reshard_after_forward: bool = True
    ) -> nn.Module:
        """Bring a model to the device, in place, and return it; `filled` and `create_optimizer` split it. How many
        ranks share it is ZeRO's to say: `shard_size` and `reshard_after_forward` have nothing to act on."""
        if hasattr(model, "tie_weights"):
            model.tie_weights()
        set_dtypes(model, is_training, None, use_mp_opt=False)
        if not any(parameter.is_meta for parameter in model.parameters()):
            model.to(self.device.device)
        return model

    def filled(self, model: nn.Module, is_training: bool) -> None:
        """Cast a model that is not trained to what models compute in; stage 3 splits it."""
        if is_training or zero_of(model) is not None or any(parameter.is_meta for parameter in model.parameters()):
            return
        if self.half is not None:
            model.to(self.half)
        if self.config.zero_stage == 3:
            offload = "parameters" if self.config.fsdp_cpu_offload else ""
            self._made(model, None, offload)

    def _hold(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Let DeepSpeed hold a prepared model, and the optimizer over its parameters; collective."""
        offload = "parameters" if self.config.fsdp_cpu_offload else "optimizer" if self.config.adam_offload else ""
        self._made(model, optimizer, offload)

    def _made(self, model: nn.Module, optimizer: torch.optim.Optimizer | None, offload: str) -> Zero:
        made = settings(self.config, self.half, offload, pin=self.device.is_gpu)
        with self._copies.known():
            return Zero(self._deepspeed, model, optimizer, made)

    def needs_scale(self, model: nn.Module) -> bool:
        """Whether DeepSpeed trains it in float16."""
        return self.half == torch.float16 and (zero := zero_of(model)) is not None and zero.optimizer is not None

    def unscaling(self, models: Collection[nn.Module], scale: float) -> nullcontext[None]:
        """Nothing to do: DeepSpeed divides by the scale as it steps."""
        return nullcontext()

    def backward_scale(self, model: nn.Module) -> int:
        """Return by what `backward` multiplies a sum: the ranks over which DeepSpeed averages gradients."""
        return self.world_size if zero_of(model) is not None else 1

    def state_of(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, scheduler: Any = None
    ) -> State:
        """Return the state of a model, whole where DeepSpeed holds it split."""
        plain = super().state_of(model, optimizer, scheduler)
        zero = zero_of(model)
        if zero is None:
            return plain
        if optimizer is not None and optimizer is not zero.optimizer:
            raise EngineError(
                f"the optimizer is not the one that DeepSpeed steps {type(model).__name__} with: give that of "
                "strategy.create_optimizer(model)."
            )
        return ZeroState(model, plain.optimizers, plain.schedulers, plain.losses, zero)

    def moving_average(
        self, model: nn.Module, model_ema: nn.Module, beta: float = 0.992, device: torch.device | str = "cpu"
    ) -> None:
        """Move `model_ema` towards `model`; see `Offloading.moving_average`. A model that ZeRO 3 has split is whole on
        each rank meanwhile."""
        with self._whole(model), self._whole(model_ema, changed=True):
            super().moving_average(model, model_ema, beta, device)

    def _whole(self, model: nn.Module, changed: bool = False) -> Any:
        split = [parameter for parameter in model.parameters() if is_split(parameter)]
        if not split:
            return nullcontext()
        return self._deepspeed.zero.GatheredParameters(split, modifier_rank=0 if changed else None)


class ZeroSteps(Steps):
    """Steps of models that DeepSpeed holds, once `hold(model, optimizer)` has given them to it."""

    def __init__(self, strategy: StrategyBase, hold: Callable[[nn.Module, torch.optim.Optimizer], None]) -> None:
        super().__init__(strategy)
        self._hold = hold

    def adopted(self, optimizer: torch.optim.Optimizer, model: nn.Module) -> torch.optim.Optimizer:
        """Give model and optimizer to DeepSpeed; the optimizer's groups hold its flat tensors from then on."""
        if (zero := zero_of(model)) is not None:
            raise EngineError(
                f"{type(model).__name__} has its optimizer: DeepSpeed holds {'both' if zero.optimizer else 'it'}, and "
                "cannot take another one. Prepare the model anew."
            )
        self._hold(model, optimizer)
        return optimizer

    def _add_gradients(
        self, scaled: Tensor, model: nn.Module, optimizer: torch.optim.Optimizer | None, **kwargs: Any
    ) -> None:
        if (zero := zero_of(model)) is None or zero.optimizer is None:
            raise EngineError(
                f"{type(model).__name__} has no optimizer: with DeepSpeed strategy.create_optimizer(model) comes "
                "before the first backward, as it says where gradients go."
            )
        zero.backward(scaled.float(), self.loss_scale(model), **kwargs)

    def _clip_and_step(self, optimizer: Stepped, model: nn.Module, limit: float) -> float:
        zero = zero_of(model)
        if zero is None or optimizer is not zero.optimizer:
            raise EngineError(
                f"this is not the optimizer of {type(model).__name__}; strategy.create_optimizer(model) makes it."
            )
        return float(self._step(partial(zero.step, limit)))

    def forget_gradients(self, model: nn.Module) -> bool:
        """Drop the gradients of a model that wait for a step, and the count of them; return whether there were any."""
        if (zero := zero_of(model)) is None:
            return super().forget_gradients(model)
        self._calls.pop(model, None)
        return zero.forget()


class ZeroOffloading(Offloading):
    """Offloading of models, some of which DeepSpeed holds and moves itself."""

    def _move_model(self, model: nn.Module, to: torch.device) -> int:
        zero = zero_of(model)
        if zero is None or not self._device.is_gpu:
            return super()._move_model(model, to)
        before = self._device.allocated()["cuda"]
        if to.type == "cpu":
            zero.engine.offload_states()
        else:
            zero.engine.reload_states()
        return abs(before - self._device.allocated()["cuda"])
