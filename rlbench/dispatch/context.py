"""The call a worker is executing: its identity, its stop flag and its progress, reachable from anywhere below.

The host sets it for the time of one call on the compute lane; the control lane sets the stop flag and reads progress.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class CallContext:
    """One call on one worker. `claimer` hands out job indices shared between the replicas of an engine.

    `worker`: the name of its actor, `rlbench/<session>/<engine>/<number>`, and `cluster`: the id of the cluster it runs
    on, by which what runs here can drive the session in turn; both empty outside of a session.
    `issued_before`: the worker's count of collectives when the call began.
    """

    call_id: str = "local"
    epoch: int = 0
    seq: int = 0
    claimer: Callable[[int], list[int]] | None = None
    progress: dict[str, Any] = field(default_factory=dict)
    name: str = ""
    worker: str = ""
    cluster: str = ""
    issued_before: int = 0
    _stop: threading.Event = field(default_factory=threading.Event)

    def stop_requested(self) -> bool:
        """True once somebody asked this call to stop."""
        return self._stop.is_set()

    def request_stop(self) -> None:
        """Set the stop flag (control lane)."""
        self._stop.set()

    def report(self, **progress: Any) -> None:
        """Publish progress; the driver reads the latest values while it waits."""
        self.progress = {**self.progress, **progress}

    def claim(self, count: int) -> list[int]:
        """Take up to `count` next job indices from the shared queue; empty when none is left."""
        if self.claimer is None:
            raise RuntimeError("this call has no shared queue to claim work from")
        return self.claimer(count)


_current: CallContext | None = None


def current() -> CallContext:
    """Return the context of the call being executed, or an inert one outside of any call."""
    return _current if _current is not None else CallContext()


def set_current(context: CallContext | None) -> None:
    """Install the context of the call that starts now (None when it ends). One compute lane, so one at a time."""
    global _current
    _current = context


def this_engine() -> str:
    """The engine of the worker that asks, for a sentence to the user: a session has several."""
    name = current().worker.split("/")[2:3]
    return f"engine {name[0]!r}" if name else "the engine"


def bringing_back(*parts: str) -> str:
    """How the user makes parts of this worker's engine resident again; all of it, where none is named."""
    name, said = current().worker.split("/")[2:3], ", ".join(map(repr, parts))
    if not name:
        return f"cuda({said}) on the engine"
    return f"session.onload({', '.join(map(repr, (*name, *parts)))}), or cuda({said}) on the engine itself,"
