"""What `rb.Train` says of optimizer, schedule and a reference that moves; plain values, importable without torch."""

from __future__ import annotations

import functools
import inspect
from base64 import b64encode
from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Any, ClassVar, Self

from rlbench.dispatch import by_value
from rlbench.errors import nearest
from rlbench.options import Option, OptionError, Options, options_in, refuse, section
from rlbench.strategies.optim import named
from rlbench.units import format_bytes
from rlbench.workers.train.config import OPTIMIZER, SCHEDULE

MOST_BYTES = 1 << 20
"""Of a pickled function; larger ones hold data."""
chosen, moving = section("Choice"), section("Reference")


class Choice(Options):
    """A name with its options, or a function of the user's, kept by value with its hash."""

    WHAT: ClassVar[str] = ""
    KNOWN: ClassVar[Mapping[str, Callable[..., Any]]] = {}
    GIVEN: ClassVar[Mapping[str, Any]] = {}
    """Arguments of the named ones that `part` adds."""

    name: str = chosen("", "its name, or the function's")
    options: dict[str, Any] = chosen(dict, "of the named one")
    function: str | None = field(  # two of one hash are equal
        default=None,
        compare=False,
        metadata={"option": Option("Choice", "the function, pickled, in base64; None: the named one")},
    )
    hash: str | None = chosen(None, "of the function's code and values")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.function is not None:
            return
        if self.name not in self.KNOWN:
            raise OptionError(
                f"{self.WHAT} {self.name!r} is unknown{nearest(self.name, self.KNOWN)}: there are "
                f"{', '.join(self.KNOWN)}, or give a function."
            )
        inspect.signature(self.KNOWN[self.name]).bind(None, **{**self.GIVEN, **self.options})  # the caller's TypeError

    @classmethod
    def of(cls, given: Any, **options: Any) -> Self:
        """Read a name, a function, a mapping of a name and its options, or what was read before."""
        if isinstance(given, cls):
            return given
        if isinstance(given, str):
            return cls(name=given, options=options)
        if isinstance(given, Mapping) and "name" in given:
            held = dict(given)
            return cls(**held) if held.keys() <= options_in(cls).keys() else cls.of(held.pop("name"), **held)
        if not callable(given):
            raise OptionError(f"{cls.WHAT}: wanted a name or a function, got {type(given).__name__}.")
        return cls._kept(given, options)

    @classmethod
    def _kept(cls, function: Callable[..., Any], options: Mapping[str, Any]) -> Self:
        name = getattr(function, "__name__", type(function).__name__)
        called = functools.partial(function, **options) if options else function
        return cls(name=name, function=_pickled(called, cls.WHAT), hash=by_value.identity(called))

    def part(self, **given: Any) -> dict[str, Any]:
        """Return it as a part of a setup, see `rlbench.workers.train.setup`; `given`: what a named one takes unless its
        options say otherwise."""
        function = self.function or _pickled(
            functools.partial(self.KNOWN[self.name], **{**given, **self.options}), self.WHAT
        )
        return {self.WHAT: {"name": self.name, "function": function}}

    def __repr__(self) -> str:
        options = "".join(f", {name}={value!r}" for name, value in self.options.items())
        return f"<{self.name}{options}>" if self.hash is None else f"<{self.name} {self.hash}>"


class OptimizerChoice(Choice):
    """Makes an optimizer of a module."""

    WHAT: ClassVar[str] = OPTIMIZER
    KNOWN: ClassVar[Mapping[str, Callable[..., Any]]] = named.OPTIMIZERS
    GIVEN: ClassVar[Mapping[str, Any]] = {"lr": 0.0}

    def takes(self, option: str) -> bool:
        """Whether the optimizer has an option, by a name of `rb.Train`'s, that is not said here."""
        known = self.function is None and option in inspect.signature(self.KNOWN[self.name]).parameters
        return known and option not in self.options


class ScheduleChoice(Choice):
    """Makes a scheduler of an optimizer, or a factor of the rate for each step."""

    WHAT: ClassVar[str] = SCHEDULE
    KNOWN: ClassVar[Mapping[str, Callable[..., Any]]] = named.SCHEDULES

    @classmethod
    def _kept(cls, function: Callable[..., Any], options: Mapping[str, Any]) -> Self:
        if "optimizer" in inspect.signature(function).parameters:
            return super()._kept(function, options)
        name = getattr(function, "__name__", type(function).__name__)
        by_step = functools.partial(named.by_step, factor=functools.partial(function, **options))
        return cls(name=name, function=_pickled(by_step, cls.WHAT), hash=by_value.identity(by_step))


class EMA(Options, kw_only=False):
    """A reference that follows the policy: `rb.Train(reference=rb.EMA(0.99))`, `rb.every(50)`."""

    keep: float = moving(0.99, "share of its own weights that the reference keeps in a move; 0: it becomes the policy")
    every: int = moving(1, "optimizer steps from one move to the next", least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_keep(self.keep)


def every(steps: int) -> EMA:
    """Say that the reference becomes the policy every so many optimizer steps."""
    return EMA(0.0, steps)


def check_keep(keep: float) -> None:
    """Refuse what is no share of a reference's own weights."""
    refuse((not 0 <= keep < 1, f"keep={keep!r}: wanted a share from 0 on and below 1"))


def _pickled(function: Callable[..., Any], what: str) -> str:
    blob = by_value.dumps(function, what, refusal=OptionError)
    if len(blob) > MOST_BYTES:
        raise OptionError(
            f"the {what} function holds {format_bytes(len(blob))} of data, and its session would keep it with every "
            f"snapshot ({format_bytes(MOST_BYTES)} at most): read large values from a file inside of it."
        )
    return b64encode(blob).decode()
