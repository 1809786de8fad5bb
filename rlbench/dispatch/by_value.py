"""How a user's code travels to the ranks: by value, local modules (a `.py` beside the notebook) in their newest text
too. What a function imports in its own body stays a name."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import io
import os
import sys
import threading
import types
from collections.abc import Mapping
from typing import Any

import cloudpickle
import cloudpickle.cloudpickle as internals

from rlbench.errors import EngineError, RLBenchError
from rlbench.sendable import why_not
from rlbench.traces import LIBRARIES

INSTALLED = ("site-packages", "dist-packages")
OF_ITS_PROCESS = ("__builtins__", "__loader__", "__spec__", "__cached__")

PLAIN = (str, int, float, bool, bytes, type(None))

_registering = threading.Lock()


def dumps(value: Any, what: str = "value", to: str = "the ranks", refusal: type[RLBenchError] = EngineError) -> bytes:
    """Pickle `value`, local modules by value; `what` it is and where it goes `to` stand in the `refusal`."""
    try:
        return _pickled(value, named=True)
    except Exception as error:  # whatever the objects it refers to raise
        raise refusal(why_not(what, value, error, to, functools.partial(_pickled, named=True))) from error


def identity(value: Any) -> str:
    """Return 12 hexadecimal digits of the code and values that a value refers to, the same in another process."""
    return hashlib.sha256(_pickled(value, named=False)).hexdigest()[:12]


def is_local(module: Any) -> bool:
    """Whether a module is a user's own file: not installed, not the standard library, not rlbench."""
    file = getattr(module, "__file__", None)
    return isinstance(file, str) and getattr(module, "__name__", "__main__") != "__main__" and _is_users(file)


@functools.lru_cache(maxsize=1 << 14)  # asked for every module there is, with every function that is sent
def _is_users(file: str) -> bool:
    """A relative path was made on the spot by a library, as torch.ops is."""
    return os.path.isabs(file) and not file.startswith(LIBRARIES) and not any(part in file for part in INSTALLED)


def is_own(value: Any) -> bool:
    """Whether a function or a class is a user's: of the notebook or script, or of a local module."""
    module = sys.modules.get(getattr(value, "__module__", None) or "")
    return getattr(value, "__module__", None) == "__main__" or module is None or is_local(module)


def _pickled(value: Any, named: bool) -> bytes:
    with _registering:  # cloudpickle's list of such modules is one for the process
        known = cloudpickle.list_registry_pickle_by_value()
        own = [module for module in _own_modules() if module.__name__ not in known]
        for module in own:
            cloudpickle.register_pickle_by_value(module)
        try:
            with io.BytesIO() as file:
                _Pickler(file, named).dump(value)
                return file.getvalue()
        finally:
            for module in own:
                cloudpickle.unregister_pickle_by_value(module)


def _own_modules() -> list[Any]:
    """Return the user's modules; there are thousands of others, and each is looked at once.

    Nothing is looked at where no module has come: one that has, or has come anew, is the last in `sys.modules`, and
    what matters of a module is its name. `dict.copy` is one step for the interpreter. `list(….items())` is not, nor
    is asking the dict itself for its last: another thread may run meanwhile, and import.
    """
    global _seen
    modules = sys.modules.copy()
    seen = (len(modules), next(reversed(modules)))
    if _seen[0] != seen:
        _seen = (seen, _looked_through(modules))
    return _seen[1]


def _looked_through(modules: Mapping[str, Any]) -> list[Any]:
    own = []
    for name, module in modules.items():
        if _others.get(name) is module:
            continue
        if is_local(module) and module.__name__ == name:
            own.append(module)
        else:
            _others[name] = module
    return own


_others: dict[str, Any] = {}
_seen: tuple[tuple[int, str], list[Any]] = ((0, ""), [])


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """`named=False` leaves out by which a process knows a class again: two equal classes give equal bytes."""

    def __init__(self, file: io.BytesIO, named: bool) -> None:
        super().__init__(file)
        self._named = named

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, types.ModuleType) and is_local(obj) and sys.modules.get(obj.__name__) is obj:
            state = {name: value for name, value in vars(obj).items() if name not in OF_ITS_PROCESS}
            return types.ModuleType, (obj.__name__,), state  # filled when it is there: two may import each other
        if not self._named and hasattr(type(obj), "__identity__"):  # it says what it is: to pickle it would cost
            return str, (obj.__identity__(),)
        reduced = super().reducer_override(obj)
        if self._named or not isinstance(reduced, tuple) or reduced[0] is not internals._make_skeleton_class:
            return reduced
        made = reduced[1]
        return (reduced[0], (*made[:4], None, *made[5:]), *reduced[2:])


def is_constant(value: Any) -> bool:
    """Whether a value cannot change: a frozen dataclass of rlbench's own with plain fields."""
    kind = type(value)
    if not (dataclasses.is_dataclass(kind) and kind.__dataclass_params__.frozen):  # type: ignore[attr-defined]
        return False
    fields = dataclasses.fields(kind)
    return kind.__module__.startswith("rlbench.") and all(isinstance(getattr(value, f.name), PLAIN) for f in fields)


def changes_itself(names: list[str]) -> str:
    """Return the end of a sentence that begins with what changed, and what to do about it."""
    return (
        f"changes itself when it is called ({', '.join(names)}): every rank calls a copy of its own, micro-batch by "
        "micro-batch, and what one copy learns is lost to the others and to the next step. Return what you want to "
        "keep as a metric, and make the next step's loss from it: dataclasses.replace(loss, baseline=metrics.baseline)."
        " A loss may also keep tensors in self.state, and change them in update(self, metrics), once per step."
    )


class Watch:
    """Says what of `value` has changed since it was unpickled from `blob`; what changed is lost to all other copies."""

    def __init__(self, blob: bytes, value: Any) -> None:
        self._blob, self._value = blob, value
        self._identity = None if is_constant(value) else identity(value)

    def changed(self) -> list[str]:
        """Names of the attributes, globals and enclosing variables that differ now; empty where nothing does."""
        if self._identity is None or identity(self._value) == self._identity:
            return []
        first, now = _held_parts(cloudpickle.loads(self._blob)), _held_parts(self._value)
        return [name for name in now if name not in first or now[name] != first[name]] or ["something it refers to"]


def _held_parts(value: Any) -> dict[str, str]:
    """Identity of each thing by name that a value, or the function it is, holds."""
    if isinstance(value, functools.partial):
        return _held_parts(value.func)
    held: dict[str, Any] = {}
    if inspect.ismethod(value):
        held |= vars(value.__self__)
        value = value.__func__
    if inspect.isfunction(value):
        variables = inspect.getclosurevars(value)
        held |= {**variables.globals, **variables.nonlocals, **vars(value)}
    elif hasattr(value, "__dict__"):
        held |= vars(value)
        held |= inspect.getclosurevars(type(value).__call__).globals if inspect.isfunction(type(value).__call__) else {}
    return {name: identity(part) for name, part in held.items() if not inspect.ismodule(part)}
