"""Who draws the progress of a call. The rooms that show things register here, so the engines need not know them."""

from __future__ import annotations

import pkgutil
from typing import Any, Protocol

from rlbench.dispatch.protocol import Progress


class View(Protocol):
    """Called every poll with the progress of the running workers, and once at the end with the verb's result (None
    where it failed or was stopped)."""

    def __call__(self, progress: list[Progress]) -> None: ...

    def close(self, result: Any) -> None: ...


_factories: dict[str, str] = {}


def register(kind: str, factory: str) -> None:
    """Let `factory` (`module:Class`, imported on first use) draw calls of this kind."""
    _factories[kind] = factory


def make(kind: str, **facts: Any) -> View | None:
    """Make a view for one call; None where nobody registered."""
    if kind not in _factories:
        return None
    return pkgutil.resolve_name(_factories[kind])(**facts)
