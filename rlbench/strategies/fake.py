"""A strategy for one process without ranks: same surface, same arithmetic, no process group, nothing sharded."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from rlbench.strategies.base import StrategyBase
from rlbench.strategies.memory.device import RankDevice
from rlbench.strategies.ranks.control import ControlGroup
from rlbench.strategies.sharding.preparation import set_dtypes


class SoloGroup(ControlGroup):
    """A control group of one: everybody has voted, and there is nobody to gather from."""

    def __init__(self) -> None:
        self.rank, self.world_size, self.group = 0, 1, None


class FakeStrategy(StrategyBase):
    """For tests of what is built on a strategy. Numbers are those of one rank: no method is a stand-in.

    In half precision a prepared model computes under autocast, over the float32 parameters it keeps. `shard_size` and
    `reshard_after_forward` have nothing to act on: one process holds everything.
    """

    def join(self, device: RankDevice | None) -> tuple[RankDevice, ControlGroup]:
        return device or RankDevice.pick(0), SoloGroup()

    def shard(
        self, model: nn.Module, is_training: bool = False, shard_size: int = -1, reshard_after_forward: bool = True
    ) -> nn.Module:
        """Bring a model to the device, in place, and return it."""
        if hasattr(model, "tie_weights"):
            model.tie_weights()
        masters_in_optimizer = set_dtypes(model, is_training, self.half, self.config.use_mp_opt)
        if not any(parameter.is_meta for parameter in model.parameters()):
            model.to(self.device.device)
        if self.half is not None and not masters_in_optimizer:
            _compute_in(self.half, model, self.device.device.type)
            if self.half == torch.float16:
                self.in_float16.add(model)
        return model

    def needs_scale(self, model: nn.Module) -> bool:
        """Whether it was prepared here to compute in float16."""
        return model in self.in_float16

    @contextmanager
    def unscaling(self, models: Collection[nn.Module], scale: float) -> Iterator[None]:
        """Divide each parameter's gradient before it is added to what it has."""
        parameters = {parameter for model in models for parameter in model.parameters() if parameter.requires_grad}
        hooks = [parameter.register_hook(lambda gradient: gradient / scale) for parameter in parameters]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def _compute_in(half: torch.dtype, model: nn.Module, kind: str) -> None:
    """Run the model's forward under autocast."""
    contexts: list[torch.autocast] = []

    def enter(*_: Any) -> None:
        contexts.append(torch.autocast(kind, half))
        contexts[-1].__enter__()

    def leave(*_: Any) -> None:
        contexts.pop().__exit__(None, None, None)

    model.register_forward_pre_hook(enter)
    model.register_forward_hook(leave, always_call=True)
