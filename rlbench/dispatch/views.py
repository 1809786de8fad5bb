"""Who draws the progress of a call. The rooms that show things register here, so the engines need not know them."""

from __future__ import annotations

import importlib
from typing import Any, Protocol

from rlbench.dispatch.protocol import Progress


class View(Protocol):
    """Called every poll with the progress of the running workers (`report` where none runs), and once at the end.

    The end has the verb's result. None where it failed or was stopped, also after the end of what it had by then.
    """

    def __call__(self, progress: list[Progress]) -> None: ...

    def report(self, done: int, total: int) -> None: ...

    def close(self, result: Any) -> None: ...


_factories: dict[str, str] = {}


def register(kind: str, factory: str) -> None:
    """Let `factory` (`module:Class`, imported on first use) draw calls of this kind."""
    _factories[kind] = factory


def make(kind: str, **facts: Any) -> View | None:
    """A view for one call; None where nobody registered."""
    path = _factories.get(kind)
    if path is None:
        return None
    module, _, attribute = path.partition(":")
    view: View = getattr(importlib.import_module(module), attribute)(**facts)
    return view
