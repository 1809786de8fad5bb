"""How ranks agree without touching the model: votes, sums and small objects over a gloo group of their
own."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist

from rlbench.errors import EngineError


class Verdict(IntEnum):
    """What a rank votes; the greatest vote of all ranks counts."""

    GO = 0
    STOP = 1
    FAILED = 2


def peer_failed(message: str) -> EngineError:
    """An error for a rank that gave up because another one failed; `secondary` says so to whoever collects
    them."""
    error = EngineError(message)
    error.__dict__["secondary"] = True
    return error


class ControlGroup:
    """A gloo group beside the model's own, on CPU and GPU hosts alike."""

    def __init__(self, timeout: timedelta | None = None) -> None:
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.group = dist.new_group(backend="gloo", timeout=timeout)

    def vote(self, own: Verdict) -> Verdict:
        """Return the greatest vote of all ranks; collective."""
        if self.world_size == 1:
            return own
        ballot = torch.tensor([int(own)])
        dist.all_reduce(ballot, op=dist.ReduceOp.MAX, group=self.group)
        return Verdict(int(ballot))

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's small picklable value, in rank order; collective."""
        if self.world_size == 1:
            return [value]
        found: list[Any] = [None] * self.world_size
        dist.all_gather_object(found, value, group=self.group)
        return found

    def together(self, doing: str, work: Callable[[], Any]) -> Any:
        """Run `work`, which holds no collective, on every rank; if it fails on one, it fails on all.

        Raises:
            Whatever `work` raised here; EngineError where only other ranks failed.
        """
        failure: Exception | None = None
        result = None
        try:
            result = work()
        except Exception as error:  # whatever it is, the peers must hear of it
            failure = error
        self.raise_together(doing, failure)
        return result

    def raise_together(self, doing: str, failure: Exception | None) -> None:
        """Share the failures of `doing`; collective. Raises the rank's own failure, else one that names
        another rank's."""
        said = self.gather(None if failure is None else f"{type(failure).__name__}: {failure}")
        if failure is not None:
            raise failure
        failed = [(rank, text) for rank, text in enumerate(said) if text is not None]
        if failed:
            rank, text = failed[0]
            raise peer_failed(
                f"{doing} failed on rank {rank} ({text}); this rank stopped with it and stays usable."
            )
