"""A trainer from a description: what `session.trainer` and the command line send to every rank.

The actor is the session's own module; the other models are made here, from checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rlbench.checkpoint import rank_state
from rlbench.errors import BuildError, StateError
from rlbench.nn.lora import Adapted
from rlbench.options import OptionError, options_in
from rlbench.rewards.reward_model import model as ClassifierReward
from rlbench.strategies.base import ARGUMENTS
from rlbench.strategies.fsdp2 import FSDPV2Strategy
from rlbench.strategies.generation.session_link import session_of_ranks
from rlbench.strategies.memory import owners as memory
from rlbench.strategies.memory.offloading import kept_on_host
from rlbench.strategies.optim.mp_optimizer import is_mp_optimizer
from rlbench.strategies.optim.optimizer_set import cosine_schedule
from rlbench.strategies.options.config import StrategyConfig, need_fsdp
from rlbench.strategies.sharding.tensor_parallel import split_over
from rlbench.trainers.models.policy_module import BasePolicy, make_policy
from rlbench.trainers.models.policy_spec import PolicySpec
from rlbench.trainers.models.reward_heads import make_reward_model
from rlbench.trainers.models.value_model import make_critic
from rlbench.trainers.options.specs import SessionEngine, TrainerSpec
from rlbench.trainers.ppo.spmd_trainer import SPMDPPOTrainer


def build_trainer(
    module: nn.Module,
    optimizer: Any,
    spec: TrainerSpec,
    half: torch.dtype | None,
    left_loaded: Callable[[], None] = lambda: None,
    replay: bool = False,
) -> Any:
    """The trainer of `spec` around a session's sharded module, which is as it was where that is refused; collective.

    `half`: what the ranks compute in, None: as the weights are held. `left_loaded` is called where a checkpoint was
    (partly) loaded into the module, and the trainer then refused after all: by a stop, or a file that could not be
    read. `replay`: the actor's routers take the experts of the sampler.
    """
    from transformers import AutoTokenizer

    strategy = strategy_of(module, optimizer, spec.options, half)
    strategy.router_replay = replay
    config = strategy.config
    steps, trainer_class = spec.schedule_steps, spec.trainer or SPMDPPOTrainer
    if not issubclass(trainer_class, SPMDPPOTrainer):
        raise BuildError(f"{trainer_class.__name__} is no SPMDPPOTrainer: inherit from it")
    tokenizer = AutoTokenizer.from_pretrained(spec.path)
    with actor_kept_on_failure(module, optimizer):
        critic, critic_optim = _critic(strategy, spec)
        if spec.lr is not None:
            set_rate(optimizer, spec.lr)
        trainer = trainer_class(
            strategy,
            module,
            critic,
            _reward_models(strategy, spec.reward, tokenizer),
            reference_of(strategy, module, spec.path, spec.reference, spec.reference_shard_size),
            _average(strategy, module, spec),
            optimizer,
            critic_optim,
            *(
                cosine_schedule(one, steps, config.lr_warmup_ratio) if one is not None and steps is not None else None
                for one in (optimizer, critic_optim)
            ),
            tokenizer=tokenizer,
            prompts=spec.prompts,
            eval_prompts=spec.eval_prompts,
            loss=spec.loss,
            **spec.arguments,
            **{name: value for name, value in spec.options.items() if name not in options_in(StrategyConfig)},
        )
        strategy.setup_inference_engine(config, config.engine_type, actor=module)
        if trainer.options.ppo.load_checkpoint:
            try:
                trainer.files.load_newest()
            finally:
                if trainer.unsent:
                    left_loaded()
    return trainer


def strategy_of(
    module: nn.Module, optimizer: Any, given: Mapping[str, Any], half: torch.dtype | None
) -> FSDPV2Strategy:
    """Make the strategy of a trainer around a session's module, of those of the given options that are a strategy's."""
    own = {name: value for name, value in given.items() if name in options_in(StrategyConfig)}
    config = StrategyConfig(**{"fsdp": True, **own, **_as_held(module, optimizer, half, own)})
    need_fsdp(config)
    return FSDPV2Strategy(args=config, **{name: getattr(config, name) for name in ARGUMENTS})


def _as_held(module: nn.Module, optimizer: Any, half: torch.dtype | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return how the session's actor is held and computes, as options; refuse others."""
    held: dict[str, Any] = {"use_mp_opt": is_mp_optimizer(optimizer), "fsdp_cpu_offload": kept_on_host(module)}
    held["tensor_parallel"] = split_over(module)
    held |= {"bf16": half == torch.bfloat16, "fp16": half == torch.float16}
    for name, so in held.items():
        if given.get(name, so) != so:
            raise OptionError(
                f"{name}={given[name]} cannot be honoured: the session was made with {name}={so}. Leave it out, or "
                f"make one by rb.Session(…, train=rb.Train({name}={given[name]}))."
            )
    return held


@contextmanager
def put_aside(trainer: Any) -> Iterator[None]:
    """Keep a trainer's models (None: nothing) in host memory while another is built; bring them back if that fails."""
    if trainer is None:
        yield
        return
    strategy, optimizer = trainer.strategy, trainer.critic_optim
    rewards = trainer.reward_model if isinstance(trainer.reward_model, list) else [trainer.reward_model]
    held = [trainer.critic, trainer.initial_model, trainer.ema_model, *rewards]
    here = [model for model in held if isinstance(model, nn.Module) and not strategy.offloaded(model)]
    strategy.offload_model(here)
    moved = 0 if optimizer is None else memory.move_optimizer(optimizer, torch.device("cpu"))
    try:
        yield
    except BaseException:
        strategy.reload_model(here)
        if moved:
            memory.move_optimizer(optimizer, strategy.device.device)
        raise


