"""Every error rlbench raises on purpose: what was wrong, what was seen, and the call that mends it.

A module that all rooms may import; standard library alone. `RLBenchError` shows as one block in a notebook:
its message carries the mend, so a stack trace through our own frames adds nothing.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar


class RLBenchError(Exception):
    """Base of all errors raised on purpose; engines stay usable unless the message says otherwise.

    `user_line`: the line of the user's own code that it is about, as a reader sees it; `full_traceback`: all frames of
    where it was raised. Both empty where there is nothing to tell.
    """

    user_line: str = ""
    full_traceback: str = ""


class ClusterError(RLBenchError):
    """The Ray cluster could not be started, found or joined."""


class SessionError(RLBenchError):
    """A session is missing, closed, driven by somebody else, or already there."""


class ClusterEnded(SessionError):
    """The cluster that a session ran on has ended, and all that was on it."""


class StaleEpoch(SessionError):
    """A worker refused a call of an epoch that is over; nothing of it ran. Who still drives asks for a new epoch."""


class BuildError(RLBenchError):
    """An engine could not be built, or was built twice."""


class NoSuchAttribute(AttributeError):
    """A value has no attribute of that name; the message has the nearest it has.

    A mistake of the code that asks: in a user's function it counts, like any AttributeError, as that function's own.
    """


class DataError(RLBenchError):
    """Prompts, rollouts or batches that cannot be used as given."""


class EngineError(RLBenchError):
    """An engine refused or failed a call."""


class StateError(EngineError):
    """The engine's device state forbids the call; the message names the call that mends it."""


class MethodError(EngineError, AttributeError):
    """No such method on the user's module."""


class WeightSyncError(EngineError):
    """Weights did not arrive, or did not arrive right."""


class CheckpointError(RLBenchError):
    """A snapshot or checkpoint could not be written, or what is there cannot be read."""


class WorkerDied(EngineError):
    """A worker process ended; the message says which one, why, and what to do."""


class CallDropped(EngineError):
    """Not all ranks received a call in time, so none executed it."""


class RemoteError(EngineError):
    """The user's own code raised on a worker; `full_traceback` holds the frames there."""


class CheckFailed(RLBenchError):
    """A preflight or a rehearsal found what would spoil a run; `.result` holds all that was found."""

    def __init__(self, message: str, result: Any = None) -> None:
        super().__init__(message)
        self.result = result


class LossError(RLBenchError, ValueError):
    """A loss, an advantage or another piece of the mathematics got or gave something that cannot be used."""


class Stopped(KeyboardInterrupt):
    """A verb was interrupted. `.partial` holds what there was when it stopped (None where nothing was finished).

    A KeyboardInterrupt, so that loops and Run All stop too.
    """

    def __init__(self, message: str = "stopped", partial: Any = None) -> None:
        super().__init__(message)
        self.partial = partial


def nearest(name: str, known: Iterable[str], count: int = 3) -> str:
    """Return `"; nearest: a, b"` for the known names that look like `name`, or an empty string."""
    found = difflib.get_close_matches(name, list(known), n=count, cutoff=0.5)
    return f"; nearest: {', '.join(found)}" if found else ""


def some(names: Sequence[str], shown: int = 3) -> str:
    """Name the first few, and say how many more there are."""
    rest = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + rest


class Suggesting:
    """What a value inherits whose misspelt attributes are answered with the nearest it has.

    `_ELSEWHERE`: attributes that a reader looks for here and finds elsewhere, with where that is.
    """

    _ELSEWHERE: ClassVar[Mapping[str, str]] = {}

    if not TYPE_CHECKING:  # a type checker knows the attributes there are

        def __getattr__(self, name: str) -> Any:
            """Raise for what is not there; called for that alone."""
            if hasattr(type(self), name):  # a property that raised: its own error is what to tell
                return object.__getattribute__(self, name)
            owner = type(self).__name__
            if name.startswith("_"):  # asked by libraries, of everything
                raise AttributeError(f"{owner!r} object has no attribute {name!r}")
            known = [known for known in dir(self) if not known.startswith("_") and known != "_ELSEWHERE"]
            where = self._ELSEWHERE.get(name)
            hint = f": {where}" if where else nearest(name, known)
            raise NoSuchAttribute(f"{owner} has no attribute {name!r}{hint}")
