"""From modules to what a strategy trains: sharded, filled with their weights, with optimizers that follow."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from rlbench.checkpoint.tensor_files import part_of
from rlbench.errors import BuildError, EngineError
from rlbench.nn.base import with_memory
from rlbench.strategies.flat.units import flat_units
from rlbench.strategies.memory.offloading import HALF
from rlbench.strategies.optim.gradients import full_shape, is_split, local
from rlbench.strategies.optim.optimizer_set import cosine_schedule
from rlbench.strategies.options.config import StrategyConfig
from rlbench.strategies.sharding.materialize import allocate, materialize

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
        self._prepared: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def prepare_model(
        self, model: Any, is_training: bool = False, shard_size: int | str = -1, reshard_after_forward: bool = True
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
        """
        strategy, how = self._strategy, (is_training, shard_size, reshard_after_forward)
        if isinstance(model, list):
            return [self.prepare_model(one, *how) for one in model]
        if isinstance(model, tuple):
            if len(model) > 1 and isinstance(model[0], nn.Module) and isinstance(model[1], torch.optim.Optimizer):
                return (*self._pair(model[0], model[1], shard_size, reshard_after_forward), *model[2:])
            return tuple(self.prepare_model(one, *how) for one in model)
        if not isinstance(model, nn.Module):
            return model
        strategy.need_own(model)
        if model not in self._prepared and (isinstance(model, FSDPModule) or flat_units(model) is not None):
            return model
        with with_memory():  # also where the script is still inside of `init_model_context`
            if model not in self._prepared:
                shards = self._shards(model, is_training, shard_size)
                model = strategy.shard(model, is_training, shards, reshard_after_forward)
                self._prepared.add(model)
            self._fill(model)  # also of one whose weights could not be loaded before
            strategy.filled(model, is_training)
        return model

    def prepare(self, *models_or_model_optim_pairs: Any, is_rlhf: bool = False) -> Any:
        """Prepare models and (model, optimizer) pairs, in one call: of several a list, of one itself.

        `is_rlhf` changes nothing: a pair is one that trains, a model alone one that does not.
        """
        prepared = [self.prepare_model(one) for one in models_or_model_optim_pairs]
        return prepared[0] if len(prepared) == 1 else prepared

    def prepare_models_and_optimizers(
        self,
        actor: nn.Module,
        critic: nn.Module | None,
        reward_models: Any,
        initial_model: nn.Module | None,
        args: Any,
        max_steps: int,
    ) -> tuple[tuple[Any, Any, Any], tuple[Any, Any, Any], Any, Any]:
        """Prepare the models of a policy trainer: (actor, optimizer, scheduler), the critic's, reward models, initial.

        Args:
            critic: trained where `critic_pretrain` is set.
            reward_models: one or several; sharded over up to 8 ranks, where no `remote_rm_url` stands for them.
            args: options as of `StrategyConfig.of`; None: the strategy's own.
            max_steps: of the whole run, over which the rates warm up and fall to a tenth by a cosine.
        """
        config = self._strategy.config if args is None else StrategyConfig.of(args)
        trained = self._trained(actor, config.lr, config, max_steps)
        critics: tuple[Any, Any, Any] = (self.prepare_model(critic), None, None)
        if critic is not None and config.critic_pretrain:
            critics = self._trained(critic, config.critic_lr, config, max_steps)
        if not config.remote_rm_url:
            shards = math.gcd(REWARD_SHARDS, self._strategy.world_size)
            reward_models = self.prepare_model(reward_models, False, shards)
        initial_model = self.prepare_model(initial_model)
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
        prepared = self.prepare_model(model, is_training=True)
        optimizer = self._strategy.create_optimizer(
            prepared, lr=rate, betas=config.betas, weight_decay=config.weight_decay
        )
        return prepared, optimizer, cosine_schedule(optimizer, max_steps, config.lr_warmup_ratio)

    def _shards(self, model: nn.Module, is_training: bool, shard_size: int | str) -> int:
        if isinstance(shard_size, int):
            return shard_size
        if shard_size != "auto":
            raise BuildError(f"shard_size={shard_size!r}: it is a number of ranks, -1 for all, or 'auto'.")
        parameters = sum(parameter.numel() for parameter in model.parameters())
        if is_training or parameters >= AUTO_NODE:
            return -1
        return 1 if parameters < AUTO_WHOLE else math.gcd(REWARD_SHARDS, self._strategy.world_size)

    def _pair(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, shard_size: int | str, reshard: bool
    ) -> ModelOptimPair:
        before = names_by_id(model)
        prepared = self.prepare_model(model, True, shard_size, reshard)
        follow(optimizer, before, prepared)
        return prepared, self._strategy.steps.adopted(optimizer, prepared)

    def _fill(self, model: nn.Module) -> None:
        """Load the weights of a model that was made without memory, each rank its own part."""
        strategy = self._strategy
        if not strategy.is_empty(model):
            return
        source = getattr(model, "name_or_path", None) or None  # of transformers
        if hasattr(model, "materialization_source"):  # of `rlbench.nn`
            source = model.materialization_source()
        if source is None:
            strategy.print(
                f"{type(model).__name__} has no memory and does not say where its weights come from: "
                "strategy.load_ckpt(model, folder) fills it, or define materialization_source()"
            )
            return
        if any(parameter.is_meta for parameter in model.parameters()):
            allocate(model, strategy.weights_device(model))
        strategy.control.together("loading the weights", lambda: materialize(model, source, strategy.seed))
        strategy.note_weights(model)


