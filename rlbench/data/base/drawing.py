"""What is imported when it is called for: packages that only some calls need, and who draws a value.

`rollouts.to_html()` and `history.plot()` ask here: the room that draws lies above `data`, and registers its painters.
"""

from __future__ import annotations

import importlib
from typing import Any

from rlbench.errors import DataError

_painters: dict[str, str] = {}


def needed(package: str, call: str) -> Any:
    """Import `package` for `call`; DataError naming what to install where it is missing."""
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as missing:
        name = (missing.name or package).partition(".")[0]
        raise DataError(f"{call} needs {name}: pip install {name}") from missing


def register(what: str, painter: str) -> None:
    """Let `painter` (`module:function`, imported on first use) draw `what`."""
    _painters[what] = painter


def drawn(what: str, *args: Any, **options: Any) -> Any:
    """What the painter of `what` makes of these arguments."""
    call = f"drawing {what!r}"
    if what not in _painters:
        needed("rlbench.notebook", call)  # a script that imported `rlbench.data` alone: it registers its painters
    if what not in _painters:
        raise DataError(f"nothing draws {what!r}; there are {', '.join(sorted(_painters))}")
    module, _, function = _painters[what].partition(":")
    return getattr(needed(module, call), function)(*args, **options)
