"""How ranks agree and reduce: votes and small objects over a gloo group of their own, tensors over their device's."""

from __future__ import annotations

import contextlib
import pickle
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlbench.errors import EngineError
from rlbench.strategies.internals import issued_in, process_groups
from rlbench.user_code import user_code

PACKET, LENGTH = 2048, 8
"""Bytes of a value that goes to all ranks in one collective, with its length in front; and of that length."""
OPS = {"mean": "SUM", "sum": "SUM", "max": "MAX", "min": "MIN"}


class Verdict(IntEnum):
    """What a rank votes; the greatest vote of all ranks counts."""

    GO = 0
    STOP = 1
    FAILED = 2


_issued_by_left_groups = 0


def leave(group: Any) -> None:
    global _issued_by_left_groups
    with contextlib.suppress(ValueError, AssertionError):  # the ranks have parted already
        issued = issued_in([group])
        dist.destroy_process_group(group)
        _issued_by_left_groups += issued


def issued_collectives() -> int:
    """Count the collectives that this process has issued, over all groups it has, and those of `ControlGroup` that it
    had: it does not fall where a trainer leaves its group, as peers are compared by it."""
    if not dist.is_initialized():
        return 0
    return _issued_by_left_groups + issued_in(process_groups())


def peer_failed(message: str) -> EngineError:
    """Make an error for a rank that gave up because another failed; `secondary` says so to whoever collects them."""
    error = EngineError(message)
    error.__dict__["secondary"] = True
    return error


def ranks_apart(message: str) -> EngineError:
    """Make an error of a rank whose state is not that of the others any more; by `ends_rank` it must not go on."""
    error = EngineError(message)
    error.__dict__["ends_rank"] = True
    return error


def on_all_ranks(error: Exception) -> bool:
    """Whether `raise_together` raised it: every rank has left the call with an error of its own."""
    return bool(error.__dict__.get("on_all_ranks"))


class ControlGroup:
    """A gloo group beside the model's own, on CPU and GPU hosts alike; its connections end with it."""

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.group = dist.new_group(backend="gloo")
        if self.world_size > 1:  # a rank that drops it at once would cut off one that is still connecting
            dist.barrier(group=self.group)
        weakref.finalize(self, leave, self.group).atexit = False

    def vote(self, own: Verdict) -> Verdict:
        """Return the greatest vote of all ranks; collective."""
        if self.world_size == 1:
            return own
        ballot = torch.tensor([int(own)])
        dist.all_reduce(ballot, op=dist.ReduceOp.MAX, group=self.group)
        return Verdict(int(ballot))

    def unanimous(self, own: bool) -> bool:
        """Return whether all ranks say yes; collective."""
        return self.vote(Verdict.GO if own else Verdict.STOP) is Verdict.GO

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's small picklable value, in rank order; collective. Of at most `PACKET` bytes it is one
        collective, at half of the processor time of torch's two."""
        if self.world_size == 1:
            return [value]
        blob = pickle.dumps(value)
        packet = len(blob).to_bytes(LENGTH, "little") + blob[: PACKET - LENGTH]
        own = torch.frombuffer(bytearray(packet.ljust(PACKET, b"\0")), dtype=torch.uint8)
        packets = [torch.empty_like(own) for _ in range(self.world_size)]
        dist.all_gather(packets, own, group=self.group)
        received = [bytes(one.numpy()) for one in packets]
        ends = [LENGTH + int.from_bytes(one[:LENGTH], "little") for one in received]
        if max(ends) <= PACKET:
            return [pickle.loads(one[LENGTH:end]) for one, end in zip(received, ends, strict=True)]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def scatter(self, parts: Sequence[Any] | None) -> Any:
        """Give each rank its part of what rank 0 holds, one per rank; the others pass None; collective."""
        if self.world_size == 1:
            assert parts is not None
            return parts[0]
        mine: list[Any] = [None]
        dist.scatter_object_list(mine, None if parts is None else list(parts), src=0, group=self.group)
        return mine[0]

    def together(self, doing: str, work: Callable[[], Any]) -> Any:
        """Run `work`, which holds no collective, on every rank; if it fails on one, it fails on all."""
        result = None
        with self.ended_together(doing), user_code():
            result = work()
        return result

    @contextlib.contextmanager
    def ended_together(self, doing: str) -> Iterator[None]:
        """End the call on all ranks where the block, after its last collective, fails on one: they would wait for it in
        the next."""
        failure: Exception | None = None
        try:
            yield
        except Exception as error:  # whatever it is, the peers must hear of it
            failure = error
        self.raise_together(doing, failure)

    def stops(self, doing: str, failure: Exception | None, asked: bool) -> bool:
        """Return whether a rank was `asked` to stop; where `doing` failed on one, raise on all; collective."""
        verdict = self.vote(Verdict.FAILED if failure is not None else Verdict.STOP if asked else Verdict.GO)
        if verdict is Verdict.FAILED:
            self.raise_together(doing, failure)
        return verdict is Verdict.STOP

    def raise_together(self, doing: str, failure: Exception | None) -> None:
        """Share the failures of `doing`; collective. Raise the rank's own failure, else one that names another's."""
        if self.vote(Verdict.GO if failure is None else Verdict.FAILED) is Verdict.GO:
            return  # as a rule: what would be said is gathered, which takes far longer, where there is some
        texts = self.gather(None if failure is None else f"{type(failure).__name__}: {failure}")
        rank, text = next((rank, text) for rank, text in enumerate(texts) if text is not None)
        if failure is None:
            failure = peer_failed(
                f"{doing} failed on rank {rank} ({text}); this rank stopped with it and stays usable."
            )
        failure.__dict__["on_all_ranks"] = True
        raise failure