def set_dtypes(model: nn.Module, is_training: bool, half: torch.dtype | None, use_mp_opt: bool) -> bool:
    """Hold trained parameters in float32, or (`use_mp_opt`) in half precision, in place and keeping ties; return
    whether the latter."""
    in_optimizer = is_training and use_mp_opt
    sources, to = (HALF, torch.float32) if not in_optimizer else ((torch.float32,), torch.bfloat16)
    if is_training and (half is not None or not in_optimizer):
        for parameter in model.parameters():
            if parameter.dtype in sources and parameter.requires_grad:
                parameter.data = parameter.data.to(to)
    return in_optimizer


def names_by_id(model: nn.Module) -> dict[int, str]:
    """Return the name of each parameter, by identity."""
    return {id(parameter): name for name, parameter in model.named_parameters()}


@torch.no_grad()
def follow(optimizer: torch.optim.Optimizer, before: Mapping[int, str], model: nn.Module) -> None:
    """Make an optimizer step the parameters that took the place of those it was made over, when the names of these were
    `before`; its state comes along."""
    after = dict(model.named_parameters())
    for group in optimizer.param_groups:
        need_parameters(group["params"], before, model)
        for place, old in enumerate(group["params"]):
            new = after[before[id(old)]]
            if old in optimizer.state and (new is not old or is_split(new)):
                optimizer.state[new] = {k: _like(v, new) for k, v in optimizer.state.pop(old).items()}
            group["params"][place] = new


def need_parameters(stepped: Iterable[Tensor], names: Mapping[int, str], model: nn.Module) -> None:
    """Refuse an optimizer that steps a parameter which is not among the model's `names_by_id`."""
    for parameter in stepped:
        if id(parameter) not in names:
            raise EngineError(
                f"the optimizer steps a parameter of shape {tuple(parameter.shape)} that {type(model).__name__} does "
                "not have; make it over this model's parameters: prepare the model and call create_optimizer(model)."
            )


def _like(value: Any, new: Tensor) -> Any:
    """Return a state tensor of a whole parameter, sharded as the new one is, and as precise."""
    if not isinstance(value, Tensor) or tuple(value.shape) != full_shape(new):
        return value
    if new.dtype == torch.float32:
        value = value.float()
    if is_split(new):
        return part_of(value, new).clone()
    if not isinstance(new, DTensor):
        return value
    state = distribute_tensor(value, new.device_mesh, new.placements, src_data_rank=None)
    return state if local(state).device == local(new).device else state.to(local(new).device)
