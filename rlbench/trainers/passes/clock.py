"""Wall seconds of a pass by phase."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """Wall seconds by phase. On a GPU work is queued, so a phase holds what it waited for."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.add(phase, begin)

    def add(self, phase: str, begin: float) -> float:
        """Count the time since `begin` to a phase; returns now."""
        now = time.perf_counter()
        self.seconds[phase] += now - begin
        return now
