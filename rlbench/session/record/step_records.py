"""The records of a session's steps as this kernel knows them: what the monitor has told once is not asked for again."""

from __future__ import annotations

import threading
from typing import Any

from rlbench.dispatch.link import Link
from rlbench.monitor.state import lean


class StepRecords:
    """Reads the history of a session. A record never changes, and keeps its number when the session goes back."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._lock = threading.Lock()
        self._entries: list[dict[str, Any]] = []
        self._known: tuple[list[int], list[dict[str, Any]]] = [], []

    def history(self) -> list[dict[str, Any]]:
        """Return the records that led to where the session stands, oldest first; not to be changed."""
        return self.followed()[1]

    def course(self) -> list[int]:
        """Return their numbers; not to be changed."""
        return self.followed()[0]

    def course_to(self, tip: int | None) -> list[int]:
        """Return the numbers of the records that led to number `tip`, as where a branch was left, newest first."""
        found: list[int] = []
        while tip is not None:
            found.append(tip)
            tip = self._entries[tip]["parent"]
        return found

    def followed(self) -> tuple[list[int], list[dict[str, Any]]]:
        """Return both, of one moment: what is new is asked for, and goes on from what is known where the session did.
        An interrupt leaves what was known."""
        with self._lock:
            tip, fresh = self._link.steps(len(self._entries))
            self._entries += [entry | {"record": lean(entry["record"])} for entry in fresh]
            course, history = self._known
            last = course[-1] if course else None
            numbers: list[int] = []
            at = tip
            while at is not None and at != last:
                numbers.append(at)
                at = self._entries[at]["parent"]
            if at is None:  # it went back, or stands at its begin
                course, history = [], []
            if numbers or course is not self._known[0]:
                numbers.reverse()
                self._known = course + numbers, history + [self._entries[number]["record"] for number in numbers]
            return self._known
