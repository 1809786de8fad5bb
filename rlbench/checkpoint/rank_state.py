"""Everything that decides how one rank's training goes on, as named tensors and plain values; random states apart."""

from __future__ import annotations

import hashlib
import random
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rlbench.checkpoint.flat_parts import marked
from rlbench.checkpoint.tensor_files import bytes_of, local_part
from rlbench.errors import CheckpointError, nearest, some

Scheduler: TypeAlias = torch.optim.lr_scheduler.LRScheduler
OPTIMIZER, LOSS = "optimizer/", "loss/"
OF_TORCH = ("state", "param_groups", "defaults")  # attributes of every optimizer that hold no other optimizer
PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device)  # what `torch.load(weights_only=True)` reads
MOST_HELD = 64  # entries of a dict or list up to which it may be one of optimizers; longer ones are data


@dataclass(frozen=True)
class State:
    """The training state of a module, with the optimizers and schedulers that belong to it, by name."""

    module: nn.Module
    optimizers: Mapping[str, torch.optim.Optimizer] = field(default_factory=dict)
    schedulers: Mapping[str, Any] = field(default_factory=dict)
    losses: dict[str, dict[str, Tensor]] = field(default_factory=dict)

    @classmethod
    def of(cls, module: nn.Module) -> State:
        """Take the optimizers and schedulers that the module holds, and the states of losses kept at it."""
        return cls(module, optimizers_of(module), schedulers_of(module), loss_states_of(module))

    def tensors(self) -> dict[str, Tensor]:
        """Return every parameter, buffer and optimizer tensor by a name that a rebuilt rank gives too."""
        tensors = self.module_tensors()
        for which, optimizer in self.optimizers.items():
            for name, parameter in self._named(which):
                for key, value in optimizer.state.get(parameter, {}).items():
                    if isinstance(value, Tensor):
                        of_size = value.dim() > 0 and value.shape == parameter.shape
                        tensors[f"{OPTIMIZER}{which}/{name}/{key}"] = marked(value, parameter) if of_size else value
        return tensors | self.loss_tensors()

    def values(self) -> dict[str, Any]:
        """Return what is not a tensor of the model: small, plain, readable by `torch.load(weights_only=True)`."""
        return {
            "optimizers": {which: self._settings(which) for which in self.optimizers},
            "schedulers": {
                name: {key: value for key, value in scheduler.state_dict().items() if unplain(value) is None}
                for name, scheduler in self.schedulers.items()
            },
        }

    def check(
        self, tensors: Mapping[str, Tensor], values: Mapping[str, Any], exact: bool = True, partial: bool = False
    ) -> str:
        """See that `load` can put everything back, with `exact` dtypes; return what is not shared (`partial`)."""
        said = self.check_module(tensors, exact, partial)
        if self.optimizers.keys() != values["optimizers"].keys():
            then, now = (", ".join(names) or "none" for names in (values["optimizers"], self.optimizers))
            raise CheckpointError(f"the saved state has the optimizers {then}, and the module {now}: they differ")
        for which in self.optimizers:
            _check_optimizer(which, values["optimizers"][which], self._settings(which))
        return said

    def check_module(self, tensors: Mapping[str, Tensor], exact: bool = True, partial: bool = False) -> str:
        """See that the module's own tensors can be put back; as `check`."""
        apart = OPTIMIZER, LOSS
        own, saved = self.module_tensors(), {n: t for n, t in tensors.items() if not n.startswith(apart)}
        missing, unexpected = sorted(own.keys() - saved.keys()), sorted(saved.keys() - own.keys())
        near = nearest(missing[0], unexpected) if missing else ""
        names = {"of the module's are not in it": missing, "of it are not the module's": unexpected}
        said = "; ".join(f"{len(only)} {where} ({some(only)})" for where, only in names.items() if only) + near
        if said and not partial:
            raise CheckpointError(f"the saved state is that of another module: {said}")
        for name in (name for name in own if name in saved):
            here, there = local_part(own[name]), local_part(saved[name])
            if here.shape != there.shape or (exact and here.dtype != there.dtype):
                raise CheckpointError(
                    f"{name.partition('/')[2]}: saved {tuple(there.shape)} {there.dtype}, the module has "
                    f"{tuple(here.shape)} {here.dtype}; build it as it was saved"
                )
        return said

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Put back what `tensors` and `values` gave, after a `check`; optimizer state that is offloaded stays so."""
        for name, target in self.module_tensors().items():
            if name in tensors:
                local_part(target).copy_(local_part(tensors[name]))
        for which, optimizer in self.optimizers.items():
            self._load_optimizer(which, optimizer, tensors, values["optimizers"][which])
        self.load_beside(tensors, values)

    def load_beside(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Put back what lies beside module and optimizers: schedulers, and the states of losses."""
        for name, scheduler in self.schedulers.items():
            saved = dict(values["schedulers"].get(name, {}))
            for which, optimizer in self.optimizers.items():
                if optimizer is getattr(scheduler, "optimizer", None):
                    saved = _regrouped(saved, values["optimizers"][which], self._settings(which))
            scheduler.load_state_dict(scheduler.state_dict() | saved)
        self.losses.clear()  # those of later than what is gone back to begin anew
        for path, value in under(LOSS.rstrip("/"), tensors).items():
            loss, _, key = path.partition("/")
            self.losses.setdefault(loss, {})[key] = local_part(value).clone()

    def _load_optimizer(
        self, which: str, optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor], saved: Mapping[str, Any]
    ) -> None:
        for group, settings in zip(optimizer.param_groups, self.saved_groups(which, saved), strict=True):
            group.update(settings)
        counts_on_device = any(g.get("fused") or g.get("capturable") for g in optimizer.param_groups)
        for name, parameter in self._named(which):
            state, now = dict(saved["state"].get(name, {})), optimizer.state.get(parameter, {})
            for key, value in under(f"{OPTIMIZER}{which}/{name}", tensors).items():
                device = torch.device("cpu") if value.dim() == 0 and not counts_on_device else None
                if isinstance(present := now.get(key), Tensor):  # it may be offloaded
                    device = local_part(present).device
                state[key] = like_parameter(parameter, value, device)
            if state:
                optimizer.state[parameter] = state
            else:
                optimizer.state.pop(parameter, None)

    def stepped(self, which: str) -> list[list[Tensor]]:
        """Return the parameters that an optimizer steps, by its groups."""
        return [list(group["params"]) for group in self.optimizers[which].param_groups]

    def saved_groups(self, which: str, saved: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """Return for each group that an optimizer has now the settings that its parameters were saved with."""
        return [saved["groups"][place] for place in _places(saved, self._settings(which))]

    def _named(self, which: str) -> list[tuple[str, Tensor]]:
        """Return an optimizer's parameters with the module's names; one that is not the module's by its place."""
        names = {id(parameter): name for name, parameter in self.module.named_parameters()}
        return [
            (names.get(id(parameter), f"#{g}.{i}"), parameter)
            for g, group in enumerate(self.stepped(which))
            for i, parameter in enumerate(group)
        ]

    def _settings(self, which: str) -> dict[str, Any]:
        """Return an optimizer's class, its groups' parameters and settings, and of its state what is no tensor."""
        optimizer, named = self.optimizers[which], self._named(which)
        names = iter(named)
        return {
            "class": type(optimizer).__qualname__,
            "parameters": [[next(names)[0] for _ in group] for group in self.stepped(which)],
            "groups": [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups],
            "state": {
                name: plain
                for name, p in named
                if (plain := {k: v for k, v in optimizer.state.get(p, {}).items() if not isinstance(v, Tensor)})
            },
        }

    def loss_tensors(self) -> dict[str, Tensor]:
        """Return the states of losses by name."""
        return {f"{LOSS}{loss}/{key}": value for loss, state in self.losses.items() for key, value in state.items()}

    def module_tensors(self) -> dict[str, Tensor]:
        """Return every parameter and buffer by name, but those that the module leaves to its source."""
        left = getattr(self.module, "left_to_source", ())
        parameters = {
            f"parameter/{name}": marked(p.data, p) for name, p in self.module.named_parameters() if name not in left
        }
        buffers = {f"buffer/{name}": buffer for name, buffer in self.module.named_buffers() if name not in left}
        return parameters | buffers


def under(part: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors whose names begin with `part/`, without that."""
    return {name.removeprefix(f"{part}/"): t for name, t in tensors.items() if name.startswith(f"{part}/")}


def loss_states_of(module: nn.Module) -> dict[str, dict[str, Tensor]]:
    """Return the states that losses keep at a module, tensors by name; empty where none does."""
    if "loss_states" not in vars(module):
        module.loss_states = {}  # type: ignore[assignment]
    return vars(module)["loss_states"]  # type: ignore[no-any-return]


def checksums(module: nn.Module) -> dict[str, str]:
    """Return sha256 of this rank's weights, optimizer (hyper-parameters and schedulers too) and random state."""
    digests = {part: hashlib.sha256() for part in ("weights", "optimizer", "random")}
    state = State.of(module)
    for name, tensor in sorted(state.tensors().items()):
        digest = digests["optimizer" if name.startswith(OPTIMIZER) else "weights"]
        digest.update(name.encode())
        digest.update(bytes_of(local_part(tensor)).data)
    digests["optimizer"].update(repr(state.values()).encode())
    for key, value in sorted(random_state().items()):
        digests["random"].update(key.encode())
        digests["random"].update(bytes_of(value).data if isinstance(value, Tensor) else repr(value).encode())
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
    """Give by name what of `kind` an attribute is, or holds in a small dict or list, and (`inside`) is made of."""
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
    version, words, next_gauss = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "numpy_keys": torch.from_numpy(np.asarray(keys).astype(np.int64)),
        "numpy": [str(kind), int(position), int(has_gauss), float(gauss)],
        "python_words": torch.from_numpy(np.array(words, np.uint32).view(np.int32)),
        "python": [version, next_gauss],
    }


def set_random_state(state: Mapping[str, Any]) -> None:
    """Put back what `random_state` gave."""
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    kind, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((kind, state["numpy_keys"].numpy().astype(np.uint32), position, has_gauss, gauss))
    version, *words, next_gauss = state["python"]  # an older checkpoint has the words in between
    random.setstate(
        (version, tuple(words[0] if words else state["python_words"].numpy().view(np.uint32).tolist()), next_gauss)
    )


def unplain(value: Any, where: str = "") -> str | None:
    """Return where in `value` something lies that only code could read again; None where all is plain data."""
    if type(value) in (dict, OrderedDict, Counter, list, tuple, set, torch.Size):
        inside = value.items() if isinstance(value, dict) else enumerate(value)
        places = (unplain(key, where) or unplain(part, f"{where}[{key!r}]") for key, part in inside)
        return next(filter(None, places), None)
    plain = value is None or isinstance(value, Tensor) or type(value) in PLAIN
    return None if plain else where or "it"


def like_parameter(parameter: Tensor, value: Tensor, device: torch.device | None = None) -> Tensor:
    """Return a rank's part of an optimizer's tensor, or of a gradient, sharded like its parameter; on its device."""
    device = device or local_part(parameter.detach()).device
    if isinstance(parameter, DTensor) and tuple(value.shape) == tuple(parameter.to_local().shape):
        made = torch.zeros_like(parameter, dtype=value.dtype)
        made = made if made.device.type == device.type else made.to(device)
        made.to_local().copy_(value)
        return made
    return value.clone().to(device)


def _places(saved: Mapping[str, Any], present: Mapping[str, Any]) -> list[int]:
    """Return for each group of the optimizer there is now which of the saved ones had its parameters: one of them where
    there were several with the same settings, as tensor parallelism groups parameters anew; [] where there is none."""
    if saved["parameters"] == present["parameters"]:
        return list(range(len(present["parameters"])))
    place_of = {name: place for place, names in enumerate(saved["parameters"]) for name in names}
    held = [[place_of.get(name, -1) for name in names] for names in present["parameters"]]
    alike = all(-1 not in places and _alike(saved["groups"], places) for places in held)
    whole = sum(map(len, held)) == len(place_of)
    return [places[0] for places in held] if alike and whole and all(held) else []


def _alike(groups: Sequence[Mapping[str, Any]], places: Sequence[int]) -> bool:
    return all(groups[place] == groups[places[0]] for place in set(places))


def _regrouped(scheduler: Mapping[str, Any], saved: Mapping[str, Any], present: Mapping[str, Any]) -> dict[str, Any]:
    """Return the saved state of a scheduler with its numbers of each group (`base_lrs`, …) in the groups of now."""
    places, count = _places(saved, present), len(saved["groups"])
    return {
        key: [value[place] for place in places] if isinstance(value, list) and len(value) == count else value
        for key, value in scheduler.items()
    }


def _check_optimizer(which: str, saved: Mapping[str, Any], present: Mapping[str, Any]) -> None:
    """Refuse state of another optimizer: put into this one it would be neither."""
    if saved["class"] == present["class"] and (_places(saved, present) or not present["parameters"]):
        return
    then, now = (
        f"{state['class']} over {sum(map(len, state['parameters']))} parameters in {len(state['parameters'])} groups"
        for state in (saved, present)
    )
    differ = f"was {then} and is {now}" if then != now else f"({now}) has other parameters in its groups"
    raise CheckpointError(
        f"the saved state is of another optimizer: {which} {differ}. Make the one it was saved with, then go back"
    )
