"""The component of a rank that gives the live module another class: new code, the same weights, optimizer and random
state.

FSDP2 gives a module it shards a class of its own, `FSDP<Name>(FSDPModule, Name)`; what a user redefines is the `Name`
below it. Methods added one by one lie in a layer between the two, made anew each time:

    FSDPMine(FSDPModule, layer)  ->  layer(Mine) with the added methods  ->  Mine, the user's class  ->  bases
"""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import cloudpickle
from torch import nn
from torch.distributed.fsdp import FSDPModule

from rlbench.checkpoint.rank_state import random_state, set_random_state
from rlbench.errors import EngineError, nearest
from rlbench.nn import BaseTrainModule, callable_methods, callable_names, device
from rlbench.nn.base import FRAMEWORKS, HOOKS, renew_forward
from rlbench.strategies.optim.gradients import full_shape
from rlbench.user_code import user_code
from rlbench.workers.train.parts import RankParts

LAYER = "_rlbench_layer"
"""Where a class of ours keeps its `Layer`."""
NOT_RUN_AGAIN = {
    "__init__": "layers, parameters and attributes stay as they were built",
    "on_weights_materialized": "optimizer and attributes stay as they are",
}
VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
OWN = ("device", "rank", "world_size", "strategy", "stop_requested")
"""What a module is told of its rank by these names."""


class Redefining:
    """Verbs of a built rank; all are collective, and change all ranks or none."""

    def __init__(self, parts: RankParts) -> None:
        self._parts = parts

    def redefine(self, blob: bytes, identity: str, replaced: str | None, reserved: Sequence[str]) -> dict[str, Any]:
        """Put a class (`blob`, of code `identity`) in the place of the one of its name, or of `replaced`, in the module
        or its parts; no method may take a name that is `reserved`."""
        return self._change("redefining a class", _class_change, blob, identity, replaced, reserved)

    def add_method(self, blob: bytes, identity: str, reserved: Sequence[str]) -> dict[str, Any]:
        """Add one method to the module's class, or replace it; returns and raises as `redefine`."""
        return self._change("adding a method", _method_change, blob, identity, reserved)

    def _change(self, doing: str, plan: Callable[..., Change], *asked: Any) -> dict[str, Any]:
        module = self._parts.module
        change: Change = self._parts.strategy.control.together(doing, lambda: plan(module, *asked))
        for part, cls in change.classes:
            part.__class__ = cls
        if change.classes:
            renew_forward(module)
            self._parts.policy.renew()
        return {
            "changed": bool(change.classes),
            "modules": change.modules,
            "methods": callable_methods(type(module)),
            "notes": change.notes,
        }


@dataclass(frozen=True)
class Layer:
    """What lies on a user's class: its `identity` (empty as built), and `added` methods by name with theirs."""

    identity: str = ""
    added: Mapping[str, tuple[Any, str]] = field(default_factory=dict)


@dataclass
class Change:
    """What is to be done on this rank: the new class of each module, made and tried; none: all is as wanted."""

    modules: int
    notes: list[str] = field(default_factory=list)
    classes: list[tuple[nn.Module, type]] = field(default_factory=list)

    def give(self, module: nn.Module, user_class: type, layer: Layer) -> None:
        """Plan a class for one module; raises EngineError where Python does not allow it."""
        live = _live_class(module, user_class, layer)
        before = type(module)
        try:
            module.__class__ = live
        except TypeError as error:
            raise EngineError(f"{user_class.__name__} cannot take the place of {before.__name__}: {error}.") from error
        module.__class__ = before
        self.classes.append((module, live))


