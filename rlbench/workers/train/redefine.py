"""The verbs of a rank that give the live module another class: new code, the same weights, optimizer and random state.

FSDP2 gives a module it shards a class of its own, `FSDP<Name>(FSDPModule, Name)`; what a user redefines is the `Name`
below it. Methods added one by one lie in a layer between the two, made anew each time, so that a hundred edits leave
one class, not a hundred.

    FSDPMine(FSDPModule, layer)  ->  layer(Mine) with the added methods  ->  Mine, the user's class  ->  bases
"""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import cloudpickle
from torch import nn
from torch.distributed.fsdp import FSDPModule

from rlbench.checkpoint.rank_state import random_state, set_random_state
from rlbench.errors import EngineError, nearest
from rlbench.nn import BaseTrainModule, callable_methods, device
from rlbench.nn.base import renew_forward
from rlbench.nn.methods import FRAMEWORKS, HOOKS
from rlbench.user_code import user_code

if TYPE_CHECKING:
    from rlbench.strategies.fsdp2 import FSDPV2Strategy
    from rlbench.trainers.update.policy_step import PolicyStep

LAYER = "_rlbench_layer"
"""Where a class of ours keeps its `Layer`."""
OWN = ("device", "rank", "world_size", "strategy", "stop_requested")
"""What a module is told of its rank by these names."""


class RedefineVerbs:
    """What `TrainRank` inherits; all verbs are collective, and change all ranks or none."""

    _policy: PolicyStep
    _strategy: FSDPV2Strategy
    _methods: frozenset[str]

    def _built(self) -> BaseTrainModule:
        raise NotImplementedError

    def redefine(self, blob: bytes, identity: str, replaced: str | None, reserved: Sequence[str]) -> dict[str, Any]:
        """Put a class in the place of the one of its name, in the module itself or in the modules inside it.

        Args:
            blob: the class, by value.
            identity: of its code; the same as that of the class in place changes nothing.
            replaced: name of the class in place, where it has another one.
            reserved: names of the engine's verbs, which no method may take.

        Returns:
            `changed`, `modules` (how many have it now), `methods` of the module, `notes` for the user.

        Raises:
            EngineError: it cannot take that place; no rank is changed.
        """
        module = self._built()
        found = self._strategy.control.together(
            "redefining a class", lambda: _unpickled_change(module, blob, identity, replaced, reserved)
        )
        return self._changed(found)

    def add_method(self, blob: bytes, identity: str, reserved: Sequence[str]) -> dict[str, Any]:
        """Add one method to the module's class, or replace it; returns and raises as `redefine`."""
        module = self._built()
        found = self._strategy.control.together(
            "adding a method", lambda: _unpickled_method(module, blob, identity, reserved)
        )
        return self._changed(found)

    def _changed(self, found: Change) -> dict[str, Any]:
        module = self._built()
        for part, cls in found.classes:
            part.__class__ = cls
        if found.classes:
            renew_forward(module)
            self._policy.renew()
        methods = callable_methods(type(module))
        self._methods = frozenset(info["name"] for info in methods)
        return {
            "changed": bool(found.classes),
            "modules": found.modules,
            "methods": methods,
            "notes": found.notes,
        }


@dataclass(frozen=True)
class Layer:
    """What lies on a user's class. `identity`: of that class, empty for the one it was built with. `added`: methods by
    name, each with its identity."""

    identity: str = ""
    added: Mapping[str, tuple[Any, str]] = field(default_factory=dict)


class Change:
    """What is to be done on this rank: `classes`, the new class of each module, made and tried. None: all is as
    wanted."""

    def __init__(self, modules: int, notes: Sequence[str] = ()) -> None:
        self.modules = modules
        self.notes = list(notes)
        self.classes: list[tuple[nn.Module, type]] = []

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


