"""How ranks agree without touching the model: votes, sums and small objects over a gloo group of their
own."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist

from rlbench.errors import EngineError
from rlbench.user_code import user_code


class Verdict(IntEnum):
    """What a rank votes; the greatest vote of all ranks counts."""

    GO = 0
    STOP = 1
    FAILED = 2


_issued_by_left_groups = 0


def _leave(group: Any) -> None:
    global _issued_by_left_groups
    with contextlib.suppress(ValueError, AssertionError):  # the ranks have parted already
        issued = _issued_in([group])
        dist.destroy_process_group(group)
        _issued_by_left_groups += issued


def issued_collectives() -> int:
    """Collectives that this process has issued, over all groups it has, and those of `ControlGroup` that it had; 0
    without any. It does not fall where a trainer leaves its group: peers are compared by it."""
    if not dist.is_initialized():
        return 0
    return _issued_by_left_groups + _issued_in(list(dist.distributed_c10d._world.pg_map))


def _issued_in(groups: Sequence[Any]) -> int:
    backends = {group._get_backend(device) for group in groups for device in group._device_types}
    return sum(backend._get_sequence_number_for_group() for backend in backends)  # a group asks one of its two alone


def peer_failed(message: str) -> EngineError:
    """An error for a rank that gave up because another one failed; `secondary` says so to whoever collects
    them."""
    error = EngineError(message)
    error.__dict__["secondary"] = True
    return error


def ranks_apart(message: str) -> EngineError:
    """An error of a rank whose state is not that of the others any more; `ends_rank` tells whoever collects them that
    it must not go on."""
    error = EngineError(message)
    error.__dict__["ends_rank"] = True
    return error


def on_all_ranks(error: Exception) -> bool:
    """Whether `raise_together` raised it: every rank has left the call with an error of its own."""
    return bool(error.__dict__.get("on_all_ranks"))


class ControlGroup:
    """A gloo group beside the model's own, on CPU and GPU hosts alike; its connections end with it."""

    def __init__(self, timeout: timedelta | None = None) -> None:
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.group = dist.new_group(backend="gloo", timeout=timeout)
        if self.world_size > 1:  # a rank that drops it at once would cut off one that is still connecting
            dist.barrier(group=self.group)
        weakref.finalize(self, _leave, self.group).atexit = False

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

    def scatter(self, parts: Sequence[Any] | None) -> Any:
        """Give each rank its part of what rank 0 holds, one per rank; the others pass None; collective."""
        if self.world_size == 1:
            assert parts is not None
            return parts[0]
        mine: list[Any] = [None]
        dist.scatter_object_list(mine, None if parts is None else list(parts), src=0, group=self.group)
        return mine[0]

    def together(self, doing: str, work: Callable[[], Any]) -> Any:
        """Run `work`, which holds no collective, on every rank; if it fails on one, it fails on all.

        Raises:
            Whatever `work` raised here; EngineError where only other ranks failed.
        """
        failure: Exception | None = None
        result = None
        try:
            with user_code():
                result = work()
        except Exception as error:  # whatever it is, the peers must hear of it
            failure = error
        self.raise_together(doing, failure)
        return result

    @contextlib.contextmanager
    def ended_together(self, doing: str) -> Iterator[None]:
        """What fails in the block on one rank, after its last collective (a file that rank 0 writes), ends the call on
        all: they would wait for it in the next."""
        failure: Exception | None = None
        try:
            yield
        except Exception as error:  # whatever it is, the peers must hear of it
            failure = error
        self.raise_together(doing, failure)

    def raise_together(self, doing: str, failure: Exception | None) -> None:
        """Share the failures of `doing`; collective. Raises the rank's own failure, else one that names
        another rank's."""
        said = self.gather(None if failure is None else f"{type(failure).__name__}: {failure}")
        failed = [(rank, text) for rank, text in enumerate(said) if text is not None]
        if not failed:
            return
        rank, text = failed[0]
        if failure is None:
            failure = peer_failed(
                f"{doing} failed on rank {rank} ({text}); this rank stopped with it and stays usable."
            )
        failure.__dict__["on_all_ranks"] = True
        raise failure
