"""Which ranks gather their prompts to which, and whose outputs are whose: the arithmetic of `gather_and_generate`.

Ranks that share one inference engine (a tensor-parallel group) are neighbours: with 8 ranks and `engine_tp_size=4`,
ranks 0–3 gather to rank 0 and ranks 4–7 to rank 4. Outputs go back in the order in which prompts came, whatever number
each rank had.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from rlbench.errors import EngineError
from rlbench.strategies.config import OptionError

T = TypeVar("T")


@dataclass(frozen=True)
class GatherPlan:
    """How `world_size` ranks share engines of `tp_size` ranks each; made by `gather_plan`."""

    world_size: int
    tp_size: int

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each engine; the first of a group leads it."""
        starts = range(0, self.world_size, self.tp_size)
        return tuple(tuple(range(start, start + self.tp_size)) for start in starts)

    @property
    def engines(self) -> int:
        """How many engines there are."""
        return self.world_size // self.tp_size

    def group_of(self, rank: int) -> tuple[int, ...]:
        """The ranks that share an engine with `rank`, itself among them."""
        if not 0 <= rank < self.world_size:
            raise EngineError(f"there is no rank {rank}; there are {self.world_size}.")
        return self.groups[rank // self.tp_size]

    def leader_of(self, rank: int) -> int:
        """The rank to which `rank` gathers."""
        return self.group_of(rank)[0]

    def slices(self, rank: int, counts: Sequence[int]) -> dict[int, slice]:
        """Where the prompts of each rank of a group lie among those gathered.

        Args:
            rank: any of the group.
            counts: prompts of each rank of the group, in rank order; 0 is allowed.
        """
        group = self.group_of(rank)
        if len(counts) != len(group):
            raise EngineError(f"{len(counts)} counts for a group of {len(group)} ranks; give one per rank.")
        found, start = {}, 0
        for member, count in zip(group, counts, strict=True):
            found[member] = slice(start, start + count)
            start += count
        return found


def gather_plan(world_size: int, engine_tp_size: int) -> GatherPlan:
    """The plan for so many ranks.

    Raises:
        OptionError: ranks that cannot be shared out over engines of this size.
    """
    if engine_tp_size < 1 or world_size % engine_tp_size:
        raise OptionError(
            f"world_size % engine_tp_size must be 0, and engine_tp_size at least 1: {world_size} ranks cannot share "
            f"engines of {engine_tp_size}."
        )
    return GatherPlan(world_size, engine_tp_size)


def merge(parts: Sequence[Sequence[T]]) -> tuple[list[T], list[int]]:
    """What the ranks of a group gathered, as one list in rank order, and how many each had."""
    return [item for part in parts for item in part], [len(part) for part in parts]


def split(outputs: Sequence[T], counts: Sequence[int]) -> list[list[T]]:
    """The outputs of each rank, in the order of its prompts; undoes `merge`.

    Raises:
        EngineError: not one output per prompt.
    """
    if len(outputs) != sum(counts):
        raise EngineError(f"the engine gave {len(outputs)} outputs for {sum(counts)} prompts; one each is needed.")
    found, start = [], 0
    for count in counts:
        found.append(list(outputs[start : start + count]))
        start += count
    return found
