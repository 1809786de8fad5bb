"""Everything that decides how one rank's training goes on, as named tensors and plain values.

Tensors: parameters and buffers, optimizer state. Values: class, groups and settings of the optimizers, schedulers. The
random states are apart. Gradients that wait for a step are not part of it.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rlbench.checkpoint.tensor_files import local_part
from rlbench.errors import CheckpointError, nearest

Scheduler: TypeAlias = torch.optim.lr_scheduler.LRScheduler
OPTIMIZER = "optimizer/"
OF_TORCH = ("state", "param_groups", "defaults")
"""Attributes of every optimizer that hold no other optimizer."""
MOST_HELD = 64
"""Entries of a dict or list up to which it may be one of optimizers; longer ones are data."""
SHOWN = 3


@dataclass(frozen=True)
class State:
    """The training state of a module, with the optimizers and schedulers that belong to it, by name."""

    module: nn.Module
    optimizers: Mapping[str, torch.optim.Optimizer] = field(default_factory=dict)
    schedulers: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, module: nn.Module) -> State:
        """Take the optimizers and schedulers that the module holds."""
        return cls(module, optimizers_of(module), schedulers_of(module))

    def tensors(self) -> dict[str, Tensor]:
        """Return every parameter, buffer and optimizer tensor by a name that a rebuilt rank gives too.

        Sharded ones are DTensors.
        """
        tensors = self._module_tensors()
        for which, optimizer in self.optimizers.items():
            for name, parameter in _named(self.module, optimizer):
                for key, value in optimizer.state.get(parameter, {}).items():
                    if isinstance(value, Tensor):
                        tensors[f"{OPTIMIZER}{which}/{name}/{key}"] = value
        return tensors

    def values(self) -> dict[str, Any]:
        """Return what is not a tensor of the model: small, plain, readable by `torch.load(weights_only=True)`."""
        return {
            "optimizers": {which: _values(self.module, optimizer) for which, optimizer in self.optimizers.items()},
            "schedulers": {
                name: {key: value for key, value in scheduler.state_dict().items() if unplain(value) is None}
                for name, scheduler in self.schedulers.items()
            },
        }

    def layout(self) -> Callable[[str], Tensor | None]:
        """Return what gives, for a tensor's name, a tensor that is sharded as that one is to be."""
        tensors, parameters = self._module_tensors(), dict(self.module.named_parameters())

        def like(name: str) -> Tensor | None:
            if not name.startswith(OPTIMIZER):
                return tensors.get(name)
            return parameters.get(name.split("/", 2)[2].rpartition("/")[0])

        return like

    def check(
        self, tensors: Mapping[str, Tensor], values: Mapping[str, Any], exact: bool = True, partial: bool = False
    ) -> str:
        """See that `load` can put everything back; returns which names are not shared (`partial`), in words.

        Args:
            exact: refuse another dtype, too; else it is converted.
            partial: let either have parameters and buffers that the other has not.

        Raises:
            CheckpointError: other names or shapes in the module; another optimizer, by name, class or the parameters in
                its groups.
        """
        own, saved = self._module_tensors(), {n: t for n, t in tensors.items() if not n.startswith(OPTIMIZER)}
        said = _differences(list(own), list(saved))
        if said and not partial:
            raise CheckpointError(f"the saved state is that of another module: {said}")
        for name in (name for name in own if name in saved):
            here, there = local_part(own[name]), local_part(saved[name])
            if here.shape != there.shape or (exact and here.dtype != there.dtype):
                raise CheckpointError(
                    f"{name.partition('/')[2]}: saved {tuple(there.shape)} {there.dtype}, the module has "
                    f"{tuple(here.shape)} {here.dtype}; build it as it was saved"
                )
        if self.optimizers.keys() != values["optimizers"].keys():
            then, now = (", ".join(names) or "none" for names in (values["optimizers"], self.optimizers))
            raise CheckpointError(f"the saved state has the optimizers {then}, and the module {now}: they differ")
        for which, optimizer in self.optimizers.items():
            _check_optimizer(which, values["optimizers"][which], _values(self.module, optimizer))
        return said

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Put back what `tensors` and `values` gave, after a `check`; parameters and optimizers keep their identity.

        Optimizer state that is offloaded stays so.
        """
        for name, target in self._module_tensors().items():
            if name in tensors:
                local_part(target).copy_(local_part(tensors[name]))
        for which, optimizer in self.optimizers.items():
            self._load_optimizer(which, optimizer, tensors, values["optimizers"][which])
        for name, scheduler in self.schedulers.items():
            scheduler.load_state_dict(scheduler.state_dict() | dict(values["schedulers"].get(name, {})))

    def _load_optimizer(
        self, which: str, optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor], saved: Mapping[str, Any]
    ) -> None:
        for group, settings in zip(optimizer.param_groups, saved["groups"], strict=True):
            group.update(settings)
        counts_on_device = any(g.get("fused") or g.get("capturable") for g in optimizer.param_groups)
        for name, parameter in _named(self.module, optimizer):
            state, now = dict(saved["state"].get(name, {})), optimizer.state.get(parameter, {})
            for key, value in under(f"{OPTIMIZER}{which}/{name}", tensors).items():
                device = _device(parameter, now.get(key), value, counts_on_device)
                state[key] = like_parameter(parameter, value, device)
            if state:
                optimizer.state[parameter] = state
            else:
                optimizer.state.pop(parameter, None)

    def _module_tensors(self) -> dict[str, Tensor]:
        parameters = {f"parameter/{name}": p.data for name, p in self.module.named_parameters()}
        return parameters | {f"buffer/{name}": buffer for name, buffer in self.module.named_buffers()}


def under(part: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors whose names begin with `part/`, without that."""
    return {name.removeprefix(f"{part}/"): t for name, t in tensors.items() if name.startswith(f"{part}/")}


