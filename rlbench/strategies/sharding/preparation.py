"""From modules to what a strategy trains: sharded, filled with their weights, with optimizers that follow."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from rlbench.errors import BuildError
from rlbench.strategies.optim.groups import follow, names_by_id
from rlbench.strategies.optim.learning_rate import cosine_schedule
from rlbench.strategies.optim.mp_optimizer import FSDPadaptOptimizer
from rlbench.strategies.options.config import StrategyConfig
from rlbench.strategies.sharding.materialize import allocate, materialize
from rlbench.strategies.surface.memory_side import HALF

if TYPE_CHECKING:
    from rlbench.strategies.base import StrategyBase

ModelOptimPair = tuple[nn.Module, torch.optim.Optimizer]
ModelOrModelOptimPair = nn.Module | ModelOptimPair

REWARD_SHARDS = 8
AUTO_WHOLE, AUTO_NODE = 10 * 10**9, 80 * 10**9  # parameters; below, an untrained model is whole, or over 8 ranks


class Preparation:
    """Prepares the models of a strategy; every method is collective."""

    def __init__(self, strategy: StrategyBase) -> None:
        self._strategy = strategy

    def prepare_model(
        self,
        model: Any,
        is_training: bool = False,
        shard_size: int | str = -1,
        reshard_after_forward: bool = True,
    ) -> Any:
        """Shard a model in place and return it; one without memory gets its weights.

        Args:
            model: a module; a pair (module, optimizer), prepared for training, whose optimizer then steps the
                sharded parameters; a list or tuple of such; None and what is no module (a remote reward model) come
                back as they are, and so does a module that is prepared already.
            is_training: hold half-precision parameters in float32, which small updates need (with `use_mp_opt`: the
                other way round, the optimizer holds float32 copies).
            shard_size: ranks the parameters are sharded over; the others hold replicas. -1: all ranks. "auto": all
                for a trained model; else 1 below 10 billion parameters, 8 below 80, all beyond.
            reshard_after_forward: free gathered layers after their forward; False holds them until the backward,
                which saves gathering them again.

        Returns:
            What was given, prepared. A tuple stays a tuple.

        Raises:
            BuildError: a shard size that does not divide the ranks, or weights that do not fit.
        """
        strategy, how = self._strategy, (is_training, shard_size, reshard_after_forward)
        if isinstance(model, list):
            return [self.prepare_model(one, *how) for one in model]
        if isinstance(model, tuple):
            if len(model) > 1 and isinstance(model[0], nn.Module) and isinstance(model[1], torch.optim.Optimizer):
                return (*self._pair(model[0], model[1], shard_size, reshard_after_forward), *model[2:])
            return tuple(self.prepare_model(one, *how) for one in model)
        if not isinstance(model, nn.Module) or isinstance(model, FSDPModule):
            return model
        shards = self._shards(model, is_training, shard_size)
        sharded = strategy.shard(model, is_training, shards, reshard_after_forward)
        self._fill(sharded)
        return sharded

    def prepare_models_and_optimizers(
        self,
        actor: nn.Module,
        critic: nn.Module | None,
        reward_models: Any,
        initial_model: nn.Module | None,
        args: Any,
        max_steps: int,
    ) -> tuple[tuple[Any, Any, Any], tuple[Any, Any, Any], Any, Any]:
        """Prepare all models of a policy trainer; optimizers and schedulers for those that train.

        Args:
            actor: trained.
            critic: trained if `critic_pretrain` is set; None: there is none.
            reward_models: one or several; sharded over up to 8 ranks, unless `remote_rm_url` is set.
            initial_model: the reference, not trained; None: there is none.
            args: options as of `StrategyConfig.of`; None: the strategy's own.
            max_steps: optimizer steps of the whole run, over which the rates warm up and fall to a tenth by a
                cosine.

        Returns:
            (actor, optimizer, scheduler), (critic, optimizer, scheduler), reward models, initial model.
        """
        config = self._strategy.config if args is None else StrategyConfig.of(args)
        trained = self._trained(actor, config.lr, config, max_steps)
        critics: tuple[Any, Any, Any] = (self._frozen(critic), None, None)
        if critic is not None and config.critic_pretrain:
            critics = self._trained(critic, config.critic_lr, config, max_steps)
        if not config.remote_rm_url:
            reward_models = self._frozen(reward_models, math.gcd(REWARD_SHARDS, self._strategy.world_size))
        initial_model = self._frozen(initial_model)
        self._strategy.sync_and_clear_cache()
        return trained, critics, reward_models, initial_model

    def prepare_reward_model(
        self, reward_model: nn.Module, args: Any = None, max_steps: int = int(1e8)
    ) -> tuple[Any, Any, Any]:
        """Prepare a reward model for training, as `prepare_models_and_optimizers` does the actor."""
        config = self._strategy.config if args is None else StrategyConfig.of(args)
        return self._trained(reward_model, config.lr, config, max_steps)

    def _trained(
        self, model: nn.Module, rate: float, config: StrategyConfig, max_steps: int
    ) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        """Prepare a model with its optimizer and a cosine schedule over `max_steps`."""
        prepared = self.prepare_model(model, True, -1, True)
        optimizer = self._strategy.create_optimizer(
            prepared, lr=rate, betas=config.betas, weight_decay=config.weight_decay
        )
        return prepared, optimizer, cosine_schedule(optimizer, max_steps, config.lr_warmup_ratio)

    def _frozen(self, model: Any, shard_size: int = -1) -> Any:
        return self.prepare_model(model, False, shard_size, True)

    def _pair(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, shard_size: int | str, reshard: bool
    ) -> ModelOptimPair:
        before = names_by_id(model)
        prepared = self.prepare_model(model, True, shard_size, reshard)
        follow(optimizer, before, prepared)
        if self._strategy.config.use_mp_opt and not isinstance(optimizer, FSDPadaptOptimizer):
            optimizer = FSDPadaptOptimizer(optimizer)
        return prepared, optimizer

    def _shards(self, model: nn.Module, is_training: bool, shard_size: int | str) -> int:
        if isinstance(shard_size, int):
            return shard_size
        if shard_size != "auto":
            raise BuildError(f"shard_size={shard_size!r}: it is a number of ranks, -1 for all, or 'auto'.")
        parameters = sum(parameter.numel() for parameter in model.parameters())
        if is_training or parameters >= AUTO_NODE:
            return -1
        return 1 if parameters < AUTO_WHOLE else math.gcd(REWARD_SHARDS, self._strategy.world_size)

    def _fill(self, model: nn.Module) -> None:
        """Load the weights of a model that was made without memory, each rank its own part."""
        strategy = self._strategy
        if not any(parameter.is_meta for parameter in model.parameters()):
            return
        source = _source_of(model)
        if source is None:
            strategy.print(
                f"{type(model).__name__} has no memory and does not say where its weights come from: "
                "strategy.load_ckpt(model, folder) fills it, or define materialization_source()"
            )
            return
        allocate(model, strategy.weights_device(model))
        strategy.control.together("loading the weights", lambda: materialize(model, source, strategy.seed))


def set_dtypes(model: nn.Module, is_training: bool, bf16: bool, use_mp_opt: bool) -> bool:
    """Hold trained parameters in float32, or (`use_mp_opt`) in half precision; returns whether the latter.

    In place and keeping ties; buffers stay as they are.
    """
    in_optimizer = is_training and use_mp_opt
    sources, to = (HALF, torch.float32) if not in_optimizer else ((torch.float32,), torch.bfloat16)
    if is_training and (bf16 or not in_optimizer):
        for parameter in model.parameters():
            if parameter.dtype in sources and parameter.requires_grad:
                parameter.data = parameter.data.to(to)
    return in_optimizer


def _source_of(model: nn.Module) -> Any:
    """Return where a model's weights come from, if it says so: our bases by their hook, transformers' by its path."""
    if hasattr(model, "materialization_source"):
        return model.materialization_source()
    return getattr(model, "name_or_path", None) or None