def _class_change(
    module: BaseTrainModule, blob: bytes, identity: str, replaced: str | None, reserved: Sequence[str]
) -> Change:
    cls = _loaded(blob, "the class")
    if not isinstance(cls, type) or not issubclass(cls, nn.Module):
        raise EngineError(f"redefine takes a class of a torch module, not {cls!r}.")
    wanted = replaced or _name(cls)
    places = [part for part in module.modules() if _name(_user_class(part)) == wanted]
    if not places:
        known = list(dict.fromkeys(_name(_user_class(part)) for part in module.modules()))
        raise EngineError(
            f"no part of the live module is a {wanted!r}{nearest(wanted, known)}; it has {', '.join(known)}. Where the "
            f"class has a new name, say which it takes the place of: redefine({cls.__name__}, replace='…')."
        )
    if all(_layer(part).identity == identity for part in places):
        return Change(len(places))
    olds = list(dict.fromkeys(_user_class(part) for part in places))
    for old in olds:
        _check_bases(cls, old)
    if module in places:
        _check_names(cls, module, reserved)
    pairs = [(old, name) for old in olds for name in NOT_RUN_AGAIN]
    changed = [n for old, n in pairs if not _same_function(getattr(old, n, None), getattr(cls, n, None))]
    if "__init__" in changed:
        before = random_state()
        try:
            for old in olds:
                _check_parameters(cls, next(part for part in places if _user_class(part) is old))
        finally:
            set_random_state(before)
    change = Change(len(places), [_not_run(cls, name) for name in dict.fromkeys(changed)])
    for part in places:
        added = {name: own for name, own in _layer(part).added.items() if not _defines(cls, name)}
        change.give(part, cls, Layer(identity, added))
    return change


def _method_change(module: BaseTrainModule, blob: bytes, identity: str, reserved: Sequence[str]) -> Change:
    method = _loaded(blob, "the method")
    function = method.__func__ if isinstance(method, staticmethod | classmethod) else method
    if not isinstance(function, types.FunctionType) or function.__name__ == "<lambda>":
        raise EngineError(f"a method is made of a function with a name, not of {method!r}: def name(self, …): …")
    name = function.__name__
    if not isinstance(method, staticmethod) and not inspect.signature(function).parameters:
        raise EngineError(f"{name}() takes no argument; a method's first one is the module: def {name}(self, …).")
    owner = next((c for c in _user_class(module).__mro__ if name in vars(c)), None)
    if name in reserved or (owner is not None and _framework(owner) and name not in HOOKS):
        whose = "the engine" if name in reserved else owner.__name__ if owner else ""
        raise EngineError(f"{name!r} is a method of {whose} already and would hide it; give it another name.")
    if name in _parts(module):
        raise EngineError(f"{name!r} is a part or an attribute of the live module already; give it another name.")
    layer = _layer(module)
    if layer.added.get(name, (None, ""))[1] == identity:
        return Change(1)
    change = Change(1, [_not_run(_user_class(module), name)] if name in NOT_RUN_AGAIN else [])
    change.give(module, _user_class(module), replace(layer, added={**layer.added, name: (method, identity)}))
    return change


def _loaded(blob: bytes, what: str) -> Any:
    try:
        with user_code():
            return cloudpickle.loads(blob)
    except Exception as error:  # whatever the user's own modules raise while they are imported
        raise EngineError(
            f"{what} cannot be rebuilt on the rank ({type(error).__name__}: {error}); define what it needs in the "
            "notebook, or install it where the ranks run."
        ) from error


def _live_class(module: nn.Module, user_class: type, layer: Layer) -> type:
    """The user's class with our layer on it and, where the module is sharded, FSDP's as fully_shard makes it."""
    names = {"__module__": "__main__", "__qualname__": user_class.__qualname__, "__doc__": user_class.__doc__}
    methods = {name: method for name, (method, _) in layer.added.items()}
    kind: Any = type(user_class)
    ours: type = kind(user_class.__name__, (user_class,), {**names, LAYER: layer, **methods})
    if not isinstance(module, FSDPModule):
        return ours
    of_fsdp = {"__deepcopy__": vars(type(module))["__deepcopy__"], "__module__": type(module).__module__}
    kind = type(type(module))
    return kind(f"FSDP{user_class.__name__}", (FSDPModule, ours), of_fsdp)


def _below_fsdp(module: nn.Module) -> type:
    """What fully_shard was given: its own class comes first, then FSDPModule, then that."""
    return type(module).__mro__[2] if isinstance(module, FSDPModule) else type(module)


def _user_class(module: nn.Module) -> type:
    cls = _below_fsdp(module)
    return cls.__bases__[0] if LAYER in vars(cls) else cls


