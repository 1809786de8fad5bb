"""A trainer from a description: what `session.trainer` and the command line send to every rank.

The actor is the session's own module; critic, reference, average and reward models are made here, from checkpoints, and
prepared by a strategy with the trainer's options.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rlbench.checkpoint import rank_state
from rlbench.errors import BuildError, StateError
from rlbench.options import OptionError, options_in
from rlbench.strategies.fsdp2 import FSDPV2Strategy
from rlbench.strategies.generation.session_link import session_of_ranks
from rlbench.strategies.memory import owners as memory
from rlbench.strategies.optim.learning_rate import cosine_schedule
from rlbench.strategies.optim.mp_optimizer import is_mp_optimizer
from rlbench.strategies.options.config import StrategyConfig, need_fsdp
from rlbench.strategies.surface.memory_side import kept_on_host
from rlbench.trainers.models.policy_module import make_policy
from rlbench.trainers.models.policy_spec import PolicySpec
from rlbench.trainers.models.reward_heads import make_reward_model
from rlbench.trainers.models.value_model import make_critic
from rlbench.trainers.ppo.spmd_trainer import SPMDPPOTrainer

OF_THE_CRITIC = ("critic_pretrain", "critic_lr", "betas", "weight_decay")
"""Options that act on the critic's optimizer alone, as the policy's is the session's."""


@dataclass(frozen=True)
class SessionEngine:
    """An engine of the session, by its name there, in the place of a folder."""

    name: str


@dataclass(frozen=True)
class TrainerSpec:
    """A trainer to be built on the ranks of a session.

    Attributes:
        path: folder of the actor's checkpoint, with its tokenizer; where critic and reference come from unless said.
        options: of `StrategyConfig` and `PPOConfig`, by name.
        trainer: the class, `SPMDPPOTrainer` or a subclass of it; None: that.
        critic: folder of the critic's checkpoint; True: `path`; None: no critic.
        reference: folder of the reference policy's; True: `path`; the session's own; None: none.
        ema: keep a moving average of the actor.
        reward: see `PPOTrainer.reward_model`; a folder is that of a reward model.
        lr: learning rate; None: the actor's stays as it is.
        schedule_steps: optimizer steps over which the rates warm up and fall by a cosine; None: they stay.
        prompts, eval_prompts, loss, arguments: of the trainer.

    Raises:
        OptionError: an option that would have no effect.
    """

    path: str
    options: Mapping[str, Any] = field(default_factory=dict)
    trainer: type | None = None
    critic: str | bool | None = None
    reference: str | bool | SessionEngine | None = None
    ema: bool = False
    reward: Any = None
    lr: float | None = None
    schedule_steps: int | None = None
    prompts: Any = None
    eval_prompts: Any = None
    loss: Any = None
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        unread: dict[str, str] = {}
        if not self.critic:
            unread |= {name: "there is no critic" for name in self.options if name in OF_THE_CRITIC}
        if self.schedule_steps is None and "lr_warmup_ratio" in self.options:
            unread["lr_warmup_ratio"] = "the rates stay: give schedule_steps, too"
        for name, why in unread.items():
            raise OptionError(f"{name}={self.options[name]!r} would have no effect: {why}.")


def build_trainer(
    module: nn.Module, optimizer: Any, spec: TrainerSpec, bf16: bool, left_loaded: Callable[[], None] = lambda: None
) -> Any:
    """The trainer of `spec` around a session's module, which is as it was where that is refused; collective.

    Args:
        module: sharded.
        optimizer: its own.
        bf16: what the ranks compute in.
        left_loaded: called where a checkpoint was (partly) loaded into the module, and the trainer then refused after
            all: by a stop, or a file that could not be read.

    Raises:
        OptionError, BuildError: what cannot be honoured or made; alike on all ranks.
    """
    from transformers import AutoTokenizer

    strategys = {name: value for name, value in spec.options.items() if name in options_in(StrategyConfig)}
    config = StrategyConfig(**{"fsdp": True, **strategys, **_as_held(module, optimizer, bf16, strategys)})
    need_fsdp(config)
    strategy = FSDPV2Strategy(
        seed=config.seed,
        max_norm=config.max_norm,
        micro_train_batch_size=config.micro_train_batch_size,
        train_batch_size=config.train_batch_size,
        bf16=bf16,
        args=config,
    )
    trainer_class = spec.trainer or SPMDPPOTrainer
    if not issubclass(trainer_class, SPMDPPOTrainer):
        raise BuildError(f"{trainer_class.__name__} is no SPMDPPOTrainer: inherit from it")
    with _actor_kept_on_failure(module, optimizer):
        critic, critic_optim = _critic(strategy, spec)
        if spec.lr is not None:
            set_rate(optimizer, spec.lr)
        trainer = trainer_class(
            strategy,
            module,
            critic,
            _reward_models(strategy, spec.reward),
            _reference(strategy, spec),
            _average(strategy, module, spec),
            optimizer,
            critic_optim,
            _schedule(optimizer, spec, config),
            None if critic_optim is None else _schedule(critic_optim, spec, config),
            tokenizer=AutoTokenizer.from_pretrained(spec.path),
            prompts=spec.prompts,
            eval_prompts=spec.eval_prompts,
            loss=spec.loss,
            **spec.arguments,
            **{name: value for name, value in spec.options.items() if name not in strategys},
        )
        strategy.setup_inference_engine(config, config.engine_type, actor=module)
        if trainer.options.ppo.load_checkpoint:
            try:
                trainer.files.load_newest()
            finally:
                if trainer.unsent:
                    left_loaded()
    return trainer


