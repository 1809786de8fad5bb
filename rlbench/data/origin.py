"""How a value was made: the call that gave it and what that was called on, back to the rollout it came from.

    scored = rollouts.score(reward)         # origin(scored) is Origin("score", rollouts' origin, (reward,), {})

Kept beside the values, not in them, and weakly. A value that was made otherwise (`dataclasses.replace`, by hand, in
another process), or whose numbers were changed in place since, has no origin, rather than a wrong one.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
import weakref
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

import numpy as np

P = ParamSpec("P")
R = TypeVar("R")

WATCHED = ("advantages", "mask", "rewards", "old_logprobs", "ref_logprobs")
"""Fields whose numbers people change in place; tokens and their log-probs are many, and nobody does."""


@dataclass(frozen=True, eq=False)
class Origin:
    """One call.

    Attributes:
        call: name of the method, or "module.function" of a function.
        of: what the method was called on: its origin, or the value itself where it has none. None for a function.
        args, kwargs: as they were given, values replaced by their origins where they have one, arrays and lists copied.
        marks: what identified each of the other arguments when the call was made, see `watch`.
    """

    call: str
    of: Any = None
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    marks: tuple[str, ...] = ()

    def given(self) -> Iterable[Any]:
        """The arguments, in the order of `marks`."""
        return (*self.args, *self.kwargs.values())


_known: weakref.WeakKeyDictionary[Any, tuple[Origin, int]] = weakref.WeakKeyDictionary()
_lock = threading.Lock()
_mark: Callable[[Any], str] | None = None


def watch(mark: Callable[[Any], str]) -> None:
    """Have the functions that calls are given identified when they are called; whoever keeps a record asks for it."""
    global _mark
    _mark = mark


def origin(value: Any) -> Origin | None:
    """How `value` was made; None where nobody saw it, or where it was changed since."""
    try:
        with _lock:
            known = _known.get(value)
    except TypeError:  # not hashable, or not to be referred to weakly: no value of ours
        return None
    return known[0] if known is not None and known[1] == digest(value) else None


def remember(value: R, made: Origin) -> R:
    """Note how a value was made; returns the value."""
    with _lock:
        _known[value] = made, digest(value)
    return value


def traced(method: Callable[P, R]) -> Callable[P, R]:
    """Of a method that gives a new value of its own kind: note the call as that value's origin."""

    @functools.wraps(method)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        made = _call(method.__name__, args[0], args[1:], kwargs)
        value = method(*args, **kwargs)
        return value if value is args[0] or not hasattr(type(value), "__weakref__") else remember(value, made)

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
        made = _call(name, None, args, kwargs)
        return remember(function(*args, **kwargs), made)

    return called


def digest(value: Any) -> int:
    """A checksum of the numbers in a value that may be changed in place."""
    found = 0
    for name in WATCHED:
        column = getattr(value, name, None) if dataclasses.is_dataclass(value) else None
        if isinstance(column, np.ndarray):
            found = zlib.crc32(np.ascontiguousarray(column).data, found)
    return found


def _call(name: str, of: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Origin:
    """The call as it is made: what it is given may be other things by the time somebody asks."""
    given = tuple(map(_found, args)), {key: _found(one) for key, one in kwargs.items()}
    marks = () if _mark is None else tuple(map(_mark, (*given[0], *given[1].values())))
    return Origin(name, _found(of), *given, marks)


def _found(value: Any) -> Any:
    """The origin of a value that has one, also inside a list or a tuple; else the value, copied where it may change."""
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, list | tuple) and any(origin(one) is not None for one in value):
        return [_found(one) for one in value]
    if type(value) is list:
        return list(value)
    known = origin(value)
    return value if known is None else known