def _unpickled_change(
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
    before = random_state()
    try:
        notes = _check_structure(cls, places)
    finally:
        set_random_state(before)
    change = Change(len(places), notes)
    for part in places:
        added = {name: own for name, own in _layer(part).added.items() if not _defines(cls, name)}
        change.give(part, cls, Layer(identity, added))
    return change


def _unpickled_method(module: BaseTrainModule, blob: bytes, identity: str, reserved: Sequence[str]) -> Change:
    given = _loaded(blob, "the method")
    function = given.__func__ if isinstance(given, staticmethod | classmethod) else given
    if not isinstance(function, types.FunctionType) or function.__name__ == "<lambda>":
        raise EngineError(f"a method is made of a function with a name, not of {given!r}: def name(self, …): …")
    name = function.__name__
    if not isinstance(given, staticmethod) and not inspect.signature(function).parameters:
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
    change = Change(1, _not_run(name))
    change.give(module, _user_class(module), replace(layer, added={**layer.added, name: (given, identity)}))
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


# -- the classes of a live module


def _live_class(module: nn.Module, user_class: type, layer: Layer) -> type:
    """The user's class with our layer on it and, where the module is sharded, FSDP's as fully_shard makes it."""
    names = {"__module__": "__main__", "__qualname__": user_class.__qualname__, "__doc__": user_class.__doc__}
    methods = {name: given for name, (given, _) in layer.added.items()}
    kind: Any = type(user_class)
    ours: type = kind(user_class.__name__, (user_class,), {**names, LAYER: layer, **methods})
    if not isinstance(module, FSDPModule):
        return ours
    kept = {"__deepcopy__": vars(type(module))["__deepcopy__"], "__module__": type(module).__module__}
    kind = type(type(module))
    live: type = kind(f"FSDP{user_class.__name__}", (FSDPModule, ours), kept)
    return live


def _below_fsdp(module: nn.Module) -> type:
    """What fully_shard was given: its own class comes first, then FSDPModule, then that."""
    return type(module).__mro__[2] if isinstance(module, FSDPModule) else type(module)


def _user_class(module: nn.Module) -> type:
    cls = _below_fsdp(module)
    return cls.__bases__[0] if LAYER in vars(cls) else cls


def _layer(module: nn.Module) -> Layer:
    found: Layer = vars(_below_fsdp(module)).get(LAYER) or Layer()
    return found


def _name(cls: type) -> str:
    """The qualified name, without the functions it was defined in."""
    return cls.__qualname__.rpartition("<locals>.")[2]


def _framework(cls: type) -> bool:
    return cls is object or cls.__module__.split(".")[0] in FRAMEWORKS


def _defines(cls: type, name: str) -> bool:
    return any(name in vars(owner) for owner in cls.__mro__ if not _framework(owner))


# -- whether a class can take a place


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
    before, taken = {info["name"] for info in callable_methods(old)}, {*reserved, *_parts(module)}
    hidden = [i["name"] for i in callable_methods(cls) if i["name"] in taken and i["name"] not in before]
    hidden += [name for name in OWN if _defines(cls, name) and not _defines(old, name)]
    if hidden:
        raise EngineError(
            f"{cls.__name__} defines {', '.join(hidden)}, which the engine or the live module has already under "
            "that name; give it another."
        )


def _check_structure(cls: type, places: Sequence[nn.Module]) -> list[str]:
    """Refuse a constructor that would make other parameters; what is to be said of those that are not run."""
    notes = []
    for old in dict.fromkeys(_user_class(part) for part in places):
        if not _same_function(old.__init__, cls.__init__):  # type: ignore[misc]
            part = next(part for part in places if _user_class(part) is old)
            _check_parameters(cls, part)
            notes += _not_run("__init__", cls.__name__)
        if not _same_function(_hook(old), _hook(cls)):
            notes += _not_run("on_weights_materialized", cls.__name__)
    return notes


def _not_run(name: str, owner: str = "") -> list[str]:
    told = {
        "__init__": "layers, parameters and attributes stay as they were built",
        "on_weights_materialized": "optimizer and attributes stay as they are",
    }
    shown = f"{owner}.{name}" if owner else name
    return [f"{shown} changed and is not run again: {told[name]}"] if name in told else []


def _hook(cls: type) -> Any:
    return getattr(cls, "on_weights_materialized", None)


def _check_parameters(cls: type, part: nn.Module) -> None:
    old = _user_class(part)
    live = {name: tuple(p.shape) for name, p in part.named_parameters(remove_duplicate=False)}
    if not hasattr(cls, "_from_config") and _made(old, part) != live:
        return  # it was built with arguments that nobody knows now: its shapes say nothing
    made = _made(cls, part)
    if made is None or made == live:
        return
    differ = [name for name in {**live, **made} if live.get(name) != made.get(name)]
    name = differ[0]
    seen = {True: f"{made.get(name)}, not {live.get(name)}"}.get(name in made and name in live)
    raise EngineError(
        f"the parameters of the new {cls.__name__} do not fit the live ones: {len(differ)} differ, first {name!r} "
        f"({seen or ('only in the new class' if name in made else 'missing in the new class')}). A class is redefined "
        "around the weights there are; build another engine for other parameters."
    )


def _made(cls: type, part: nn.Module) -> dict[str, tuple[int, ...]] | None:
    """Shapes of the parameters the class makes, on meta; None where it needs arguments that are not known."""
    config = getattr(part, "config", None)
    make: Any = getattr(cls, "_from_config", None)
    needed = [
        p
        for p in list(inspect.signature(cls.__init__).parameters.values())[1:]  # type: ignore[misc]
        if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    ]
    if (make is None or config is None) and needed:
        return None
    with device("meta"):
        made = cls() if make is None or config is None else make(config)
    return {name: tuple(p.shape) for name, p in made.named_parameters(remove_duplicate=False)}


def _same_function(one: Any, other: Any) -> bool:
    """Whether two functions do the same, wherever they were typed."""
    first, second = (getattr(f, "__code__", None) for f in (one, other))
    if one is other or first is None or second is None:
        return one is other
    defaults = [(f.__defaults__, f.__kwdefaults__) for f in (one, other)]
    return _same_code(first, second) and bool(defaults[0] == defaults[1])


def _same_code(one: types.CodeType, other: types.CodeType) -> bool:
    if (one.co_code, one.co_names, len(one.co_consts)) != (other.co_code, other.co_names, len(other.co_consts)):
        return False
    return all(map(_same_constant, one.co_consts, other.co_consts))


def _same_constant(one: Any, other: Any) -> bool:
    if isinstance(one, types.CodeType) and isinstance(other, types.CodeType):
        return _same_code(one, other)
    return type(one) is type(other) and bool(one == other)
