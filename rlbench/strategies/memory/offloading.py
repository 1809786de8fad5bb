"""Which of a strategy's models and optimizers are on the device: offloading in pairs, measured, and checked.

On a host without a GPU the device is host memory: nothing moves there, but what was offloaded must be loaded again
before it is used, so that a program tried there is right on a GPU too.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.tensor import DTensor

from rlbench.checkpoint.flat_parts import flat_part
from rlbench.checkpoint.tensor_files import part_of
from rlbench.errors import EngineError, StateError
from rlbench.strategies.flat.units import flat_units
from rlbench.strategies.internals import fsdp_groups, is_fsdp_root
from rlbench.strategies.memory import owners as memory
from rlbench.strategies.memory.device import RankDevice
from rlbench.strategies.optim.gradients import gathered, keeper_of, local

HALF = (torch.float16, torch.bfloat16)
HOST = torch.device("cpu")
_AWAY: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
"""Optimizers whose state a strategy of this process has offloaded: a trainer's is another one than its engine's."""


class Offloading:
    """Of a strategy: the models and optimizers that it sends to host memory and brings back."""

    def __init__(self, device: RankDevice, adam_offload: bool) -> None:
        self._device, self._adam_offload = device, adam_offload
        self._absent: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()

    def maybe_offload_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Move optimizer state to host memory if `adam_offload` is set, and return the optimizer; a step with it raises
        until `maybe_load_optimizer`."""
        if self._adam_offload:
            memory.move_optimizer(optimizer, HOST)
            self._device.release_cache()
            _AWAY.add(optimizer)
        return optimizer

    def maybe_load_optimizer(
        self, optimizer: torch.optim.Optimizer, device: torch.device | str | int | None = None
    ) -> torch.optim.Optimizer:
        """Move optimizer state to `device` (None: the rank's own) if `adam_offload` is set, or another strategy sent it
        away; return the optimizer."""
        if self._adam_offload or self.optimizer_away(optimizer):
            memory.move_optimizer(optimizer, self._device.device if device is None else torch.device(device))
            _AWAY.discard(optimizer)
        return optimizer

    def optimizer_away(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether its state was offloaded, by whichever strategy of this process, and is not back."""
        return optimizer in _AWAY

    def need_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse to step with state that is not where the parameters are."""
        if self.optimizer_away(optimizer):
            raise StateError(
                "the optimizer's state is offloaded; call strategy.maybe_load_optimizer(optimizer) before the step, "
                "and maybe_offload_optimizer(optimizer) after it."
            )

    def weights_device(self, model: nn.Module) -> torch.device:
        """Return where a prepared model's parameters belong: the host, with `fsdp_cpu_offload`."""
        return HOST if kept_on_host(model) else self._device.device

    def offload_model(self, models: Any) -> int:
        """Move models to host memory, so that the next one finds room; return the bytes that moved.

        Args:
            models: one, or a list; what is no module (a remote reward model, None) is passed over.
        """
        moved = 0
        for model in _modules(models):
            if model not in self._absent:
                reshard(model)
                moved += self._move_model(model, HOST)
                self._absent[model] = model.register_forward_pre_hook(_refuse_forward, prepend=True)
        self._device.release_cache()
        return moved

    def reload_model(self, models: Any) -> int:
        """Move offloaded models back to the device; return the bytes that moved."""
        moved = 0
        for model in _modules(models):
            if hook := self._absent.pop(model, None):
                hook.remove()
                moved += self._move_model(model, self._device.device)
        return moved

    def offloaded(self, model: nn.Module) -> bool:
        """Whether `offload_model` sent it away and `reload_model` has not brought it back."""
        return model in self._absent

    def _move_model(self, model: nn.Module, to: torch.device) -> int:
        if not self._device.is_gpu or kept_on_host(model):
            return 0  # it is in host memory anyway
        need_movable(model)
        tensors = [*memory.weight_tensors(model), *model.buffers()]
        nbytes = memory.nbytes(tensor for tensor in tensors if tensor.device.type != to.type)
        model.to(to)
        return nbytes

    @torch.no_grad()
    def moving_average(
        self, model: nn.Module, model_ema: nn.Module, beta: float = 0.992, device: torch.device | str = "cpu"
    ) -> None:
        """Move `model_ema` towards `model`: ema = beta * ema + (1 - beta) * model. Buffers are copied.

        Args:
            model: sharded or not.
            model_ema: of the same parameters; sharded alike (nothing is sent then), otherwise, or not at all. In half
                precision it is refused: 1 - beta of a difference rounds to nothing there.
            beta: share of the old average.
            device: where it is computed, in float32. The average stays where its parameters are.
        """
        parameters, averages = dict(model.named_parameters()), dict(model_ema.named_parameters())
        if differ := sorted(parameters.keys() ^ averages.keys()):
            raise EngineError(f"model_ema has other parameters than the model; first {differ[0]}.")
        for name, average in averages.items():
            if average.dtype in HALF:
                raise EngineError(
                    f"model_ema is in {str(average.dtype).removeprefix('torch.')} ({name}), where an average of "
                    f"beta={beta} stands still; strategy.prepare_model(model_ema, is_training=True) holds float32."
                )
        for name, average in averages.items():
            new = _sharded_as(parameters[name], average).to(device=device, dtype=torch.float32)
            own = local(average.detach())
            own.copy_(own.to(device).mul(beta).add_(new, alpha=1.0 - beta))
        for buffer, average in zip(model.buffers(), model_ema.buffers(), strict=True):
            average.copy_(buffer)


def _modules(models: Any) -> list[nn.Module]:
    several = models if isinstance(models, list | tuple) else [models]
    return [model for model in several if isinstance(model, nn.Module)]


def holds_gradients(model: nn.Module) -> bool:
    """Whether gradients wait on a model; its parameters are shards afterwards, as gathered ones do not show theirs."""
    if (keeper := keeper_of(model)) is not None:
        return bool(keeper.waiting)
    reshard(model)
    return any(parameter.grad is not None for parameter in model.parameters())


def reshard(model: nn.Module) -> None:
    """Free every gathered parameter, and forget the pass it was gathered for: one that ended early leaves marks by
    which the next would gather and reduce in another order than on ranks where it did not."""
    if (flat := flat_units(model)) is not None:
        flat.leave_pass()
    waiting = [model]
    while waiting:
        part = waiting.pop()
        if isinstance(part, FSDPModule) and is_fsdp_root(part):
            part.reset_iter_state()  # of all that is in it
            continue
        if isinstance(part, FSDPModule):
            part.reshard()
        waiting += part.children()


def need_movable(model: nn.Module) -> None:
    """Refuse to move the weights of a module off a GPU that FSDP1 holds."""
    if flat_units(model) is not None:
        raise StateError(
            f"the weights of {type(model).__name__} cannot be moved off their GPU: FSDP1 would go on looking for them "
            "there. Move the optimizer alone, release the weights (meta()), or inherit from FSDP2's bases"
        )


def kept_on_host(model: nn.Module) -> bool:
    """Whether FSDP keeps the weights in host memory and brings each layer's when it is needed."""
    return any(isinstance(group.offload_policy, CPUOffloadPolicy) for group in fsdp_groups(model))


def _refuse_forward(model: nn.Module, _: Any) -> None:
    raise StateError(
        f"{type(model).__name__} is offloaded; call strategy.reload_model(model) before it computes, and "
        "offload_model(model) after it."
    )


def _sharded_as(tensor: Tensor, like: Tensor) -> Tensor:
    """Return this rank's part of `tensor` as `like` is sharded; collective where the two differ."""
    part = flat_part(tensor)
    if part is not None and part == flat_part(like):
        return tensor
    if part is not None:
        tensor = gathered(tensor)
    if isinstance(tensor, DTensor):
        if isinstance(like, DTensor) and (tensor.device_mesh, tensor.placements) == (like.device_mesh, like.placements):
            return tensor.to_local()
        tensor = tensor.full_tensor()
    return part_of(tensor, like)