class Collectives:
    """Of a strategy: joins what its ranks have, over the group of their device; every method is collective."""

    def __init__(self, control: ControlGroup, device: torch.device) -> None:
        self._control, self._device = control, device

    def all_reduce(self, data: Any, op: str = "mean") -> Any:
        """Reduce over all ranks, and leave the argument as it is.

        Args:
            data: a number, a tensor, or a dict of such with the same keys in the same order on all ranks.
            op: "mean", "sum", "max" or "min".

        Returns:
            The like of `data`, on its device. A mean of whole numbers is a float.
        """
        if op not in OPS:
            raise EngineError(f"op={op!r}: all_reduce knows mean, max, sum and min.")
        if isinstance(data, Mapping):
            return {key: self.all_reduce(value, op) for key, value in data.items()}
        tensor = data.detach().clone() if isinstance(data, Tensor) else torch.tensor(data, dtype=torch.float64)
        tensor = tensor.to(self._device)
        if self._control.world_size > 1:
            dist.all_reduce(tensor, op=getattr(dist.ReduceOp, OPS[op]))
        if op == "mean":
            tensor = tensor / self._control.world_size
        if isinstance(data, Tensor):
            return tensor.to(data.device)
        return int(tensor) if isinstance(data, int) and op != "mean" else float(tensor)

    def all_gather(self, data: Any) -> Any:
        """Join what the ranks have, in their order: a tensor along its first dimension, whose lengths may differ (a
        single value becomes a row of them), a number to a list, a dict to a dict of such."""
        if isinstance(data, Mapping):
            return {key: self.all_gather(value) for key, value in data.items()}
        if not isinstance(data, Tensor):
            return [type(data)(value) for value in self._control.gather(data)]
        tensor = data.detach().reshape(1) if data.dim() == 0 else data.detach()
        if self._control.world_size == 1:
            return tensor.clone()
        lengths = self._control.gather(len(tensor))
        padded = tensor.new_zeros((max(lengths), *tensor.shape[1:]), device=self._device)
        padded[: len(tensor)] = tensor
        parts = [torch.empty_like(padded) for _ in lengths]
        dist.all_gather(parts, padded)
        return torch.cat([part[:length] for part, length in zip(parts, lengths, strict=True)]).to(data.device)

    def barrier(self) -> None:
        """Wait until all ranks are here."""
        self._control.vote(Verdict.GO)
