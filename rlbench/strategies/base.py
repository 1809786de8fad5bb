"""The surface that trainers and notebooks program against, whatever shards the models below it.

A strategy has components with one owner each; the reference system's names stand here and hand on to them.
"""

from __future__ import annotations

import functools
import gc
import random
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from datetime import datetime
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np
import psutil
import torch
from torch import nn

from rlbench.checkpoint.rank_state import State, loss_states_of
from rlbench.defaults import precision
from rlbench.nn import device as made_on
from rlbench.strategies.checkpoints import Checkpoints
from rlbench.strategies.flat.units import need_unflat
from rlbench.strategies.generation.engine import EngineStatus, Generation
from rlbench.strategies.memory.device import RankDevice
from rlbench.strategies.memory.offloading import Offloading
from rlbench.strategies.options.config import OptionError, StrategyConfig, accumulation_steps, need_groups
from rlbench.strategies.ranks.control import Collectives, ControlGroup
from rlbench.strategies.ranks.loading import Loading
from rlbench.strategies.ranks.rows import RowGroup
from rlbench.strategies.ranks.sequence import SequenceGroup
from rlbench.strategies.sharding.preparation import Preparation
from rlbench.strategies.steps import Steps
from rlbench.weights.memory import return_free_memory

P = ParamSpec("P")
R = TypeVar("R")
ARGUMENTS = {"seed": 42, "max_norm": 0.0, "micro_train_batch_size": 1, "train_batch_size": 1, "bf16": True}
"""Options that are arguments of a strategy, too, and their defaults there."""
GB = 1e9


def arguments_of(config: Any) -> dict[str, Any]:
    """Return the values of `ARGUMENTS` in a config."""
    return {name: getattr(config, name) for name in ARGUMENTS}


