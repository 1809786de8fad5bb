"""The user's methods as attributes of an engine: signature, docstring and completion, without having the class."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


def proxy(info: dict[str, Any], call: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls the method on the ranks and looks like it to `help()` and completion."""

    def method(*args: Any, **kwargs: Any) -> Any:
        signature = getattr(method, "__signature__", None)
        if signature is not None:
            signature.bind(*args, **kwargs)  # a wrong argument is an error here, not on the ranks
        return call(*args, **kwargs)

    method.__name__ = method.__qualname__ = info["name"]
    method.__doc__ = info["doc"] or f"{info['name']}{info['signature']}, on every rank; returns one result per rank."
    signature = _signature(info["signature"])
    if signature is not None:
        method.__signature__ = signature  # type: ignore[attr-defined]
    return method


def _signature(text: str) -> inspect.Signature | None:
    """Parse a signature's text; None where a default cannot be written as source (any call is then let through)."""
    namespace: dict[str, Any] = {}
    try:
        exec(f"from __future__ import annotations\ndef f{text}: ...", namespace)
    except (SyntaxError, NameError):
        return None
    return inspect.signature(namespace["f"])