def checksums(module: nn.Module) -> dict[str, str]:
    """Return sha256 of this rank's weights, optimizer (hyper-parameters and schedulers too) and random state."""
    digests = {part: hashlib.sha256() for part in ("weights", "optimizer", "random")}
    state = State.of(module)
    for name, tensor in sorted(state.tensors().items()):
        digest = digests["optimizer" if name.startswith(OPTIMIZER) else "weights"]
        digest.update(name.encode())
        digest.update(local_part(tensor).detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    digests["optimizer"].update(repr(state.values()).encode())
    for key, value in sorted(random_state().items()):
        held = value.cpu().numpy().tobytes() if isinstance(value, Tensor) else repr(value).encode()
        digests["random"].update(key.encode() + held)
    return {part: digest.hexdigest() for part, digest in digests.items()}


def optimizers_of(module: nn.Module) -> dict[str, torch.optim.Optimizer]:
    """Return the optimizers a module holds, each once: as attributes, in dicts, and as the parts of another."""
    optimizers: dict[int, tuple[str, torch.optim.Optimizer]] = {}
    for name, value in vars(module).items():
        for path, optimizer in _held(name, value, torch.optim.Optimizer, inside=True):
            optimizers.setdefault(id(optimizer), (path, optimizer))
    return dict(optimizers.values())


def schedulers_of(module: nn.Module) -> dict[str, Scheduler]:
    """Return the learning-rate schedulers a module holds as attributes or in dicts."""
    return {path: held for name, value in vars(module).items() for path, held in _held(name, value, Scheduler)}


def _held(name: str, value: Any, kind: type, inside: bool = False) -> Iterator[tuple[str, Any]]:
    """Give what of `kind` an attribute holds, itself or in a small dict or list, by name.

    `inside`: also what one of them is made of, as an optimizer that hands its groups to others keeps its state there.
    """
    if isinstance(value, kind):
        yield name, value
        for key, part in vars(value).items() if inside else ():
            if key not in OF_TORCH:
                yield from _held(f"{name}.{key}", part, kind, inside)
    elif isinstance(value, Mapping | list | tuple) and len(value) <= MOST_HELD:
        parts: Iterable[tuple[Any, Any]] = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, part in parts:
            if isinstance(part, kind):
                yield from _held(f"{name}.{key}", part, kind, inside)


def random_state() -> dict[str, Any]:
    """Return the random states of torch (host, and device where there is one), numpy and Python."""
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


def unplain(value: Any, where: str = "") -> str | None:
    """Return where in `value` something lies that only code could read again; None where all is plain data."""
    if isinstance(value, dict | list | tuple):
        inside = value.items() if isinstance(value, dict) else enumerate(value)
        return next((found for key, part in inside if (found := unplain(part, f"{where}[{key!r}]"))), None)
    plain = value is None or isinstance(value, Tensor) or type(value) in (bool, int, float, str)
    return None if plain else where or "it"


def like_parameter(parameter: Tensor, value: Tensor, device: torch.device | None = None) -> Tensor:
    """Return a tensor of the optimizer, or a gradient, as it would have been made: sharded like its parameter.

    Args:
        value: this rank's part.
        device: where it goes; None: to the parameter.
    """
    device = device or local_part(parameter.detach()).device
    if isinstance(parameter, DTensor) and tuple(value.shape) == tuple(parameter.to_local().shape):
        made = torch.zeros_like(parameter, dtype=value.dtype)
        made = made if made.device.type == device.type else made.to(device)
        made.to_local().copy_(value)
        return made
    return value.clone().to(device)


def _named(module: nn.Module, optimizer: torch.optim.Optimizer) -> list[tuple[str, Tensor]]:
    """Return the optimizer's parameters with the module's names; one that is not the module's by its place."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    return [
        (names.get(id(parameter), f"#{g}.{i}"), parameter)
        for g, group in enumerate(optimizer.param_groups)
        for i, parameter in enumerate(group["params"])
    ]


def _values(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return an optimizer's class, its groups' parameters and settings, and of its state what is no tensor."""
    named = _named(module, optimizer)
    names = iter(named)
    return {
        "class": type(optimizer).__qualname__,
        "parameters": [[next(names)[0] for _ in group["params"]] for group in optimizer.param_groups],
        "groups": [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups],
        "state": {
            name: {k: v for k, v in optimizer.state.get(p, {}).items() if not isinstance(v, Tensor)}
            for name, p in named
        },
    }


def _device(parameter: Tensor, now: Any, value: Tensor, counts_on_device: bool) -> torch.device:
    """Return where a tensor of the optimizer belongs: where it is now (it may be offloaded), else as a step does it."""
    if isinstance(now, Tensor):
        return local_part(now).device
    counter = value.dim() == 0 and not counts_on_device
    return torch.device("cpu") if counter else local_part(parameter.detach()).device


def _differences(here: list[str], there: list[str]) -> str:
    """Say which names only one of the two has; empty where they are the same."""
    missing, unexpected = sorted({*here} - {*there}), sorted({*there} - {*here})
    said = []
    if missing:
        said.append(f"{len(missing)} of the module's are not in it ({_some(missing)}{nearest(missing[0], unexpected)})")
    if unexpected:
        said.append(f"{len(unexpected)} of it are not the module's ({_some(unexpected)})")
    return "; ".join(said)


def _some(names: list[str]) -> str:
    return ", ".join(names[:SHOWN]) + (", …" if len(names) > SHOWN else "")


def _check_optimizer(which: str, saved: Mapping[str, Any], present: Mapping[str, Any]) -> None:
    """Refuse state of another optimizer: put into this one it would be neither."""
    if all(saved[key] == present[key] for key in ("class", "parameters")):
        return
    then, now = (
        f"{state['class']} over {sum(map(len, state['parameters']))} parameters in {len(state['parameters'])} groups"
        for state in (saved, present)
    )
    differ = f"was {then} and is {now}" if then != now else f"({now}) has other parameters in its groups"
    raise CheckpointError(
        f"the saved state is of another optimizer: {which} {differ}. Nothing was changed; make the optimizer it was "
        "saved with again, then go back"
    )
