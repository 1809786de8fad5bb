"""What rollouts and batches were made with (sampler, reward, advantage), and what a live view has made of a value: kept
beside the values, weakly."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

_makers: weakref.WeakKeyDictionary[Any, Mapping[str, Any]] = weakref.WeakKeyDictionary()
_samplers: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
_grown: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def makers(value: Any) -> dict[str, Any]:
    """Return the functions a value was made with, by their part (`"reward"`, `"advantage"`)."""
    return dict(_makers.get(value, {}))


def made_with(value: R, source: Any, **functions: Any) -> R:
    """Note what `value` was made with, beside what `source` was; None forgets a part. Returns the value."""
    _makers[value] = {part: fn for part, fn in (makers(source) | functions).items() if fn is not None}
    if (sampler := _samplers.get(source)) is not None:
        _samplers[value] = sampler
    return value


def drawn_by(value: R, sampler: Any) -> R:
    """Note what rollouts were drawn by, and can be continued by. Returns the value."""
    _samplers[value] = sampler
    return value


def sampler_of(value: Any) -> Any:
    """Return what rollouts were drawn by; None where that is not known."""
    return _samplers.get(value)


def grown_into(value: R, later: R) -> None:
    """Note what a value became in its live view: rollouts by forks, a chat by what was said."""
    _grown[value] = later


def latest(value: R) -> R:
    """Return what a value became in its live view, and that in its own; itself where nothing was done there."""
    while (later := _grown.get(value, value)) is not value:
        value = later
    return value


def keeps_makers(method: Callable[P, R]) -> Callable[P, R]:
    """Let the value that a method returns keep the makers of the value it was called on."""

    @functools.wraps(method)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        value = method(*args, **kwargs)
        return value if value is NotImplemented else made_with(value, args[0])

    return called