def delegated(part: str, method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    """Make a method of a strategy that calls `method` of its component `part`, with its signature and docstring."""

    @functools.wraps(method)
    def call(self: Any, *args: P.args, **kwargs: P.kwargs) -> R:
        return getattr(getattr(self, part), method.__name__)(*args, **kwargs)

    return call


class StrategyBase(ABC):
    """What every strategy does; `shard` says how.

    Args:
        seed: of `set_seed` and of initialisers.
        max_norm: global gradient norm above which gradients are scaled down; 0 means no clipping.
        micro_train_batch_size: sequences one rank takes through one backward.
        train_batch_size: sequences of one optimizer step over all ranks; the quotient is the accumulation. 1, the
            default, asks for none.
        bf16: compute in bfloat16 over float32 parameters, with gradients reduced in float32. `fp16` of `args` takes its
            place: float16, with a loss that `backward` scales and gradients that are seen unscaled.
        args: further options: namespace, mapping, `StrategyConfig`, path of a YAML file, or None. What they say counts
            for an argument above that has its default; two different values are refused.
        device: of this rank; None: the strategy chooses.

    Attributes:
        config: every option, with its default where none was given.
        in_float16: the models that were prepared here to compute in float16.
        half: what models compute in: `torch.bfloat16`, `torch.float16`, or None: as they are held.
        rank, world_size: of this process.
        data_rank, data_ranks: the same, ranks that compute layers together (`tensor_parallel`) counted as one: over
            these a script's data is split, and gradients are their mean.
        rows: the ranks that see the same rows in the passes of a policy; `sequence`: those of them that split tokens.
        accumulation: backward calls of one optimizer step on each rank.
        generate_calls: how many calls of `gather_and_generate` were completed. The next one's seeds derive from it, so
            a run that goes on from a checkpoint sets it to what it was.
        router_replay: whether the routers of a trainer's actor take the experts that its samples bring.
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
        device: RankDevice | None = None,
    ) -> None:
        given = (seed, max_norm, micro_train_batch_size, train_batch_size, bf16)
        self.args = args
        self.config, own = _settled(args, dict(zip(ARGUMENTS, given, strict=True)))
        self.seed: int = own["seed"]
        self.max_norm: float = own["max_norm"]
        self.micro_train_batch_size: int = own["micro_train_batch_size"]
        self.train_batch_size: int = own["train_batch_size"]
        self.device, self.control = self.join(device)
        chosen = precision(self.device.capability, "float32", bf16=own["bf16"], fp16=self.config.fp16)
        self.half: torch.dtype | None = None if chosen.half is None else getattr(torch, chosen.half)
        self.in_float16: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self.rank, self.world_size = self.control.rank, self.control.world_size
        need_groups(self.config, self.world_size)
        together = self.config.tensor_parallel
        self.data_rank, self.data_ranks = self.rank // together, self.world_size // together
        self.sequence = SequenceGroup.of(self.control, self.config.sequence_parallel)
        self.rows = self.sequence if together == 1 else RowGroup.of(self.control, together)
        self.accumulation = 1
        if self.train_batch_size != 1:
            self.accumulation = accumulation_steps(self.train_batch_size, self.micro_train_batch_size, self.data_ranks)
        self.generate_calls = 0
        self.router_replay = False
        self.collectives = Collectives(self.control, self.device.device)
        self.memory = Offloading(self.device, self.config.adam_offload)
        self.steps = Steps(self)
        self.preparation, self.loading = Preparation(self), Loading(self)
        self.generation = Generation(self)
        self.checkpoints = Checkpoints(self)

    @abstractmethod
    def join(self, device: RankDevice | None) -> tuple[RankDevice, ControlGroup]:
        """Take a place among the ranks: the device of this one, and the group through which they agree."""

    @abstractmethod
    def shard(
        self, model: nn.Module, is_training: bool = False, shard_size: int = -1, reshard_after_forward: bool = True
    ) -> nn.Module:
        """Bring one module into the form the strategy computes with, in place, and return it."""

    @abstractmethod
    def needs_scale(self, model: nn.Module) -> bool:
        """Whether a model computes in float16 over other parameters, so that `backward` scales its loss."""

    @abstractmethod
    def unscaling(self, models: Collection[nn.Module], scale: float) -> AbstractContextManager[None]:
        """Divide by `scale` what a backward inside adds to the gradients of these models."""

    def is_empty(self, model: nn.Module) -> bool:
        """Whether a model has no weights yet."""
        return any(parameter.is_meta for parameter in model.parameters())

    def note_weights(self, model: nn.Module) -> None:
        """Take note that a model has its weights now."""
        return None

    def filled(self, model: nn.Module, is_training: bool) -> None:
        """Take note of a model that was prepared and has its weights; collective."""
        return None

    def state_of(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, scheduler: Any = None
    ) -> State:
        """Return the state of a model with what is trained beside it, the states of losses with the optimizer's; None:
        nothing is."""
        optimizers = {} if optimizer is None else {"optimizer": optimizer}
        losses = {} if optimizer is None else loss_states_of(model)
        return State(model, optimizers, {} if scheduler is None else {"scheduler": scheduler}, losses)

    def need_own(self, model: nn.Module) -> None:
        """Refuse a model that another strategy holds."""
        need_unflat(model)

    def backward_scale(self, model: nn.Module) -> int:
        """Return by what `backward` multiplies a sum: the ranks over which gradients are averaged."""
        return 1

    all_reduce = delegated("collectives", Collectives.all_reduce)
    all_gather = delegated("collectives", Collectives.all_gather)
    barrier = delegated("collectives", Collectives.barrier)
    setup_dataloader = delegated("loading", Loading.setup_dataloader)
    prepare = delegated("preparation", Preparation.prepare)
    prepare_model = delegated("preparation", Preparation.prepare_model)
    prepare_models_and_optimizers = delegated("preparation", Preparation.prepare_models_and_optimizers)
    prepare_reward_model = delegated("preparation", Preparation.prepare_reward_model)
    create_optimizer = delegated("steps", Steps.create_optimizer)
    backward = delegated("steps", Steps.backward)
    optimizer_step = delegated("steps", Steps.optimizer_step)
    step_now = delegated("steps", Steps.step_now)
    loss_scale = delegated("steps", Steps.loss_scale)
    forget_gradients = delegated("steps", Steps.forget_gradients)
    maybe_offload_optimizer = delegated("memory", Offloading.maybe_offload_optimizer)
    maybe_load_optimizer = delegated("memory", Offloading.maybe_load_optimizer)
    optimizer_away = delegated("memory", Offloading.optimizer_away)
    need_optimizer = delegated("memory", Offloading.need_optimizer)
    weights_device = delegated("memory", Offloading.weights_device)
    offload_model = delegated("memory", Offloading.offload_model)
    reload_model = delegated("memory", Offloading.reload_model)
    offloaded = delegated("memory", Offloading.offloaded)
    moving_average = delegated("memory", Offloading.moving_average)
    save_ckpt = delegated("checkpoints", Checkpoints.save_ckpt)
    load_ckpt = delegated("checkpoints", Checkpoints.load_ckpt)
    save_model = delegated("checkpoints", Checkpoints.save_model)
    setup_inference_engine = delegated("generation", Generation.setup_inference_engine)
    gather_and_generate = delegated("generation", Generation.gather_and_generate)
    update_engine_weights = delegated("generation", Generation.update_engine_weights)
    maybe_sleep_inference_engine = delegated("generation", Generation.maybe_sleep_inference_engine)
    wakeup_inference_engine = delegated("generation", Generation.wakeup_inference_engine)

    @property
    def bf16(self) -> bool:
        """Whether models compute in bfloat16, by the option's name."""
        return self.half == torch.bfloat16

    @property
    def accumulated_gradient(self) -> int:
        """The reference's name of `accumulation`."""
        return self.accumulation

    @property
    def inference_engine(self) -> Any:
        """The `rlbench.InferenceEngine` of `setup_inference_engine`; None before."""
        return None if self.generation.replicas is None else self.generation.replicas.engine

    @property
    def inference_engine_status(self) -> EngineStatus:
        """Whether the engine can generate now, asked of the replicas themselves: others may move them as well."""
        return self.generation.status()

    def is_rank_0(self) -> bool:
        """True on the first rank."""
        return self.rank == 0

    def get_rank(self) -> int:
        """Return this rank's number."""
        return self.rank

    def print(self, *values: Any) -> None:
        """Print with the time, on rank 0 alone."""
        if self.is_rank_0():
            print(f"[StrategyINFO {datetime.now():%m-%d %H:%M:%S}] ", *values, flush=True)

    def set_seed(self, seed: int | None = None) -> None:
        """Seed torch, numpy and random alike on all ranks; by default with the strategy's seed."""
        chosen = self.seed if seed is None else seed
        random.seed(chosen)
        np.random.seed(chosen % 2**32)
        torch.manual_seed(chosen)

    def report_memory(self, prefix: str = "") -> dict[str, int]:
        """Print (rank 0) and return what memory is used, in bytes: on a GPU `driver_used` by all processes and
        `allocated` by this one's tensors, on a host without one `host_used` by all and this process's `rss`."""
        if self.device.is_gpu:
            free, total = torch.cuda.mem_get_info(self.device.device)
            used = {"driver_used": int(total - free), "allocated": self.device.allocated()["cuda"]}
        else:
            used = {"host_used": int(psutil.virtual_memory().used), "rss": self.device.allocated()["rss"]}
        if self.is_rank_0():
            parts = ", ".join(f"{name.upper()}={nbytes / GB:.2f} GB" for name, nbytes in used.items())
            print(f"MEMORY STATUS: {prefix}, {parts}", flush=True)
        return used

    def sync_and_clear_cache(self) -> None:
        """Wait for the device, drop unreachable objects, and give memory that nothing uses back."""
        if self.device.is_gpu:
            torch.cuda.synchronize(self.device.device)
        gc.collect()
        self.device.release_cache()
        return_free_memory()

    def unwrap_model(self, model: nn.Module) -> nn.Module:
        """Return the model inside a wrapper that calls it `module` (DistributedDataParallel, …); else the model."""
        inner = getattr(model, "module", None)
        return inner if isinstance(inner, nn.Module) else model

    @contextmanager
    def init_model_context(self, meta_init: bool = False) -> Iterator[None]:
        """Make models inside.

        Args:
            meta_init: parameters get no memory until `prepare_model` loads them shard by shard (or `load_ckpt` does).
                Buffers are real: a constructor computes them, and no checkpoint brings them back.
        """
        try:
            with made_on("meta") if meta_init else nullcontext():
                yield
        finally:
            self.report_memory("Finished init_model_context")


def _settled(args: Any, arguments: Mapping[str, Any]) -> tuple[StrategyConfig, dict[str, Any]]:
    """Return the options and the arguments of a strategy, each as the other says it where it does not itself."""
    config = StrategyConfig.of(args)
    overridden = config.overridden()
    named = args if isinstance(args, Mapping) else overridden
    settled = dict(arguments)
    for name, value in arguments.items():
        if value == ARGUMENTS[name] and (name in named or name in overridden):
            settled[name] = getattr(config, name)
        elif name in overridden and getattr(config, name) != value:
            raise OptionError(f"{name}={value!r}, and {name}={getattr(config, name)!r} in args: give it once.")
    own = {name: value for name, value in arguments.items() if value != ARGUMENTS[name]}
    return replace(config, **own), settled