def _layer(module: nn.Module) -> Layer:
    return vars(_below_fsdp(module)).get(LAYER) or Layer()


def _name(cls: type) -> str:
    """The qualified name, without the functions it was defined in."""
    return cls.__qualname__.rpartition("<locals>.")[2]


def _framework(cls: type) -> bool:
    return cls is object or cls.__module__.split(".")[0] in FRAMEWORKS


def _defines(cls: type, name: str) -> bool:
    return any(name in vars(owner) for owner in cls.__mro__ if not _framework(owner))


def _check_bases(cls: type, old: type) -> None:
    """Everything of torch's, transformers' and ours that the live module is, the new class must be, too."""
    lost = [
        base.__name__
        for base in old.__mro__
        if _framework(base)
        and base not in cls.__mro__
        and getattr(sys.modules.get(base.__module__), base.__name__, None) is base  # not one made on the spot
    ]
    if lost:
        raise EngineError(
            f"{cls.__name__} does not inherit from {', '.join(lost)}, and the live {old.__name__} does: its weights "
            "are laid out for that. Build another engine for another architecture."
        )


def _parts(module: nn.Module) -> set[str]:
    """Names under which the module holds layers, parameters and attributes; `forward` is our guard's."""
    return {*module._modules, *module._parameters, *module._buffers, *vars(module)} - {"forward"}


def _check_names(cls: type, module: nn.Module, reserved: Sequence[str]) -> None:
    old = _user_class(module)
    before, taken = set(callable_names(old)), {*reserved, *_parts(module)}
    hidden = [name for name in callable_names(cls) if name in taken and name not in before]
    hidden += [name for name in OWN if _defines(cls, name) and not _defines(old, name)]
    if hidden:
        raise EngineError(
            f"{cls.__name__} defines {', '.join(hidden)}, which the engine or the live module has already under "
            "that name; give it another."
        )


def _check_parameters(cls: type, part: nn.Module) -> None:
    """Refuse a constructor that would make other parameters than the live ones."""
    live = {name: full_shape(p) for name, p in part.named_parameters(remove_duplicate=False)}
    if not hasattr(cls, "_from_config") and _shapes_made(_user_class(part), part) != live:
        return  # it was built with arguments that nobody knows now: its shapes say nothing
    made = _shapes_made(cls, part)
    differ = [] if made is None else [name for name in {**live, **made} if live.get(name) != made.get(name)]
    if made is not None and differ:
        name = differ[0]
        seen = f"{made.get(name, 'missing')} in the new class, {live.get(name, 'missing')} in the live module"
        raise EngineError(
            f"the parameters of the new {cls.__name__} do not fit the live ones: {len(differ)} differ, first {name!r} "
            f"({seen}). A class is redefined around the weights there are; build another engine for other parameters."
        )


def _shapes_made(cls: type, part: nn.Module) -> dict[str, tuple[int, ...]] | None:
    """Return the shapes of the parameters a class makes, on meta; None where it needs arguments nobody knows."""
    config, make = getattr(part, "config", None), getattr(cls, "_from_config", None)
    from_config = make is not None and config is not None
    parameters = list(inspect.signature(cls.__init__).parameters.values())[1:]  # type: ignore[misc]
    if not from_config and any(p.default is p.empty and p.kind not in VARIADIC for p in parameters):
        return None
    with device("meta"):
        made = make(config) if from_config else cls()  # type: ignore[misc]
    return {name: tuple(p.shape) for name, p in made.named_parameters(remove_duplicate=False)}


def _not_run(owner: type, name: str) -> str:
    return f"{owner.__name__}.{name} changed and is not run again: {NOT_RUN_AGAIN[name]}"


def _same_function(one: Any, other: Any) -> bool:
    if one is other or not (hasattr(one, "__code__") and hasattr(other, "__code__")):
        return one is other
    first, second = ((_plain(f.__code__), f.__defaults__, f.__kwdefaults__) for f in (one, other))
    return bool(first == second)


def _plain(value: Any) -> Any:
    """A code object without its place in a file; a constant with its type, as 1 and True are equal."""
    if isinstance(value, types.CodeType):
        return value.co_code, value.co_names, [_plain(constant) for constant in value.co_consts]
    return type(value), value
