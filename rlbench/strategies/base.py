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

from torch import nn

from rlbench.strategies.checkpoints import Checkpoints
from rlbench.strategies.facade import attribute, delegated
from rlbench.strategies.generation.engine import Generation
from rlbench.strategies.memory.device import RankDevice
from rlbench.strategies.options.config import OptionError, StrategyConfig, accumulation_steps
from rlbench.strategies.ranks.control import ControlGroup
from rlbench.strategies.sharding.preparation import Preparation
from rlbench.strategies.surface.step_side import StepSide

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

    prepare_model = delegated("preparation", Preparation.prepare_model)
    prepare_models_and_optimizers = delegated("preparation", Preparation.prepare_models_and_optimizers)
    prepare_reward_model = delegated("preparation", Preparation.prepare_reward_model)
    save_ckpt = delegated("checkpoints", Checkpoints.save_ckpt)
    load_ckpt = delegated("checkpoints", Checkpoints.load_ckpt)
    save_model = delegated("checkpoints", Checkpoints.save_model)
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
