"""A model that DeepSpeed trains: one backward, one step, and every tensor whole, whatever the stage of ZeRO.

The model stays the object that the user holds; DeepSpeed's engine beside it has hooks on it. Stage 1 splits optimizer
state and float32 weights over the ranks, stage 2 gradients too, stage 3 the model's own parameters as well.

What DeepSpeed splits lies in flat tensors over several parameters. `Zero.whole` and `Zero.put` take one parameter's
part out of any of them, and back: whatever is written so is read on any number of ranks, and by FSDP2.
"""

from __future__ import annotations

import logging
import math
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlbench.errors import BuildError
from rlbench.strategies.internals import process_groups
from rlbench.strategies.memory.device import RankDevice
from rlbench.strategies.optim.gradients import KEEPER, full_shape, is_split, keeper_of

MASTER = "master"
FIRST_MICRO_STEP = -1  # DeepSpeed's `micro_step_id` before the first backward of a step, in stages 1 and 2


def join_deepspeed(device: RankDevice, local_rank: int) -> Any:
    """Return the package `deepspeed`, which works over the process group there is."""
    if not device.is_gpu:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("LOCAL_RANK", str(local_rank))  # it reads the environment alone
    try:
        import deepspeed
    except ImportError as error:
        raise BuildError(
            f"DeepspeedStrategy needs the package deepspeed ({error}): pip install "
            "'rlbench[deepspeed]', or train with FSDP2, which shards as ZeRO 3 does: --fsdp (fsdp=True)."
        ) from error
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    if not device.is_gpu:  # else it compiles a collective of its own: a compiler on every host, and a minute
        sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
        deepspeed.get_accelerator().is_fp16_supported = lambda: True  # torch computes so on any host, if slowly
    deepspeed.init_distributed(
        dist_backend="nccl" if device.is_gpu else "gloo", auto_mpi_discovery=False, verbose=False
    )
    groups = deepspeed.utils.groups
    if (held := groups._WORLD_GROUP) is not None and held not in process_groups():
        groups._release_process_group_references()  # of ranks that were joined in this process before, and left
    return deepspeed


class CopyGroup:
    """The ranks beside this one, `size` together, that keep a second copy of the weights between them; collective.

    DeepSpeed knows one such group in a process, and takes it for every model, whatever that one's configuration says.
    """

    def __init__(self, deepspeed: Any, size: int) -> None:
        self._groups, self._group = deepspeed.utils.groups, None
        if size > 1:
            with self.known():
                self._groups._create_zero_param_parallel_group(size)
                self._group = self._groups._get_zero_param_intra_parallel_group()

    @contextmanager
    def known(self) -> Iterator[None]:
        """Let DeepSpeed know of this group alone while a model is given to it."""
        self._groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = self._group
        try:
            yield
        finally:
            self._groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None


@dataclass(frozen=True)
class Place:
    """Where one rank's part of a parameter lies: `numel` numbers from `start` of flat tensor `flat`, which are those
    from `whole_start` of the parameter, flattened and padded to `padded` numbers."""

    flat: int
    start: int
    numel: int
    whole_start: int
    padded: int


