"""A module in FSDP1's units, which stays the object it is, with the names its parameters had.

torch wraps a module in another one, and calls that. Here the wrapper of the whole stands outside of the module, which
leads its own calls through it; those inside stand in the tree, and pass on what they are asked for by name.

    the module  ->  FSDP (no parameters)  ->  FSDP (those of no unit)  ->  the module's own forward  ->  its units

The outermost has none as torch keeps the parameters of a root gathered after a forward: where no backward follows, they
would be used again, stale, after the next optimizer step.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import CustomPolicy

from rlbench.checkpoint.flat_parts import MARK, FlatPart
from rlbench.errors import BuildError, EngineError, some
from rlbench.nn.base import lead_forward
from rlbench.strategies.internals import leave_fsdp1_pass
from rlbench.strategies.optim.gradients import gathered
from rlbench.strategies.ranks.control import ControlGroup

HOLDER = "_flat_units"
ONE_DTYPE = "Must flatten tensors with uniform dtype"
Policy: TypeAlias = Callable[..., bool] | CustomPolicy


class Unit(FullyShardedDataParallel):
    """One of FSDP1's units inside of a module, whose parts keep the names they have without it."""

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Give itself, and what it wraps by the same name."""
        memo = set() if memo is None else memo
        if self not in memo:
            if remove_duplicate:
                memo.add(self)
            yield prefix, self
            yield from self.module.named_modules(memo, prefix, remove_duplicate)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As of what it wraps: the parts of this rank."""
        return self.module.state_dict(*args, **kwargs)


class _Inside(nn.Module):
    """What the units' root computes: the module's own forward, whose hooks have run outside."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.led = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.led.forward.__wrapped__(*args, **kwargs)


class _Outside(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


class FlatUnits:
    """FSDP1's units of one module; made on all ranks together.

    Args:
        module: it may be on meta; parameters then get memory, without contents, unit by unit.
        policy: which parts are units, as torch's `auto_wrap_policy` says it.
        options: of FullyShardedDataParallel.
    """

    def __init__(
        self, module: nn.Module, policy: Policy, control: ControlGroup, device: torch.device, **options: Any
    ) -> None:
        shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
        lead_forward(module, lambda *args, **kwargs: self.root(*args, **kwargs))
        options |= {"device_id": device, "use_orig_params": True, "param_init_fn": partial(_fill_in, {}, device)}
        made = partial(FullyShardedDataParallel, **options)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*NO_SHARD.*")  # asked for, or there is one rank
            try:
                inner = made(_Inside(module), auto_wrap_policy=policy)
                self.root = made(_Outside(inner))
            except ValueError as error:
                if ONE_DTYPE not in str(error):
                    raise
                raise BuildError(
                    f"FSDP1 holds the parameters of a unit in one dtype, and {type(module).__name__} has units of "
                    f"several ({error}): cast them alike, or take FSDP2, which shards each by itself"
                ) from error
        for part in FullyShardedDataParallel.fsdp_modules(module):
            part.__class__ = Unit
        _need_ties(module)
        group = inner.process_group if inner.sharding_strategy.name != "NO_SHARD" else None
        _mark(module, shapes, control, group)
        self.root.check_is_root()  # from now on, also where a part of the module is called first
        module.__deepcopy__ = partial(_refuse_copy, type(module).__name__)  # type: ignore[assignment]
        setattr(module, HOLDER, self)

    def leave_pass(self) -> None:
        """Free what is gathered, and forget a pass that ended early."""
        leave_fsdp1_pass(self.root)


def flat_units(module: nn.Module) -> FlatUnits | None:
    """Return FSDP1's units of a module; None where another holds it."""
    return vars(module).get(HOLDER)


def need_unflat(module: nn.Module) -> None:
    """Refuse a module that FSDP1 holds, whose gradients another strategy would scale and clip wrongly."""
    if flat_units(module) is not None:
        raise EngineError(
            f"FSDP1 holds {type(module).__name__}: prepare and train it by the rank's own strategy (self.strategy), or "
            "build the engine over FSDP2 (executor='fsdp2')"
        )


def _refuse_copy(name: str, _: Any) -> None:
    """A copy would compute with the parameters of the module it is of, through the same wrapper."""
    raise EngineError(
        f"{name} cannot be copied, as FSDP1 holds it: make another module, strategy.prepare_model it (or build another "
        "engine), and load the weights into that"
    )


def _fill_in(made: dict[nn.Parameter, nn.Parameter], device: torch.device, part: nn.Module) -> None:
    """Give parameters on meta memory, without contents; one of several names stays one."""
    for name, parameter in part._parameters.items():
        if parameter is not None and parameter.is_meta:
            if parameter not in made:
                empty = torch.empty_like(parameter, device=device)
                made[parameter] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
            part._parameters[name] = made[parameter]


def _need_ties(module: nn.Module) -> None:
    """Refuse units that have one of a parameter's layers and not the others, which would compute with its row."""
    paths = [path for path, part in module.named_modules() if isinstance(part, Unit)]
    held: dict[nn.Parameter, dict[str, str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        inside = max((path for path in paths if name.startswith(f"{path}.")), key=len, default="")
        held.setdefault(parameter, {})[inside] = name
    apart = next((names for names in held.values() if len(names) > 1), None)
    if apart is not None:
        raise BuildError(
            f"get_fsdp_wrap_policy() of {type(module).__name__} takes apart what is one parameter "
            f"({some(list(apart.values()))}): a unit has all layers that share it, or none of them; leave these out"
        )


def _mark(module: nn.Module, shapes: Mapping[str, tuple[int, ...]], control: ControlGroup, group: Any) -> None:
    """Let every parameter know its place in the whole: the ranks of a group hold its numbers in their order."""
    held: list[dict[str, int]] = control.gather({name: p.numel() for name, p in module.named_parameters()})
    ranks = [control.rank] if group is None else dist.get_process_group_ranks(group)
    place = ranks.index(control.rank)
    for name, parameter in module.named_parameters():
        counts = [held[rank][name] for rank in ranks]
        replica = control.rank if group is None else min(ranks)  # the first group has rank 0
        part = FlatPart(shapes[name], sum(counts[:place]), counts[place], len(ranks), replica, group)
        setattr(parameter, MARK, part)
        parameter.full_tensor = partial(_whole, parameter)  # type: ignore[attr-defined]


def _whole(parameter: Tensor) -> Tensor:
    """What a hook of the user's asks of a parameter, whichever FSDP holds it; collective."""
    return gathered(parameter).detach()
