"""The surface that trainers and notebooks program against, whatever shards the models below it.

A strategy has components, one a file: `checkpoints`, `preparation`, `generation`; still inherited is what ranks say to
each other (`rank_side`), stepping (`step_side`), memory (`memory_side`). The reference system's names are methods here,
which hand on to them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from rlbench.strategies.checkpoints import MODEL, Checkpoints, state_of
from rlbench.strategies.config import OptionError, StrategyConfig, accumulation_steps
from rlbench.strategies.control import ControlGroup
from rlbench.strategies.device import RankDevice
from rlbench.strategies.facade import attribute, delegated
from rlbench.strategies.generation import Generation
from rlbench.strategies.preparation import Preparation
from rlbench.strategies.step_side import StepSide

ARGUMENTS = {"seed": 42, "max_norm": 0.0, "micro_train_batch_size": 1, "train_batch_size": 1, "bf16": True}
"""Options that are arguments of a strategy, too, and their defaults there."""


class StrategyBase(StepSide, ABC):
    """What every strategy does; `shard` says how.

    Args:
        seed, max_norm, micro_train_batch_size, train_batch_size, bf16: see `FSDPV2Strategy`. One at its default is as
            `args` say it.
        args: namespace, mapping, `StrategyConfig`, path of a YAML file, or None; see `StrategyConfig.of`.
        device: of this rank.
        control: the group through which ranks agree.

    Attributes:
        args: what was given.
        config: every option, with its default where none was given.
        rank, world_size: of this process.

    Raises:
        OptionError: an argument and `args` say two things.
    """

    def __init__(
        self,
        seed: int,
        max_norm: float,
        micro_train_batch_size: int,
        train_batch_size: int,
        bf16: bool,
        args: Any,
        *,
        device: RankDevice,
        control: ControlGroup,
    ) -> None:
        own: dict[str, Any] = {
            "seed": seed,
            "max_norm": max_norm,
            "micro_train_batch_size": micro_train_batch_size,
            "train_batch_size": train_batch_size,
            "bf16": bf16,
        }
        self.args = args
        self.config, own = _settled(args, own)
        self.seed: int = own["seed"]
        self.max_norm: float = own["max_norm"]
        self.bf16: bool = own["bf16"]
        self.micro_train_batch_size: int = own["micro_train_batch_size"]
        self.train_batch_size: int = own["train_batch_size"]
        self.device = device
        self.control = control
        self.rank = control.rank
        self.world_size = control.world_size
        self.accumulation = 1  # train_batch_size=1, the default, asks for none
        if self.train_batch_size != 1:
            self.accumulation = accumulation_steps(self.train_batch_size, self.micro_train_batch_size, self.world_size)
        self.checkpoints = Checkpoints(self)
        self.preparation = Preparation(self)
        self.generation = Generation(self)
        self._start_memory()
        self._start_steps()

    @abstractmethod
    def shard(
        self, model: nn.Module, is_training: bool = False, shard_size: int = -1, reshard_after_forward: bool = True
    ) -> nn.Module:
        """Bring one module into the form the strategy computes with, in place, and return it."""

    setup_inference_engine = delegated("generation", Generation.setup_inference_engine)
    gather_and_generate = delegated("generation", Generation.gather_and_generate)
    update_engine_weights = delegated("generation", Generation.update_engine_weights)
    maybe_sleep_inference_engine = delegated("generation", Generation.maybe_sleep_inference_engine)
    wakeup_inference_engine = delegated("generation", Generation.wakeup_inference_engine)
    inference_engine = property(lambda self: self.generation.inference_engine, doc=Generation.inference_engine.__doc__)
    inference_engine_status = property(
        lambda self: self.generation.inference_engine_status, doc=Generation.inference_engine_status.__doc__
    )
    generate_calls = attribute("generation.calls", "How many calls of `gather_and_generate` were completed.")

    @contextmanager
    def init_model_context(self, meta_init: bool = False) -> Iterator[None]:
        """Make models inside.

        Args:
            meta_init: parameters get no memory until `prepare_model` loads them shard by shard (or `load_ckpt`
                does).
                Buffers are real: a constructor computes them, and no checkpoint brings them back.
        """
        from rlbench.nn import device

        try:
            if meta_init:
                with device("meta"):
                    yield
            else:
                yield
        finally:
            self.report_memory("Finished init_model_context")

    # -- preparing

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
        return self.preparation.model(model, is_training, shard_size, reshard_after_forward)

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
        config = self.config if args is None else StrategyConfig.of(args)
        return self.preparation.models_and_optimizers(actor, critic, reward_models, initial_model, config, max_steps)

    def prepare_reward_model(
        self, reward_model: nn.Module, args: Any = None, max_steps: int = int(1e8)
    ) -> tuple[Any, Any, Any]:
        """Prepare a reward model for training, as `prepare_models_and_optimizers` does the actor."""
        config = self.config if args is None else StrategyConfig.of(args)
        return self.preparation.trained(reward_model, config.actor_learning_rate, config, max_steps)

    # -- checkpoints: every method is collective

    def save_ckpt(
        self,
        model: nn.Module,
        save_dir: str,
        tag: str | None = None,
        max_num: int | None = 3,
        max_mem: float | None = 1000,
        client_state: Mapping[str, Any] = {},
        save_latest: bool = True,
        optimizer: torch.optim.Optimizer | None = None,
        scheduler: Any = None,
    ) -> str:
        """Write a checkpoint of a model, loadable with any number of ranks, and return its folder.

        Gradients that wait for a step are not part of it. The random states of the ranks are.

        Args:
            model: its parameters and buffers.
            save_dir: folder of checkpoints, of this model alone.
            tag: name of this one; one of the same name is replaced once the new one is whole. None:
                `global_step<N>`, one more than the highest there.
            max_num, max_mem: checkpoints and gigabytes (10^9 bytes) to keep; the oldest are removed once the new
                one is whole. Whatever else lies in `save_dir` is left alone. None: no limit.
            client_state: plain values (of rank 0) that `load_ckpt` gives back.
            save_latest: `load_ckpt(model, save_dir)` takes this one from now on.
            optimizer, scheduler: kept too, if given.

        Raises:
            CheckpointError: no room, no right to write, a bad tag, or values that could not be read again. What was
                there before is as it was.
        """
        states = {MODEL: state_of(model, optimizer, scheduler)}
        return self.checkpoints.save(
            save_dir, states, tag, client_state, latest=save_latest, max_num=max_num, max_mem=max_mem
        )

    def load_ckpt(
        self,
        model: nn.Module,
        load_dir: str,
        optimizer: torch.optim.Optimizer | None = None,
        scheduler: Any = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
    ) -> tuple[str, dict[str, Any]]:
        """Bring a model to a checkpoint of `save_ckpt`, whatever number of ranks wrote it.

        Gradients that wait for a step are dropped. With an optimizer to load, and as many ranks as wrote it, the
        random states come back too, so that training goes on as if it had not stopped. Of a trainer's checkpoint this
        is the actor.

        Args:
            model: prepared or not; one without memory gets it.
            load_dir: a checkpoint, or the folder of several: then the newest that was saved with `save_latest`, else
                the newest.
            optimizer, scheduler: to load, if given.
            load_module_strict: False: load the parameters that both have, and print which only one has.
            load_optimizer_states, load_lr_scheduler_states: False: leave the optimizer, or the scheduler, as it is.

        Returns:
            The checkpoint's folder, and the `client_state` it was saved with.

        Raises:
            CheckpointError: none there, damaged, of another model, or without what was asked for; found before
                anything is changed.
        """
        wanted = optimizer if load_optimizer_states else None, scheduler if load_lr_scheduler_states else None
        states = {MODEL: state_of(model, *wanted)}
        opened = self.checkpoints.open(load_dir, states, load_module_strict)
        self.checkpoints.load(opened, states)
        return str(opened.folder), dict(opened.client_state)

    def save_model(self, model: nn.Module, tokenizer: Any, output_dir: str, **kwargs: Any) -> None:
        """Write a folder that transformers and vLLM load: weights, config, tokenizer. Rank 0 writes it.

        Args:
            model: of transformers (or a PEFT model of one: its adapter is written), or a wrapper whose `model` is
                that; sharded or not. It is gathered to rank 0's host memory, one parameter at a time.
            tokenizer: saved beside it; None: not.
            output_dir: made if it is not there; files of an earlier save are replaced once the new ones are whole.
            kwargs: of `save_pretrained` (`max_shard_size`, …).

        Raises:
            CheckpointError: no transformers model, or no room.
        """
        self.checkpoints.export(model, tokenizer, output_dir, kwargs)


def _settled(args: Any, arguments: Mapping[str, Any]) -> tuple[StrategyConfig, dict[str, Any]]:
    """The options and the arguments of a strategy, each as the other says it where it does not itself.

    Raises:
        OptionError: they say two things.
    """
    config = StrategyConfig.of(args)
    overridden = config.overridden()
    said = args if isinstance(args, Mapping) else overridden
    settled = dict(arguments)
    for name, value in arguments.items():
        if value == ARGUMENTS[name] and name in said:
            settled[name] = getattr(config, name)
        elif name in overridden and getattr(config, name) != value:
            raise OptionError(f"{name}={value!r}, and {name}={getattr(config, name)!r} in args: give it once.")
    own = {name: value for name, value in arguments.items() if value != ARGUMENTS[name]}
    return replace(config, **own), settled