class Zero:
    """Of one model; made on all ranks together.

    Attributes:
        groups: the parameters that the optimizer steps, by its groups, as they were before DeepSpeed put flat tensors
            in their place.
        waiting: backward calls whose gradients wait for a step.
    """

    def __init__(
        self, deepspeed: Any, model: nn.Module, optimizer: torch.optim.Optimizer | None, config: Mapping[str, Any]
    ) -> None:
        self.groups = [] if optimizer is None else [list(group["params"]) for group in optimizer.param_groups]
        self.optimizer, self.waiting = optimizer, 0
        self.stage: int = config["zero_optimization"]["stage"]
        self.engine = deepspeed.initialize(model=model, optimizer=optimizer, config=dict(config))[0]
        self._deepspeed = deepspeed
        self._zero = self.engine.optimizer
        setattr(model, KEEPER, self)

    # -- a step

    def backward(self, loss: Tensor, scale: float = 1.0, **kwargs: Any) -> None:
        """Add the gradients of `loss`, which are averaged over the ranks. They wait multiplied by the `scale` of the
        first of a step, and are divided by it as they are stepped with."""
        if not self.waiting:
            self._zero.override_loss_scale(scale)
        self._zero.clear_backward_seen_flag()  # the engine's own forward does, which nobody calls here
        self.engine.backward(loss, scale_wrt_gas=False, **kwargs)
        self.waiting += 1

    def step(self, max_norm: float) -> float:
        """Clip to `max_norm` (0: not) and step; return the norm before, inf where nothing was stepped."""
        self._zero.clip_grad = max_norm
        if not self.waiting:
            return 0.0
        self.engine.step()
        self.waiting = 0
        return float(self.engine.get_global_grad_norm()) if self.engine.was_step_applied() else math.inf

    def scale(self, factor: float) -> None:
        """Multiply the gradients that wait: they are scaled by less from now on, and those that join them too."""
        self._zero.override_loss_scale(self._zero.loss_scale / factor)

    def forget(self) -> bool:
        """Drop the gradients that wait, and what is gathered of parameters; return whether there were any."""
        waited, self.waiting = self.waiting > 0, 0
        zero = self._zero
        self._deepspeed.get_accelerator().synchronize()  # a backward that broke off may be reducing still
        if self.stage == 3:  # it keeps small ones gathered, which would be used again although the parts change
            self.engine.empty_partition_cache()
        if self.optimizer is None:
            return waited
        zero.clear_backward_seen_flag()
        zero.zero_grad(set_to_none=True)
        self.engine._unmanaged_backward_count = 0
        if self.stage < 3:
            zero.micro_step_id = FIRST_MICRO_STEP
            for gradients in (zero.averaged_gradients, zero.all_grad_tensors):
                gradients.update(dict.fromkeys(gradients))
            zero._release_preflattened_grad_buffers()
        if zero_offloads(zero):
            zero.reset_cpu_buffers()
            if self.stage < 3:
                zero._offload_accumulated_param_ids = set()
        return waited

    # -- whole tensors

    @property
    def state_keys(self) -> list[str]:
        """Names of the optimizer's tensors of a parameter's size; none before its first step."""
        states = [] if self.optimizer is None else list(self.optimizer.state.values())
        return [key for key, value in states[0].items() if is_flat(value)] if states else []

    def flats(self, key: str = MASTER) -> list[Tensor]:
        """Return this rank's flat tensors: the float32 weights, or those of the optimizer's state."""
        if self.optimizer is None:
            return []
        masters = self._zero.fp32_partitioned_groups_flat if self.stage == 3 else self._masters()
        return list(masters) if key == MASTER else [self.optimizer.state[master][key] for master in masters]

    def _masters(self) -> list[Tensor]:
        return list(self._zero.single_partition_of_fp32_groups)

    @torch.no_grad()
    def whole(self, parameter: nn.Parameter, flats: list[Tensor]) -> Tensor:
        """Return one parameter's numbers of flat tensors, on the ranks' device; collective."""
        place, device = self._place(parameter), self.engine.device
        found = torch.zeros(place.padded, dtype=torch.float32, device=device)
        if place.numel:
            own = flats[place.flat].flatten()[place.start : place.start + place.numel]
            found[place.whole_start : place.whole_start + place.numel] = own.to(device)
        dist.all_reduce(found)  # exact: each number is one rank's, and zero on the others
        shape = full_shape(parameter)
        return found[: math.prod(shape)].view(shape)

    @torch.no_grad()
    def put(self, parameter: nn.Parameter, flats: list[Tensor], value: Tensor) -> None:
        """Write this rank's part of one parameter's numbers, which all ranks have, into flat tensors."""
        place = self._place(parameter)
        if place.numel:
            part = flats[place.flat].flatten()[place.start : place.start + place.numel]
            part.copy_(_part(value, place.whole_start, place.numel, place.padded))

    @torch.no_grad()
    def show(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Write a whole value, which all ranks have, into what the model computes with."""
        if not is_split(parameter):
            parameter.data.copy_(value)
            return
        own: Any = parameter
        numel = own.ds_tensor.numel()
        own.ds_tensor.copy_(_part(value, numel * dist.get_rank(), numel, numel * dist.get_world_size()))
        own.ds_secondary_tensor = None  # a copy of before, which a backward would gather; made anew when next needed

    @property
    def steps(self) -> Tensor | None:
        """How many steps the optimizer has taken, as its state has it; None: it does not count, or took none."""
        states = [] if self.optimizer is None else list(self.optimizer.state.values())
        return next((state["step"] for state in states if "step" in state), None)

    @torch.no_grad()
    def begin(self, keys: list[str], steps: Tensor | None) -> None:
        """Give the optimizer a state of zeros with tensors of these names, which `put` fills."""
        assert self.optimizer is not None
        self.optimizer.state.clear()
        for master in self.flats() if keys or steps is not None else []:
            state: dict[str, Any] = {key: torch.zeros_like(master) for key in keys}
            if steps is not None:
                state["step"] = steps.clone()
            self.optimizer.state[master] = state
        if self.stage < 3:  # DeepSpeed holds views of the state it knew
            self._zero.optimizer_state_initialized = False

    def _place(self, parameter: nn.Parameter) -> Place:
        if self.stage == 3:
            flat, start, numel = self._zero.grad_position[self._zero.get_param_id(parameter)]
            return Place(flat, start, numel, numel * dist.get_rank(), numel * dist.get_world_size())
        mapping: Any = parameter._hp_mapping  # type: ignore[attr-defined]
        if mapping is None:  # no number of it is this rank's
            return Place(0, 0, 0, 0, parameter.numel())
        flat = next(i for i, group in enumerate(self.groups) if any(one is parameter for one in group))
        own, whole = mapping.hp_fragment_address, mapping.lp_fragment_address
        return Place(flat, own.start, own.numel, whole.start, parameter.numel())


def _part(value: Tensor, start: int, numel: int, padded: int) -> Tensor:
    """Return `numel` numbers from `start` of a flattened tensor that zeros fill up to `padded`."""
    flat = value.flatten()
    return nn.functional.pad(flat, (0, padded - flat.numel()))[start : start + numel]


def is_flat(value: Any) -> bool:
    """Whether a value of an optimizer's state is as large as what it steps."""
    return isinstance(value, Tensor) and value.dim() > 0


def zero_offloads(zero: Any) -> bool:
    """Whether DeepSpeed keeps optimizer state and gradients in host memory."""
    return bool(getattr(zero, "cpu_offload", False) or getattr(zero, "offload_optimizer", False))


def zero_of(model: nn.Module) -> Zero | None:
    """Return what DeepSpeed holds of a model; None where it does not."""
    keeper = keeper_of(model)
    return keeper if isinstance(keeper, Zero) else None
