"""The decorators that make verbs of a session from step functions.

    class Session:
        train_step = verb(update.train_step)    # session.train_step(batch, loss, block=False)

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

from rlbench.dispatch.chain import Step
from rlbench.errors import SessionError, Stopped
from rlbench.session.core import SessionCore
from rlbench.session.record.recording import arguments

T = TypeVar("T")
R = TypeVar("R", covariant=True)
P = ParamSpec("P")
ON_STOP = ("raise", "return")


class Pending(Protocol[R]):
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
    def __call__(self, *args: Any, block: Literal[False], **kwargs: Any) -> Pending[T]: ...
    @overload
    def __call__(self, *args: Any, block: bool, **kwargs: Any) -> T | Pending[T]: ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


class Call(Generic[T, P]):
    """The type of a verb that is over when it returns. At run time it is a plain method."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T: ...  # type: ignore[empty-body]


def verb(steps: Callable[Concatenate[SessionCore, P], Generator[Step, Any, T]]) -> Verb[T, P]:
    """Make a verb of a step function: one that takes `block`, and `on_stop` where the function does."""
    return cast("Verb[T, P]", _waiting(steps))


def call_verb(start: Callable[Concatenate[SessionCore, P], Pending[T]]) -> Verb[T, P]:
    """Make such a verb of a function that starts one call and returns it."""
    return cast("Verb[T, P]", _waiting(start))


def _waiting(function: Callable[..., Any]) -> Any:
    result = get_args(get_type_hints(function)["return"])[-1]

    def call(self: Any, *args: Any, block: bool = True, **kwargs: Any) -> Any:
        return run(self.core, function, args, kwargs, block)

    return _named(call, function, result, block=True)


def direct(function: Callable[Concatenate[SessionCore, P], T], record: bool = True) -> Call[T, P]:
    """Make a verb of a function that is over when it returns; `record=False` leaves it out of the record."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        core: SessionCore = self.core
        bound = _bound(function, core, args, kwargs)
        if not record:
            return function(*bound.args, **bound.kwargs)
        entry = core.recorder.begin(function.__name__, arguments(bound))
        return core.recorder.during(entry, lambda: function(*bound.args, **bound.kwargs))

    return cast("Call[T, P]", _named(call, function, get_type_hints(function)["return"]))


def run(
    core: SessionCore,
    steps: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    block: bool = True,
) -> Any:
    """Run a step function as a verb does: on record, and waited for where `block`."""
    bound = _bound(steps, core, args, kwargs)
    on_stop = bound.arguments.get("on_stop", "raise")
    if on_stop not in ON_STOP:
        raise SessionError(f"on_stop={on_stop!r}: wanted 'raise' or 'return'")
    name = steps.__name__

    def call() -> Any:
        started = steps(*bound.args, **bound.kwargs)
        pending = core.run(name, started) if isinstance(started, Generator) else started
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
    function: Callable[..., Any], core: SessionCore, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> inspect.BoundArguments:
    bound = inspect.signature(function).bind(core, *args, **kwargs)  # a TypeError here is the caller's
    prompts = bound.arguments.get("prompts")
    if hasattr(prompts, "__next__"):  # it can be read once
        bound.arguments["prompts"] = list(prompts or ())
    return bound


def _named(call: Any, function: Callable[..., Any], result: Any, block: bool = False) -> Any:
    """Give a method the name, docstring and signature of the function it calls."""
    functools.update_wrapper(call, function)
    del call.__wrapped__  # whose first argument and result are others
    signature = inspect.signature(function)
    parameters = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD), *signature.parameters.values()]
    del parameters[1]  # the core
    if block:
        last = parameters[-1].kind is inspect.Parameter.VAR_KEYWORD
        parameters.insert(
            len(parameters) - last, inspect.Parameter("block", inspect.Parameter.KEYWORD_ONLY, default=True)
        )
    call.__signature__ = signature.replace(parameters=parameters, return_annotation=result)
    hints = get_type_hints(function)
    del hints[next(iter(signature.parameters))]
    call.__annotations__ = {**hints, **({"block": bool} if block else {}), "return": result}
    call.__qualname__ = f"Session.{function.__name__}"
    return call
