"""What came of a change of an engine's device state, as its workers measured it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlbench.results import Result
from rlbench.units import format_bytes


@dataclass(frozen=True)
class Moved(Result):
    """Where an engine's parts are now, over all its workers. The parts are found by name, too: `moved["kv_cache"]`.

    `states`: cuda, cpu, meta, … by part. `freed` and `taken`: bytes of the device. `lost`: what cannot come back.
    `source`: where weights were read from again. `version`: of a replica's weights.
    """

    engine: str
    states: Mapping[str, str]
    freed: int = 0
    taken: int = 0
    lost: tuple[str, ...] = ()
    source: str | None = None
    version: int | None = None

    @classmethod
    def of(cls, engine: str, parts: Sequence[str], workers: Sequence[Mapping[str, Any]]) -> Moved:
        """Join what each worker says of itself; parts are in the same state on all of them."""
        first = workers[0]
        by_owner = sum(int(one.get("freed", 0)) for one in workers), sum(int(one.get("taken", 0)) for one in workers)
        smaller = [int(one.get("freed_bytes", 0)) for one in workers]  # of the process, measured; it may have grown
        return cls(
            engine,
            {part: str(first[part]) for part in parts},
            by_owner[0] + sum(n for n in smaller if n > 0),
            by_owner[1] - sum(n for n in smaller if n < 0),
            tuple(first.get("lost", ())),
            first.get("materialized_from") or first.get("reloaded_from"),
            first.get("version"),
        )

    def named(self) -> dict[str, Any]:
        """The fields, and the parts."""
        return {**super().named(), **self.states}

    def __repr__(self) -> str:
        where = ", ".join(f"{part} {state}" for part, state in self.states.items())
        sizes = [f"{word} {format_bytes(n)}" for word, n in (("freed", self.freed), ("took", self.taken)) if n]
        lost = [f"lost: {', '.join(self.lost)}"] if self.lost else []
        return f"Moved({' · '.join([f'{self.engine}: {where}', *sizes, *lost])})"
