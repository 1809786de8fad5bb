"""Whether a value that travels by value changes when it is called.

Each process has a copy of its own, so what a call does to one copy (a moving average, a counter) is unknown to all
others, and gone with it.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from typing import Any

import cloudpickle

from rlbench.dispatch import by_value

PLAIN = (str, int, float, bool, bytes, type(None))


def is_constant(value: Any) -> bool:
    """Whether a value cannot change: a frozen dataclass of rlbench's own with plain fields."""
    kind = type(value)
    if not (dataclasses.is_dataclass(kind) and kind.__dataclass_params__.frozen):  # type: ignore[attr-defined]
        return False
    return kind.__module__.startswith("rlbench.") and all(
        isinstance(getattr(value, field.name), PLAIN) for field in dataclasses.fields(kind)
    )


def changes_itself(names: list[str]) -> str:
    """The end of a sentence that begins with what changed, and what to do about it."""
    return (
        f"changes itself when it is called ({', '.join(names)}): every rank calls a copy of its own, micro-batch by "
        "micro-batch, and what one copy learns is lost to the others and to the next step. Return what you want to "
        "keep as a metric, and make the next step's loss from it: dataclasses.replace(loss, baseline=metrics.baseline)."
    )


class Watch:
    """Says what of a value has changed since it was unpickled.

    Args:
        blob: the value as it travels, by `by_value.dumps`.
        value: a copy made of it, before its first call.
    """

    def __init__(self, blob: bytes, value: Any) -> None:
        self._blob, self._value = blob, value
        self._identity = None if is_constant(value) else by_value.identity(value)

    def changed(self) -> list[str]:
        """Names of the attributes, globals and enclosing variables that differ now; empty where nothing does."""
        if self._identity is None or by_value.identity(self._value) == self._identity:
            return []
        first, now = _parts(cloudpickle.loads(self._blob)), _parts(self._value)
        return [name for name in now if name not in first or now[name] != first[name]] or ["something it refers to"]


def _parts(value: Any) -> dict[str, str]:
    """Identity of each thing by name that a value, or the function it is, holds."""
    if isinstance(value, functools.partial):
        return _parts(value.func)
    held: dict[str, Any] = {}
    if inspect.ismethod(value):
        held |= vars(value.__self__)
        value = value.__func__
    if inspect.isfunction(value):
        found = inspect.getclosurevars(value)
        held |= {**found.globals, **found.nonlocals, **vars(value)}
    elif hasattr(value, "__dict__"):
        held |= vars(value)
        held |= inspect.getclosurevars(type(value).__call__).globals if inspect.isfunction(type(value).__call__) else {}
    return {name: by_value.identity(part) for name, part in held.items() if not inspect.ismodule(part)}
