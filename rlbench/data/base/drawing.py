"""Who draws a value. `rollouts.to_html()` and `history.plot()` ask here: the room that draws lies above `data`."""

from __future__ import annotations

import importlib
from typing import Any

from rlbench.errors import DataError

_painters: dict[str, str] = {}


def register(what: str, painter: str) -> None:
    """Let `painter` (`module:function`, imported on first use) draw `what`."""
    _painters[what] = painter


def drawn(what: str, *args: Any, **options: Any) -> Any:
    """What the painter of `what` makes of these arguments.

    Where nobody has registered yet, as in a script that imported `rlbench.data` alone, `rlbench.notebook` is imported:
    it registers its painters.
    """
    if what not in _painters:
        _import("rlbench.notebook", what)
    path = _painters.get(what)
    if path is None:
        raise DataError(
            f"nothing draws {what!r}; there are {', '.join(sorted(_painters)) or 'no painters'}: "
            "rlbench.data.base.drawing.register(what, 'module:function') adds one"
        )
    module, _, function = path.partition(":")
    return getattr(_import(module, what), function)(*args, **options)


def _import(module: str, what: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as missing:
        raise DataError(
            f"drawing {what!r} needs the package {missing.name!r}, which is not installed here: "
            f"pip install {(missing.name or '').partition('.')[0]}, or draw in the notebook instead of on a worker"
        ) from missing
