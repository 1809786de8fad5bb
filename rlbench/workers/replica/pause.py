"""Pausing a replica: its generating thread waits between two steps; requests and their KV cache stay as they are."""

from __future__ import annotations

import threading

from rlbench.dispatch.context import CallContext

LOOK_S = 0.1


class Gate:
    """Open while generation may go on. The control lane closes and opens it; the compute lane passes it."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._open.set()

    @property
    def closed(self) -> bool:
        """True while generation is paused."""
        return not self._open.is_set()

    def close(self) -> None:
        """Hold whoever comes next."""
        self._open.clear()

    def open(self) -> None:
        """Let go."""
        self._open.set()

    def passes(self, context: CallContext) -> bool:
        """Wait, asleep, while it is closed; False once the call is asked to stop."""
        if self.closed:
            context.report(paused=True)
            while not self._open.wait(LOOK_S) and not context.stop_requested():
                continue
            context.report(paused=False)
        return not context.stop_requested()
