"""The control verbs of a session, asked for without its kernel: accepted or refused at once, then watched to their end.

`stop`, `pause` and `resume` go over the workers' control lanes and work at any time. The others drive the session, so
they run in an operator (a process of its own), one at a time, and not while something else runs.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from rlbench.errors import RLBenchError, nearest

KEPT = 64
Args = dict[str, Any]
Run = Callable[[str, Args], Any]

# verb -> its arguments: name -> (type, needed)
CONTROL: dict[str, dict[str, tuple[type, bool]]] = {"stop": {}, "pause": {}, "resume": {}, "close": {}}
DRIVING: dict[str, dict[str, tuple[type, bool]]] = {
    "offload": {"engine": (str, True), "parts": (list, False)},
    "onload": {"engine": (str, True), "parts": (list, False)},
    "sync": {"transport": (str, False)},
    "snapshot": {"label": (str, False), "disk": (bool, False)},
    "park": {"drop_gradients": (bool, False)},
}
VERBS = CONTROL | DRIVING


class Refusal(Exception):
    """A request that is not served: `status` as HTTP has it, and what the answer says beside the message."""

    def __init__(self, status: int, message: str, **more: Any) -> None:
        super().__init__(message)
        self.status, self.more = status, more


class Commands:
    """What was asked for, and what became of it: `control` and `drive` run verbs, `busy` says what runs now."""

    def __init__(self, control: Run, drive: Run, busy: Callable[[], list[str]]) -> None:
        self._control, self._drive, self._busy = control, drive, busy
        self._records: dict[str, dict[str, Any]] = {}
        self._lock = threading.Lock()
        self._driving: str | None = None

    def submit(self, verb: Any, args: Any) -> dict[str, Any]:
        """Begin a verb; returns its record at once. Raises Refusal."""
        given = checked(verb, args)
        with self._claimed(verb):
            record = {"id": secrets.token_hex(8), "verb": verb, "args": given, "state": "running"}
            record |= {"result": None, "error": None, "started": time.time(), "ended": None}
            with self._lock:
                self._records[record["id"]] = record
                ended = [i for i, kept in self._records.items() if kept["ended"] is not None]
                for old in ended[: max(0, len(self._records) - KEPT)]:
                    del self._records[old]
            said = dict(record)
            threading.Thread(target=self._run, args=(record,), name=f"rlbench {verb}", daemon=True).start()
        return said

    def get(self, id_: str) -> dict[str, Any]:
        """The record of a command. Raises Refusal where there is none."""
        with self._lock:
            if id_ not in self._records:
                raise Refusal(404, f"no command {id_!r}: the monitor keeps the last {KEPT} since it started")
            return dict(self._records[id_])

    @contextlib.contextmanager
    def _claimed(self, verb: str) -> Any:
        """Be the one driving verb; given back by `_run`, or at once where the verb did not begin."""
        if verb in CONTROL:
            yield
            return
        with self._lock:
            if self._driving is not None:
                raise Refusal(409, f"{verb}: {self._driving} runs; wait for it", running=[self._driving])
            self._driving = verb
        try:
            if running := self._busy():
                raise Refusal(409, f"{verb}: {', '.join(running)} runs; stop it first, or wait for it", running=running)
            yield
        except BaseException:
            self._driving = None
            raise

    def _run(self, record: dict[str, Any]) -> None:
        verb, result, error = record["verb"], None, None
        try:
            result = (self._control if verb in CONTROL else self._drive)(verb, record["args"])
        except Exception as raised:  # told by the record, for whoever asked
            error = {"kind": type(raised).__name__, "message": str(raised)}
            if not isinstance(raised, RLBenchError):
                error["message"] = f"{error['kind']}: {error['message']}"
        finally:
            if verb in DRIVING:
                self._driving = None
        with self._lock:
            record.update(state="failed" if error else "done", result=result, error=error, ended=time.time())


def checked(verb: Any, args: Any) -> Args:
    """The arguments of a verb. Raises Refusal naming what is wrong and what there is."""
    if not isinstance(verb, str) or verb not in VERBS:
        raise Refusal(400, f"no verb {verb!r}{nearest(str(verb), VERBS)}; there are {', '.join(VERBS)}")
    known = VERBS[verb]
    if not isinstance(args, Mapping):
        raise Refusal(400, f"{verb}: args must be an object, got {type(args).__name__}")
    for name, value in args.items():
        if name not in known:
            takes = ", ".join(known) or "no arguments"
            raise Refusal(400, f"{verb}: unknown argument {name!r}{nearest(str(name), known)}; it takes {takes}")
        if value is not None and not isinstance(value, known[name][0]):
            raise Refusal(400, f"{verb}: {name} must be a {known[name][0].__name__}, got {type(value).__name__}")
    for name, (_, needed) in known.items():
        if needed and args.get(name) is None:
            raise Refusal(400, f"{verb}: {name} is missing")
    if not all(isinstance(part, str) for part in args.get("parts") or ()):
        raise Refusal(400, f"{verb}: parts must be a list of names")
    return {name: value for name, value in args.items() if value is not None}
