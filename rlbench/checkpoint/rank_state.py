"""Everything that decides how one rank's training goes on, as named tensors and plain values.

Tensors: parameters and buffers (this rank's shards), optimizer state. Plain: hyper-parameters of the optimizers,
schedulers, random states. Gradients that wait for a step are not part of it.

Optimizers and schedulers are those the module holds as attributes, alone or in a dict (`self.optimizer = {"muon": …,
"adamw": …}`), and those that such an optimizer is made of, unless they are given by name.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rlbench.errors import CheckpointError

Optimizers = Mapping[str, torch.optim.Optimizer]
Scheduler: TypeAlias = torch.optim.lr_scheduler.LRScheduler
OF_TORCH = ("state", "param_groups", "defaults")
"""Attributes of every optimizer that hold no other optimizer."""
MOST_HELD = 64
"""Entries of a dict or list up to which it may be one of optimizers; longer ones are data."""


def tensors_of(module: nn.Module, optimizers: Optimizers | None = None) -> dict[str, Tensor]:
    """This rank's part of every parameter, buffer and optimizer tensor, under names that a rebuilt rank gives too."""
    return {name: local_part(tensor) for name, tensor in sharded_tensors_of(module, optimizers).items()}


def sharded_tensors_of(module: nn.Module, optimizers: Optimizers | None = None) -> dict[str, Tensor]:
    """The same, sharded ones whole as DTensors: what a checkpoint for any number of ranks is written from."""
    found: dict[str, Tensor] = {}
    for name, parameter in module.named_parameters():
        found[f"parameter/{name}"] = parameter.data
    for name, buffer in module.named_buffers():
        found[f"buffer/{name}"] = buffer
    for which, optimizer in _or_own(module, optimizers).items():
        for name, parameter in _named(module, optimizer):
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    found[f"optimizer/{which}/{name}/{key}"] = value
    return found


def optimizer_tensors_like(
    module: nn.Module, shapes: Mapping[str, tuple[torch.Size, torch.dtype]]
) -> dict[str, Tensor]:
    """Empty tensors for the optimizer state of a checkpoint, sharded as this engine shards its parameters.

    Args:
        shapes: (shape, dtype) of the checkpoint's tensors by name; those of other kinds are left out.
    """
    found: dict[str, Tensor] = {}
    for which, optimizer in optimizers_of(module).items():
        for name, parameter in _named(module, optimizer):
            prefix = f"optimizer/{which}/{name}/"
            for full, (shape, dtype) in shapes.items():
                if full.startswith(prefix):
                    sharded = shape == parameter.shape
                    found[full] = (
                        torch.zeros_like(parameter, dtype=dtype) if sharded else torch.zeros(shape, dtype=dtype)
                    )
    return found


def values_of(module: nn.Module) -> dict[str, Any]:
    """What is not a tensor of the model: small, plain, readable by `torch.load(weights_only=True)`."""
    schedulers = {name: scheduler_values(scheduler) for name, scheduler in schedulers_of(module).items()}
    return {"optimizers": optimizer_values(module), "schedulers": schedulers, "random": random_state()}


def optimizer_values(module: nn.Module, optimizers: Optimizers | None = None) -> dict[str, Any]:
    """Of each optimizer its class, its groups' parameters and settings, and of its state what is no tensor."""
    return {
        which: {
            "class": type(optimizer).__qualname__,
            "parameters": _parameters_by_group(module, optimizer),
            "groups": [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups],
            "state": {
                name: {k: v for k, v in optimizer.state.get(p, {}).items() if not isinstance(v, Tensor)}
                for name, p in _named(module, optimizer)
            },
        }
        for which, optimizer in _or_own(module, optimizers).items()
    }


def scheduler_values(scheduler: Any) -> dict[str, Any]:
    """Where a scheduler stands, without the functions it may hold."""
    return {k: v for k, v in scheduler.state_dict().items() if _plain(v)}


def load_scheduler(scheduler: Any, values: Mapping[str, Any]) -> None:
    """Put back what `scheduler_values` gave."""
    scheduler.load_state_dict(scheduler.state_dict() | dict(values))


