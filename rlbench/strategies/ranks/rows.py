"""Ranks that see the same rows: neighbours, as many as compute layers together or split sequences between them.

Every rank of a group holds the whole of the rows' loss, so it counts once where groups, not ranks, are added up.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Self, TypeVar

import torch.distributed as dist

from rlbench.strategies.ranks.control import ControlGroup, leave

T = TypeVar("T")


class RowGroup:
    """One rank's place among those that see the same rows.

    Attributes:
        size: ranks of the group. 1: each has rows of its own.
        index: place of this rank in it.
        number, count: of the group, and how many there are; each has rows of its own.
    """

    def __init__(self, size: int = 1, rank: int = 0, world_size: int = 1) -> None:
        self.size, self.index, self.number, self.count = size, rank % size, rank // size, world_size // size
        self._group: Any = None
        if size > 1:  # every rank takes part in making every group
            groups = [dist.new_group(range(first, first + size)) for first in range(0, world_size, size)]
            self._group = groups[self.number]
            dist.barrier(group=self._group)
            weakref.finalize(self, leave, self._group).atexit = False

    @classmethod
    def of(cls, control: ControlGroup, size: int) -> Self:
        """Split the ranks into groups of `size`, which divides them; collective."""
        return cls(size, control.rank, control.world_size)

    def of_each(self, by_rank: Sequence[T]) -> Sequence[T]:
        """Return, of what `ControlGroup.gather` gave, that of one rank of each group."""
        return by_rank[:: self.size]

    def shared(self, own: Sequence[T]) -> tuple[list[T], int]:
        """Return what the ranks of the group have, one after the other, and where this rank's begins; collective."""
        if self.size == 1:
            return list(own), 0
        parts: list[Any] = [None] * self.size
        dist.all_gather_object(parts, list(own), group=self._group)
        return [one for part in parts for one in part], sum(map(len, parts[: self.index]))
