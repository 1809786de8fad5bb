"""How a value was made: the call that gave it and what that was called on, back to the rollout it came from.

    scored = rollouts.score(reward)         # origin(scored) is Origin("score", rollouts' origin, (reward,), {})

Kept beside the values, not in them, and weakly: a value that was made otherwise (`dataclasses.replace`, by hand, in
another process) has no origin, rather than that of the value it was made from.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, eq=False)
class Origin:
    """One call.

    Attributes:
        call: name of the method, or "module.function" of a function.
        of: what the method was called on: its origin, or the value itself where it has none. None for a function.
        args, kwargs: as they were given, values replaced by their origins where they have one.
    """

    call: str
    of: Any = None
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


_known: weakref.WeakKeyDictionary[Any, Origin] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def origin(value: Any) -> Origin | None:
    """How `value` was made; None where nobody saw it."""
    try:
        with _lock:
            return _known.get(value)
    except TypeError:  # not hashable, or not to be referred to weakly: no value of ours
        return None


def remember(value: R, made: Origin) -> R:
    """Note how a value was made; returns the value."""
    with _lock:
        _known[value] = made
    return value


def traced(method: Callable[P, R]) -> Callable[P, R]:
    """Of a method that gives a new value of its own kind: note the call as that value's origin."""

    @functools.wraps(method)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        value = method(*args, **kwargs)
        if value is args[0] or not hasattr(type(value), "__weakref__"):
            return value
        given = tuple(map(_found, args[1:])), {name: _found(one) for name, one in kwargs.items()}
        return remember(value, Origin(method.__name__, _found(args[0]), *given))

    return called


def same_origin(method: Callable[P, R]) -> Callable[P, R]:
    """Of a method that only adds what is looked at: the new value has the origin of the old one."""

    @functools.wraps(method)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        value, known = method(*args, **kwargs), origin(args[0])
        return value if known is None else remember(value, known)

    return called


def traced_function(function: Callable[P, R]) -> Callable[P, R]:
    """Of a function that makes one value of others: note the call as that value's origin."""
    name = f"{function.__module__}.{function.__name__}"

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        given = tuple(map(_found, args)), {key: _found(one) for key, one in kwargs.items()}
        return remember(function(*args, **kwargs), Origin(name, None, *given))

    return called


def _found(value: Any) -> Any:
    """The origin of a value that has one, also inside a list or a tuple; else the value."""
    if isinstance(value, list | tuple) and any(origin(one) is not None for one in value):
        return [_found(one) for one in value]
    known = origin(value)
    return value if known is None else known
