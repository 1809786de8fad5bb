"""The call a worker is executing: its identity, its stop flag and its progress, reachable from anywhere below."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class CallContext:
    """One call on one worker: its verb's `name`, the `worker`'s actor and `cluster` (empty outside of a session), what
    hands out shared work, and how many collectives the worker had issued before (None: it has no peers who ask)."""

    call_id: str = "local"
    epoch: int = 0
    claimer: Callable[[int], list[int]] | None = None
    progress: dict[str, Any] = field(default_factory=dict)
    name: str = ""
    worker: str = ""
    cluster: str = ""
    issued_before: int | None = None
    _stop: bool = False

    def stop_requested(self) -> bool:
        """Whether somebody asked this call to stop."""
        return self._stop

    def request_stop(self) -> None:
        """Set the stop flag (control lane)."""
        self._stop = True

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
    """Name the engine of the worker that asks, for a sentence to the user: a session has several."""
    name = current().worker.split("/")[2:3]
    return f"engine {name[0]!r}" if name else "the engine"


def bringing_back(*parts: str) -> str:
    """Say how the user makes parts of this worker's engine resident again; all of it, where none is named."""
    name, listed = current().worker.split("/")[2:3], ", ".join(map(repr, parts))
    if not name:
        return f"cuda({listed}) on the engine"
    return f"session.onload({', '.join(map(repr, (*name, *parts)))}), or cuda({listed}) on the engine itself,"
