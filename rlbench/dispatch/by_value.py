"""How a user's code travels to the ranks: by value, with what it uses of the notebook and of local modules.

cloudpickle sends what a notebook defines by value, and what a module defines by its name: a rank would have to import
the module, and would keep the text it read first. A local module (a `.py` beside the notebook, not an installed
package) therefore travels by value as well, and so does what it imports from other local modules; after
`importlib.reload` its new text goes. What a function imports in its own body is not seen and stays a name.
"""

from __future__ import annotations

import functools
import hashlib
import io
import os
import sys
import threading
import types
from typing import Any

import cloudpickle
import cloudpickle.cloudpickle as internals

from rlbench.errors import EngineError, RLBenchError
from rlbench.sendable import why_not
from rlbench.traces import LIBRARIES

INSTALLED = ("site-packages", "dist-packages")
LEFT_OUT = ("__builtins__", "__loader__", "__spec__", "__cached__")
"""Entries of a module that belong to the process that imported it."""

_registering = threading.Lock()


def dumps(value: Any, what: str = "value", to: str = "the ranks", refusal: type[RLBenchError] = EngineError) -> bytes:
    """`value` by cloudpickle, local modules by value.

    Args:
        what: the part it plays, as its argument is called.
        to: where it goes.
        refusal: what is raised where it cannot go.

    Raises:
        EngineError (or `refusal`): it cannot be pickled; names what it holds that cannot. Of a module that holds such a
            thing, import the function itself (`from helpers import f`), which takes along only what `f` uses.
    """
    try:
        return _dumped(value, named=True)
    except Exception as error:  # whatever the objects it refers to raise
        raise refusal(why_not(what, value, error, to, functools.partial(_dumped, named=True))) from error


def identity(value: Any) -> str:
    """12 hexadecimal digits that change when the code of a function, a class or a value of one does, and what it
    refers to; the same in another process, and for the same cell run again."""
    return hashlib.sha256(_dumped(value, named=False)).hexdigest()[:12]


def is_local(module: Any) -> bool:
    """Whether a module is a user's own file: not installed, not the standard library, not rlbench."""
    file = getattr(module, "__file__", None)
    if not isinstance(file, str) or getattr(module, "__name__", "__main__") == "__main__":
        return False
    return _is_users(file)


@functools.lru_cache(maxsize=1 << 14)  # asked for every module there is, with every function that is sent
def _is_users(file: str) -> bool:
    if not os.path.isabs(file):  # made on the spot by a library, as torch.ops is
        return False
    return not file.startswith(LIBRARIES) and not any(part in file for part in INSTALLED)


def is_own(value: Any) -> bool:
    """Whether a function or a class is a user's: of the notebook or script, or of a local module."""
    module = sys.modules.get(getattr(value, "__module__", None) or "")
    return getattr(value, "__module__", None) == "__main__" or module is None or is_local(module)


def _dumped(value: Any, named: bool) -> bytes:
    with _registering:  # cloudpickle's list of such modules is one for the process
        known = cloudpickle.list_registry_pickle_by_value()
        own = [m for name, m in list(sys.modules.items()) if is_local(m) and m.__name__ == name and name not in known]
        for module in own:
            cloudpickle.register_pickle_by_value(module)
        try:
            with io.BytesIO() as file:
                _Pickler(file, named).dump(value)
                return file.getvalue()
        finally:
            for module in own:
                cloudpickle.unregister_pickle_by_value(module)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """`named=False` leaves out by which a process knows a class again: two equal classes give equal bytes."""

    def __init__(self, file: io.BytesIO, named: bool) -> None:
        super().__init__(file)
        self._named = named

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, types.ModuleType) and is_local(obj) and sys.modules.get(obj.__name__) is obj:
            state = {name: value for name, value in vars(obj).items() if name not in LEFT_OUT}
            return types.ModuleType, (obj.__name__,), state  # filled when it is there: two may import each other
        reduced = super().reducer_override(obj)
        if self._named or not isinstance(reduced, tuple) or reduced[0] is not internals._make_skeleton_class:
            return reduced
        made = reduced[1]
        return (reduced[0], (*made[:4], None, *made[5:]), *reduced[2:])
