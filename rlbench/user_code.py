"""The border to what a user wrote: whatever it raises is an error of that code, also what would end the process.

`sys.exit()`, a failing `argparse` or a `KeyboardInterrupt` that nobody pressed pass every handler and would end a rank
with its engine. Inside of `user_code()` they are exceptions like others, under their own names.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rlbench.errors import Stopped


class UserExit(Exception):
    """What a user's code raised that is no `Exception`, as one. Its class has the name of what was raised, so that
    whoever names the kind of an error says `SystemExit`."""

    def __reduce__(self) -> Any:
        return _named, (type(self).__name__, *self.args)


@contextmanager
def user_code() -> Iterator[None]:
    """Around a call of a user's code. A stop passes, and so does Ctrl-C, which Python raises in the main thread alone.

    Raises:
        UserExit: in the place of a SystemExit, a GeneratorExit, or a KeyboardInterrupt of the code's own.
    """
    try:
        yield
    except (Exception, Stopped):
        raise
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
            raise
        raise _as_exception(error).with_traceback(error.__traceback__) from None


def name_of(fn: Any) -> str:
    """What a reader calls a user's function, loss or reward: its name, or the value's own text."""
    return getattr(fn, "__name__", None) or repr(fn)


def _as_exception(error: BaseException) -> UserExit:
    said = str(error) if error.args not in ((), (None,)) else ""
    meant = "raised by the code itself"
    if isinstance(error, SystemExit):
        refusal = _refusal_of_parser(error)
        meant = f"argparse: {refusal}" if refusal else "the code asked to end its process, which goes on"
    return _named(type(error).__name__, f"{said} ({meant})" if said else meant)


def _refusal_of_parser(error: SystemExit) -> str:
    """What `argparse` says, to standard error alone, before it exits; empty where something else exits."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code.co_name == "error" and frame.f_globals.get("__name__") == "argparse":
            return str(frame.f_locals["message"])
    return ""


def _named(kind: str, said: str) -> UserExit:
    return type(kind, (UserExit,), {"__module__": __name__})(said)
