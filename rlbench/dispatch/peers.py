"""The workers that go on when another has failed in the same call: asked to stop, and ranks released. A rank that fails
leaves its peers in a collective that only the end of its process releases; so it is ended, but only where a peer is
seen to wait: it has issued more collectives than the failed one, and issues no further one."""

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
    """The `actors` of one call; `issued`: collectives of each, when last seen; `released`: whether workers were
    ended."""

    def __init__(self, actors: Sequence[Any], call_id: str) -> None:
        self._actors, self._call_id = actors, call_id
        self.issued: dict[int, int] = {}
        self.released = False
        self._failed_at: float | None = None
        self._freed_at = 0.0
        self._done: set[str] = set()
        self._stuck: tuple[float, dict[int, int]] | None = None

    def go_on(self, failed: Sequence[int], level: int | None) -> bool:
        """Do what is due for the others; True once, where the failure is to be shown before they have ended. `level`:
        collectives that the failed with the fewest had issued; None of workers that wait for no other."""
        now = time.monotonic()
        self._failed_at = now if self._failed_at is None else self._failed_at
        running = [i for i in range(len(self._actors)) if i not in failed]
        if self._once("stop", now - self._failed_at > STOP_S):
            for i in running:
                self._actors[i].stop.remote(self._call_id)
        if level is not None and not self.released:
            ahead = any(self.issued.get(i, 0) > level for i in running)
            self.released = self._is_stuck(now) if ahead else now - self._failed_at > FAILED_PEER_WAIT_S
            self._stuck = self._stuck if ahead else None
            self._freed_at = now
        if self.released:  # who fails as another is gone is ended in turn: a third may wait for it
            self.end(failed if now - self._freed_at < FREED_S else range(len(self._actors)))
        return self._once("tell", now - self._failed_at > TELL_S)

    def _is_stuck(self, now: float) -> bool:
        """Whether no peer has issued a collective for so long."""
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
