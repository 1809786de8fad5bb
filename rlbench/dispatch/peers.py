"""The workers that go on when another one has failed in the same call: asked to stop, as nothing comes of the call any
more, and ranks are released where they cannot.

A rank that fails leaves its peers in the next collective they issue, which it never joins. Nothing but the end of a
process releases them there. So the failed rank is ended, but only where a peer is seen to wait: it has issued more
collectives than the failed one, and issues no further one.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

STOP_S = 0.5
"""How long peers have to end by themselves (they failed as well, or are done) before they are asked to stop."""
TELL_S = 2.0
"""How long it takes until the failure is shown while peers still run."""
STUCK_S = 1.0
"""How long peers are seen in a collective that a failed rank did not issue, before it is ended for them."""
FAILED_PEER_WAIT_S = 60.0
"""The same for peers that seem to compute, and do not stop when they are asked to."""
FREED_S = 10.0
"""How long released peers have to end; on a GPU a collective does not notice that a process is gone."""


class Peers:
    """Of one call.

    Args:
        actors: all workers of the call.
        call_id: of the call.

    Attributes:
        issued: collectives of each worker that runs, when last seen.
        released: whether workers were ended for others.
    """

    def __init__(self, actors: Sequence[Any], call_id: str) -> None:
        self._actors, self._call_id = actors, call_id
        self.issued: dict[int, int] = {}
        self.released = False
        self._failed_at: float | None = None
        self._freed_at = 0.0
        self._done: set[str] = set()
        self._stuck: tuple[float, dict[int, int]] | None = None

    def go_on(self, failed: Sequence[int], level: int | None) -> bool:
        """Do what is due for the others; True once, where the failure is to be shown before they have ended.

        Args:
            failed: indices of the workers that failed.
            level: collectives that the one with the fewest had issued; None of workers that wait for no other.
        """
        now = time.monotonic()
        self._failed_at = now if self._failed_at is None else self._failed_at
        running = [i for i in range(len(self._actors)) if i not in failed]
        if self._once("stop", now - self._failed_at > STOP_S):
            for i in running:
                self._actors[i].stop.remote(self._call_id)
        if level is not None and not self.released:
            self.released = self._lost(now, any(self.issued.get(i, 0) > level for i in running))
            self._freed_at = now
        if self.released:  # who fails as another is gone is ended in turn: a third may wait for it
            self.end(failed if now - self._freed_at < FREED_S else range(len(self._actors)))
        return self._once("tell", now - self._failed_at > TELL_S)

    def _lost(self, now: float, ahead: bool) -> bool:
        """Whether nothing comes of waiting any more. `ahead`: some wait for a collective of a failed one."""
        if not ahead:
            self._stuck = None
            assert self._failed_at is not None
            return now - self._failed_at > FAILED_PEER_WAIT_S
        if self._stuck is None or self._stuck[1] != self.issued:
            self._stuck = now, dict(self.issued)
        return now - self._stuck[0] > STUCK_S

    def _once(self, what: str, due: bool) -> bool:
        if not due or what in self._done:
            return False
        self._done.add(what)
        return True

    def end(self, which: Sequence[int]) -> None:
        """End the processes of these workers."""
        for i in which:
            if self._once(f"end {i}", True):
                self._actors[i].leave.remote()