@torch.no_grad()
def load(module: nn.Module, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
    """Put back what `tensors_of` and `values_of` gave; parameters and optimizers keep their identity.

    Raises:
        CheckpointError: as `check_fits`, found before anything is changed.
    """
    load_model(module, tensors, values["optimizers"])
    for name, scheduler in schedulers_of(module).items():
        load_scheduler(scheduler, values["schedulers"].get(name, {}))
    set_random_state(values["random"])


def check_fits(
    module: nn.Module, tensors: Mapping[str, Tensor], kept: Mapping[str, Any], optimizers: Optimizers | None = None
) -> None:
    """Raise CheckpointError where `load_model` could not put everything back.

    Of the module: other names or shapes. Of an optimizer: another class, or parameters in other groups.
    """
    owned = _or_own(module, optimizers)
    _check(tensors_of(module, owned), tensors, set(owned), set(kept))
    for which, optimizer in owned.items():
        _check_optimizer(which, kept[which], type(optimizer).__qualname__, _parameters_by_group(module, optimizer))


@torch.no_grad()
def load_model(
    module: nn.Module, tensors: Mapping[str, Tensor], kept: Mapping[str, Any], optimizers: Optimizers | None = None
) -> None:
    """Put back what `tensors_of` and `optimizer_values` gave; parameters and optimizers keep their identity.

    Optimizer state that is offloaded stays so.

    Raises:
        CheckpointError: as `check_fits`; nothing is changed.
    """
    owned = _or_own(module, optimizers)
    check_fits(module, tensors, kept, owned)
    for name, target in tensors_of(module, {}).items():
        target.copy_(local_part(tensors[name]))
    for which, optimizer in owned.items():
        saved = kept[which]
        for group, settings in zip(optimizer.param_groups, saved["groups"], strict=True):
            group.update(settings)
        counts_on_device = any(g.get("fused") or g.get("capturable") for g in optimizer.param_groups)
        for name, parameter in _named(module, optimizer):
            prefix = f"optimizer/{which}/{name}/"
            state = dict(saved["state"].get(name, {}))
            now = optimizer.state.get(parameter, {})
            for full, value in tensors.items():
                if full.startswith(prefix):
                    key = full.removeprefix(prefix)
                    where = _place(parameter, now.get(key), value, counts_on_device)
                    state[key] = like_parameter(parameter, value, where)
            if state:
                optimizer.state[parameter] = state
            else:
                optimizer.state.pop(parameter, None)


def checksums(module: nn.Module) -> dict[str, str]:
    """sha256 of this rank's parameters and buffers, optimizer (hyper-parameters and schedulers too), random state."""
    digests = {part: hashlib.sha256() for part in ("weights", "optimizer", "random")}
    for name, tensor in sorted(tensors_of(module).items()):
        digest = digests["optimizer" if name.startswith("optimizer/") else "weights"]
        digest.update(name.encode())
        digest.update(tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    values = values_of(module)
    digests["optimizer"].update(repr((values["optimizers"], values["schedulers"])).encode())
    for key, value in sorted(values["random"].items()):
        held = value.cpu().numpy().tobytes() if isinstance(value, Tensor) else repr(value).encode()
        digests["random"].update(key.encode() + held)
    return {part: digest.hexdigest() for part, digest in digests.items()}


def optimizers_of(module: nn.Module) -> dict[str, torch.optim.Optimizer]:
    """The optimizers a module holds, each once: as attributes, in dicts, and as the parts of another."""
    optimizers: dict[int, tuple[str, torch.optim.Optimizer]] = {}
    for name, value in vars(module).items():
        for path, optimizer in _held(name, value, torch.optim.Optimizer, inside=True):
            optimizers.setdefault(id(optimizer), (path, optimizer))
    return dict(optimizers.values())


def schedulers_of(module: nn.Module) -> dict[str, Scheduler]:
    """The learning-rate schedulers a module holds as attributes or in dicts."""
    return {path: held for name, value in vars(module).items() for path, held in _held(name, value, Scheduler)}


def _held(name: str, value: Any, kind: type, inside: bool = False) -> Iterator[tuple[str, Any]]:
    """What of `kind` an attribute holds, itself or in a small dict or list, by name.

    `inside`: also what one of them is made of, as an optimizer that hands its groups to others keeps its state there.
    """
    if isinstance(value, kind):
        yield name, value
        for key, part in vars(value).items() if inside else ():
            if key not in OF_TORCH:
                yield from _held(f"{name}.{key}", part, kind, inside)
        return
    if not isinstance(value, Mapping | list | tuple) or len(value) > MOST_HELD:
        return
    parts: Iterable[tuple[Any, Any]] = value.items() if isinstance(value, Mapping) else enumerate(value)
    for key, part in parts:
        if isinstance(part, kind):
            yield from _held(f"{name}.{key}", part, kind, inside)


def random_state() -> dict[str, Any]:
    """Random states of torch (host, and device where there is one), numpy and Python."""
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "numpy_keys": torch.from_numpy(np.asarray(keys).astype(np.int64)),
        "numpy": [str(kind), int(position), int(has_gauss), float(gauss)],
        "python": random.getstate(),
    }


def set_random_state(state: Mapping[str, Any]) -> None:
    """Put back what `random_state` gave."""
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    kind, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((kind, state["numpy_keys"].numpy().astype(np.uint32), position, has_gauss, gauss))
    version, internal, gauss_next = state["python"]
    random.setstate((version, tuple(internal), gauss_next))


def _named(module: nn.Module, optimizer: torch.optim.Optimizer) -> list[tuple[str, Tensor]]:
    """The optimizer's parameters with the module's names; one that is not the module's by its place."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    return [
        (names.get(id(parameter), f"#{g}.{i}"), parameter)
        for g, group in enumerate(optimizer.param_groups)
        for i, parameter in enumerate(group["params"])
    ]


def _parameters_by_group(module: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[str]]:
    """Names of the parameters in each of an optimizer's groups."""
    names = iter(_named(module, optimizer))
    return [[next(names)[0] for _ in group["params"]] for group in optimizer.param_groups]


def like_parameter(parameter: Tensor, value: Tensor, device: torch.device | None = None) -> Tensor:
    """A tensor of the optimizer, or a gradient, as it would have been made: sharded like its parameter.

    Args:
        value: this rank's part.
        device: where it goes; None: to the parameter.
    """
    device = device or local_part(parameter.detach()).device
    if isinstance(value, DTensor):
        return value
    if isinstance(parameter, DTensor) and tuple(value.shape) == tuple(parameter.to_local().shape):
        made = torch.zeros_like(parameter, dtype=value.dtype)
        made = made if made.device.type == device.type else made.to(device)
        made.to_local().copy_(value)
        return made
    return value.clone().to(device)


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor that may be sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _place(parameter: Tensor, now: Any, value: Tensor, counts_on_device: bool) -> torch.device:
    """Where a tensor of the optimizer belongs: where it is now (it may be offloaded), else where a step makes it."""
    if isinstance(now, Tensor):
        return local_part(now).device
    counter = value.dim() == 0 and not counts_on_device
    return torch.device("cpu") if counter else local_part(parameter.detach()).device


def _or_own(module: nn.Module, optimizers: Optimizers | None) -> Optimizers:
    return optimizers_of(module) if optimizers is None else optimizers


def _check(present: Mapping[str, Tensor], saved: Mapping[str, Tensor], optimizers: set[str], kept: set[str]) -> None:
    here = {name for name in present if not name.startswith("optimizer/")}
    there = {name for name in saved if not name.startswith("optimizer/")}
    if here != there or optimizers != kept:
        differ = sorted(here ^ there) or sorted(optimizers ^ kept)
        raise CheckpointError(
            f"the saved state is that of another module: {len(differ)} names differ, first {', '.join(differ[:3])}"
        )
    for name in here:
        kept_shape = local_part(saved[name]).shape
        if present[name].shape != kept_shape or present[name].dtype != saved[name].dtype:
            raise CheckpointError(
                f"{name}: saved {tuple(kept_shape)} {saved[name].dtype}, the module has "
                f"{tuple(present[name].shape)} {present[name].dtype}; build it with as many ranks as it was saved with"
            )


def _check_optimizer(which: str, saved: Mapping[str, Any], kind: str, parameters: list[list[str]]) -> None:
    """Refuse state of another optimizer: put into this one it would be neither."""
    if (saved["class"], saved["parameters"]) == (kind, parameters):
        return
    was, now = (
        f"{name} over {_groups(groups)}" for name, groups in ((saved["class"], saved["parameters"]), (kind, parameters))
    )
    differ = f"was {was} and is {now}" if was != now else f"({now}) has other parameters in its groups"
    raise CheckpointError(
        f"the saved state is of another optimizer: module.{which} {differ}. Nothing was changed; make the optimizer it "
        "was saved with again, then go back, or session.drop the snapshot"
    )


def _groups(parameters: list[list[str]]) -> str:
    number = sum(map(len, parameters))
    return f"{number} parameters in {len(parameters)} group{'s' if len(parameters) != 1 else ''}"


def _plain(value: Any) -> bool:
    """Whether a scheduler's value is data, not code (LambdaLR keeps its functions in its state)."""
    if isinstance(value, dict):
        return all(_plain(v) for v in value.values())
    if isinstance(value, list | tuple):
        return all(_plain(v) for v in value)
    return value is None or isinstance(value, bool | int | float | str | Tensor)