def _as_held(module: nn.Module, optimizer: Any, bf16: bool, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return how the session's actor is held and computes, as options; refuse others."""
    held = {"use_mp_opt": is_mp_optimizer(optimizer), "fsdp_cpu_offload": kept_on_host(module), "bf16": bf16}
    for name, so in held.items():
        if given.get(name, so) != so:
            raise OptionError(
                f"{name}={given[name]} cannot be honoured: how the actor is held and computes is said when the session "
                f"is made, and this one was made with {name}={so}. Make it by rb.Session(…, "
                f"train=rb.Train({name}={given[name]})), or leave it out."
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
def _actor_kept_on_failure(module: nn.Module, optimizer: Any) -> Iterator[None]:
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


def _schedule(optimizer: Any, spec: TrainerSpec, config: StrategyConfig) -> Any:
    if spec.schedule_steps is None:
        return None
    return cosine_schedule(optimizer, spec.schedule_steps, config.lr_warmup_ratio)


def go_on_from(schedule: Any, rates: Sequence[float]) -> None:
    """Make `rates` (one per group) a schedule's rates now; it goes on from there in proportion. The optimizer's own are
    the caller's.

    Raises:
        StateError: the schedule is at 0 here whatever its rate is, or of a kind that multiplies none. Nothing changed.
    """
    if not isinstance(schedule, torch.optim.lr_scheduler.LambdaLR):
        raise StateError(
            f"the trainer's schedule is a {type(schedule).__name__}, which would write its own rate over "
            f"lr={rates[0]:g} after the next step: change trainer.actor_scheduler on the ranks, or make a trainer "
            "without it"
        )
    shares = [float(share(schedule.last_epoch)) for share in schedule.lr_lambdas]
    if not all(shares):
        raise StateError(
            f"lr={rates[0]:g}: the trainer's schedule_steps begin at rate 0, so there is nothing to go on from before "
            "its first step: set lr after that, or make the trainer with the rate it is to rise to: "
            "session.trainer(…, lr=)"
        )
    schedule.base_lrs = [rate / share for rate, share in zip(rates, shares, strict=True)]


def _critic(strategy: FSDPV2Strategy, spec: TrainerSpec) -> tuple[nn.Module | None, Any]:
    if not spec.critic:
        return None, None
    path = spec.path if spec.critic is True else str(spec.critic)
    critic = strategy.prepare_model(make_critic(path), is_training=True)
    return critic, strategy.create_optimizer(
        critic, lr=strategy.config.critic_lr, betas=strategy.config.betas, weight_decay=strategy.config.weight_decay
    )


def _reference(strategy: FSDPV2Strategy, spec: TrainerSpec) -> Any:
    if not spec.reference:
        return None
    if isinstance(spec.reference, SessionEngine):
        return session_of_ranks().reference(strategy, spec.reference.name)
    path = spec.path if spec.reference is True else str(spec.reference)
    return strategy.prepare_model(make_policy(PolicySpec(path, trainable=False)))


def _average(strategy: FSDPV2Strategy, actor: nn.Module, spec: TrainerSpec) -> nn.Module | None:
    """Copy the actor as it is now, in float32."""
    if not spec.ema:
        return None
    average = make_policy(PolicySpec(spec.path, trainable=False, dtype="float32")).requires_grad_(True)
    in_float32 = not strategy.config.use_mp_opt  # what trains would be held in half precision
    prepared: nn.Module = strategy.prepare_model(average, is_training=in_float32)
    strategy.moving_average(actor, prepared, beta=0.0, device=strategy.device.device)
    return prepared.requires_grad_(False)


def _reward_models(strategy: FSDPV2Strategy, reward: Any) -> Any:
    """Folders of reward models as models on the ranks; the rest as it is."""
    if isinstance(reward, list | tuple):
        return [_reward_models(strategy, one) for one in reward]
    if isinstance(reward, str | Path) and Path(reward).is_dir():
        return strategy.prepare_model(make_reward_model(str(reward)))
    return reward
