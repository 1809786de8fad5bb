"""A strategy for one process without ranks: same surface, same arithmetic, no process group, nothing sharded."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn

from rlbench.strategies.base import StrategyBase
from rlbench.strategies.memory.device import RankDevice
from rlbench.strategies.options.config import StrategyConfig
from rlbench.strategies.ranks.control import ControlGroup
from rlbench.strategies.sharding.preparation import set_dtypes


class SoloGroup(ControlGroup):
    """A control group of one: everybody has voted, and there is nobody to gather from."""

    def __init__(self) -> None:
        self.rank, self.world_size, self.group = 0, 1, None


class FakeStrategy(StrategyBase):
    """For tests of what is built on a strategy. Numbers are those of one rank: no method is a stand-in.

    With `bf16` a prepared model computes under autocast, over the float32 parameters it keeps. `shard_size` and
    `reshard_after_forward` have nothing to act on: one process holds everything.

    Args:
        seed, max_norm, micro_train_batch_size, train_batch_size, bf16, args: as of `FSDPV2Strategy`.
        device: "auto": a GPU where there is one; "cpu" or "cuda".
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
        device: str = "auto",
    ) -> None:
        super().__init__(
            seed,
            max_norm,
            micro_train_batch_size,
            train_batch_size,
            bf16,
            args,
            device=RankDevice.pick(0, device),
            control=SoloGroup(),
        )
        self._prepared: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def shard(
        self, model: nn.Module, is_training: bool = False, shard_size: int = -1, reshard_after_forward: bool = True
    ) -> nn.Module:
        """Bring a model to the device, in place, and return it."""
        if model in self._prepared:
            return model
        self._prepared.add(model)
        if hasattr(model, "tie_weights"):
            model.tie_weights()
        masters_in_optimizer = set_dtypes(model, is_training, self.bf16, self.config.use_mp_opt)
        if not any(parameter.is_meta for parameter in model.parameters()):
            model.to(self.device.device)
        if self.bf16 and not masters_in_optimizer:
            _compute_in_bfloat16(model, self.device.device.type)
        return model


def _compute_in_bfloat16(model: nn.Module, kind: str) -> None:
    """Run the model's forward under autocast."""
    contexts: list[torch.autocast] = []

    def enter(*_: Any) -> None:
        contexts.append(torch.autocast(kind, torch.bfloat16))
        contexts[-1].__enter__()

    def leave(*_: Any) -> None:
        contexts.pop().__exit__(None, None, None)

    model.register_forward_pre_hook(enter)
    model.register_forward_hook(leave, always_call=True)


def get_fake_strategy(args: Any = None) -> FakeStrategy:
    """A strategy for tests, from the same options as `get_strategy` takes; needs no ranks, joins no group."""
    config = StrategyConfig.of(args)
    strategy = FakeStrategy(
        seed=config.seed,
        max_norm=config.max_norm,
        micro_train_batch_size=config.micro_train_batch_size,
        train_batch_size=config.train_batch_size,
        bf16=config.bf16,
        args=config if args is None else args,
    )
    strategy.set_seed()
    return strategy
