"""How an error of ours shows: what it says and the user's own line, once. The frames in between are those of the
library; `rb.last_traceback()` has them."""

from __future__ import annotations

import builtins
import copyreg
import os
import sys
import traceback
from types import TracebackType
from typing import Any

from rlbench.errors import NoSuchAttribute, RLBenchError, Stopped
from rlbench.traces import is_library, remember, user_line

OURS = (RLBenchError, Stopped, NoSuchAttribute)
FULL = "RLBENCH_TRACEBACK"
"""Set to "full" it lets a plain script show every frame."""


def install(shell: Any) -> None:
    """Have errors show so, wherever they are raised; `shell`: IPython's, None in a plain script. Safe to call twice."""
    if shell is None:
        if not _others:  # once: others, as Ray's, may put theirs around ours
            _others.append(sys.excepthook)
            sys.excepthook = _hook
        return
    from IPython.core import autocall

    shell.set_custom_exc(OURS, _show)
    for kind in OURS:  # what IPython asks of an error that it shows by itself, as that of a file under %run
        kind._render_traceback_ = rendered  # type: ignore[union-attr]
    for exiting in (autocall.ExitAutocall, autocall.ZMQExitAutocall):
        # `exit` in a cell is an object that holds the whole shell: a function that names it takes Python's own along
        copyreg.pickle(exiting, lambda _: (getattr, (builtins, "exit")))  # type: ignore[arg-type]


def rendered(error: BaseException) -> list[str]:
    """The lines of an error in a cell."""
    if isinstance(error, Stopped):
        return [f"Stopped: {error}" + (" (.partial holds what there was)" if error.partial is not None else "")]
    if not getattr(error, "full_traceback", ""):
        remember("".join(traceback.format_exception(error)))
    lines = [f"{type(error).__name__}: {error}"]
    line = getattr(error, "user_line", "") or str(user_line(error) or "")
    if line and line not in lines[0] and "get_ipython().run_" not in line:  # what IPython makes of a magic
        lines.append(f"  {line}")
    return lines


def _show(shell: Any, kind: type[BaseException], error: BaseException, trace: Any, tb_offset: Any = None) -> list[str]:
    lines = rendered(error)
    shell._showtraceback(kind, error, ["\n".join(lines)])
    return lines


_others: list[Any] = []


def _hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Python's traceback of an error that ends a script: the script's own frames."""
    if not isinstance(error, OURS) or os.environ.get(FULL) == "full":
        _others[-1](kind, error, trace)
        if full := getattr(error, "full_traceback", ""):
            print(f"\n{full}", file=sys.stderr)
        return
    frames = traceback.extract_tb(trace)
    own = [frame for frame in frames if not is_library(frame.filename)]
    said = ["Traceback (most recent call last):\n", *traceback.format_list(own)] if own else []
    said += [f"{kind.__name__}: {error}\n"]
    if len(own) < len(frames) or getattr(error, "full_traceback", None):
        said.append(f"({FULL}=full shows every frame)\n")
    print("".join(said), end="", file=sys.stderr)
