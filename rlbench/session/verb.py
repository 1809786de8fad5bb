"""The decorators that make verbs of a session from step functions.

    class Session:
        train_step = verb(steps.train_step)    # session.train_step(batch, loss, block=False)

A step function takes a `SessionCore` and returns a generator of steps, or a call under way. Its verb runs it, records
it, and waits for it unless `block=False`; name, docstring and signature are the function's.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Generator
from typing import (
    Any,
    Concatenate,
    Generic,
    Literal,
    ParamSpec,
    Protocol,
    TypeVar,
    cast,
    get_args,
    get_type_hints,
    overload,
)

from rlbench.dispatch.chain import ChainStep
from rlbench.errors import SessionError, Stopped
from rlbench.session.core import SessionCore
from rlbench.session.record.recording import arguments

T = TypeVar("T")
R = TypeVar("R", covariant=True)
P = ParamSpec("P")


class PendingVerb(Protocol[R]):
    """A verb under way: wait for it, watch it, stop it, or await it."""

    what: str

    @property
    def done(self) -> bool:
        """True once it is over."""

    def result(self, timeout: float | None = None) -> R:
        """Wait and return the result; raises what the verb raised, TimeoutError after `timeout` seconds."""

    def stop(self) -> None:
        """Ask it to stop; returns at once."""

    def __await__(self) -> Generator[Any, None, R]:
        """Wait for it in a coroutine."""


class Verb(Generic[T, P]):
    """The type of a verb that can be left running. At run time it is a plain method."""

    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T: ...
    @overload
    def __call__(self, *args: Any, block: Literal[False], **kwargs: Any) -> PendingVerb[T]: ...
    @overload
    def __call__(self, *args: Any, block: bool, **kwargs: Any) -> T | PendingVerb[T]: ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


class DirectVerb(Generic[T, P]):
    """The type of a verb that is over when it returns. At run time it is a plain method."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T: ...  # type: ignore[empty-body]


def verb(steps: Callable[Concatenate[SessionCore, P], Generator[ChainStep, Any, T]]) -> Verb[T, P]:
    """Make a verb of a step function: one that takes `block`, and `on_stop` where the function does."""

    def call(self: Any, *args: Any, block: bool = True, **kwargs: Any) -> Any:
        return run(self.core, steps, args, kwargs, block)

    return cast("Verb[T, P]", _named(call, steps, block=True))


def call_verb(start: Callable[Concatenate[SessionCore, P], PendingVerb[T]]) -> Verb[T, P]:
    """Make such a verb of a function that starts one call and returns it."""
    return cast("Verb[T, P]", verb(cast(Any, start)))


def direct(
    function: Callable[Concatenate[SessionCore, P], T], record: bool = True, listed: bool = True
) -> DirectVerb[T, P]:
    """Make a verb of a function that is over when it returns; `record=False` leaves it out of the record. An iterator
    of prompts is read to its end, as it can be read once; not where `listed=False`."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        bound = _bound(function, self.core, args, kwargs, listed)
        if not record:
            return function(*bound.args, **bound.kwargs)
        entry = self.core.recorder.begin(function.__name__, arguments(bound))
        return self.core.recorder.during(entry, lambda: function(*bound.args, **bound.kwargs))

    return cast("DirectVerb[T, P]", _named(call, function))


def run(
    core: SessionCore, steps: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], block: bool = True
) -> Any:
    """Run a step function as a verb does: on record, and waited for where `block`."""
    bound = _bound(steps, core, args, kwargs)
    on_stop = bound.arguments.get("on_stop", "raise")
    if on_stop not in ("raise", "return"):
        raise SessionError(f"on_stop={on_stop!r}: wanted 'raise' or 'return'")
    name = steps.__name__

    def call() -> Any:
        pending = core.begin(name, lambda: steps(*bound.args, **bound.kwargs))
        if not block:
            return pending
        try:
            return pending.blocking_result()
        except Stopped as stopped:
            if on_stop == "raise" or stopped.partial is None:
                raise
            return stopped.partial

    return core.recorder.during(core.recorder.begin(name, arguments(bound)), call)


def _bound(
    function: Callable[..., Any], core: SessionCore, args: tuple[Any, ...], kwargs: dict[str, Any], listed: bool = True
) -> inspect.BoundArguments:
    bound = inspect.signature(function).bind(core, *args, **kwargs)  # a TypeError here is the caller's
    prompts = bound.arguments.get("prompts")
    if listed and hasattr(prompts, "__next__"):
        bound.arguments["prompts"] = list(prompts or ())
    return bound


def _named(call: Any, function: Callable[..., Any], block: bool = False) -> Any:
    """Give a method the name, docstring and signature of the function it calls; with `block`, its result's type."""
    functools.update_wrapper(call, function)
    del call.__wrapped__  # whose first argument and result are others
    hints = get_type_hints(function)
    result = get_args(hints["return"])[-1] if block else hints["return"]
    signature = inspect.signature(function)
    core, *parameters = signature.parameters.values()
    if block:
        own = inspect.Parameter("block", inspect.Parameter.KEYWORD_ONLY, default=True)
        at = len(parameters) - (parameters[-1:] != [] and parameters[-1].kind is inspect.Parameter.VAR_KEYWORD)
        parameters.insert(at, own)
        hints["block"] = bool
    me = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    call.__signature__ = signature.replace(parameters=[me, *parameters], return_annotation=result)
    call.__annotations__ = {name: hint for name, hint in hints.items() if name != core.name} | {"return": result}
    call.__qualname__ = f"Session.{function.__name__}"
    return call