@contextmanager
def actor_kept_on_failure(module: nn.Module, optimizer: Any) -> Iterator[None]:
    """Bring back learning rates, recomputation of activations and random states where a trainer is refused."""
    names = ("lr", "initial_lr")
    held = [{name: group[name] for name in names if name in group} for group in optimizer.param_groups]
    recomputed, random_state = getattr(module, "is_gradient_checkpointing", False), rank_state.random_state()
    try:
        yield
    except BaseException:
        rank_state.set_random_state(random_state)
        if getattr(module, "is_gradient_checkpointing", False) and not recomputed:
            module.gradient_checkpointing_disable()
        for group, own in zip(optimizer.param_groups, held, strict=True):
            for name in names:
                group.pop(name, None)
            group.update(own)
        raise


def set_rate(optimizer: Any, lr: float) -> None:
    """Give every group one rate; a schedule made later starts from it."""
    for group in optimizer.param_groups:
        group["lr"] = float(lr)
        group.pop("initial_lr", None)


def go_on_from(schedule: Any, rates: Sequence[float]) -> None:
    """Make `rates` (one per group) a schedule's rates now; it goes on from there in proportion. The optimizer's own are
    the caller's."""
    if not isinstance(schedule, torch.optim.lr_scheduler.LambdaLR):
        raise StateError(
            f"the trainer's schedule is a {type(schedule).__name__}, which would write its own rate over "
            f"lr={rates[0]:g}: change trainer.actor_scheduler on the ranks, or make a trainer without it"
        )
    shares = [float(share(schedule.last_epoch)) for share in schedule.lr_lambdas]
    if not all(shares):
        raise StateError(
            f"lr={rates[0]:g}: the trainer's schedule_steps begin at rate 0: set lr after its first step, or make the "
            "trainer with the rate it is to rise to: session.trainer(…, lr=)"
        )
    schedule.base_lrs = [rate / share for rate, share in zip(rates, shares, strict=True)]


def _critic(strategy: FSDPV2Strategy, spec: TrainerSpec) -> tuple[nn.Module | None, Any]:
    if not spec.critic:
        return None, None
    config = strategy.config
    path = spec.path if spec.critic is True else str(spec.critic)
    made = (
        make_critic(path)
        if spec.value_head_prefix is None
        else make_critic(path, value_head_prefix=spec.value_head_prefix)
    )
    critic = strategy.prepare_model(made, is_training=True)
    given = {"lr": config.critic_lr, "betas": config.betas, "weight_decay": config.weight_decay}
    return critic, strategy.create_optimizer(critic, **given)


def reference_of(
    strategy: FSDPV2Strategy,
    actor: nn.Module,
    path: str,
    wanted: str | bool | SessionEngine | None,
    shard_size: int | None = None,
) -> Any:
    """Return the reference policy that is `wanted` (True: of the actor's checkpoint, `path`), or None; `shard_size`:
    ranks over which its parameters are split, None: all."""
    own = wanted in (True, path) and Adapted.of(actor)
    if shard_size is not None and (not wanted or own or isinstance(wanted, SessionEngine)):
        why = (
            "there is none" if not wanted else "it is the actor without its adapters" if own else "the session holds it"
        )
        raise OptionError(f"reference_shard_size={shard_size} would have no effect on the reference: {why}.")
    if not wanted:
        return None
    if own:
        return BasePolicy(actor)
    if isinstance(wanted, SessionEngine):
        return session_of_ranks().reference(strategy, wanted.name)
    place = path if wanted is True else str(wanted)
    model = make_policy(PolicySpec(place, trainable=False))
    return strategy.prepare_model(model, shard_size=-1 if shard_size is None else shard_size)


def _average(strategy: FSDPV2Strategy, actor: nn.Module, spec: TrainerSpec) -> nn.Module | None:
    """Copy the actor as it is now, in float32."""
    if not spec.ema:
        return None
    if Adapted.of(actor):
        raise OptionError(
            "ema=True averages all weights, and this policy trains adapters alone: leave one of them out."
        )
    average = make_policy(PolicySpec(spec.path, trainable=False, dtype="float32")).requires_grad_(True)
    in_float32 = not strategy.config.use_mp_opt  # what trains would be held in half precision
    prepared: nn.Module = strategy.prepare_model(average, is_training=in_float32)
    strategy.moving_average(actor, prepared, beta=0.0, device=strategy.device.device)
    return prepared.requires_grad_(False)


def _reward_models(strategy: FSDPV2Strategy, reward: Any, tokenizer: Any) -> Any:
    """Folders of reward models as models on the ranks, and so those that read what was sampled; the rest as it is."""
    if isinstance(reward, list | tuple):
        return [_reward_models(strategy, one, tokenizer) for one in reward]
    if isinstance(reward, ClassifierReward) and reward.as_sampled and reward.shares_vocabulary(tokenizer):
        return strategy.prepare_model(make_reward_model(str(reward.path)))
    if isinstance(reward, str | Path) and Path(reward).is_dir():
        return strategy.prepare_model(make_reward_model(str(reward)))
    return reward
