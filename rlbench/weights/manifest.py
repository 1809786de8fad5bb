"""What travels from a training rank to a replica: where each tensor lies. Plain values, no torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlbench.errors import WeightSyncError

ALIGNMENT = 64  # bytes; every tensor starts on a cache line, which any dtype may be viewed from


@dataclass(frozen=True)
class TensorEntry:
    """One tensor in a bucket: checkpoint `name`, torch dtype name (`float32`), `shape`, `offset` and
    `nbytes`.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Bucket:
    """One contiguous buffer. `path`: its shared-memory file (transport "shm"). `handles`: for transport
    "ipc", the pickled CUDA IPC handle of the buffer by the GPU's uuid. By "broadcast" it only exists while it is sent.
    """

    path: str
    nbytes: int
    entries: tuple[TensorEntry, ...]
    handles: tuple[tuple[str, bytes], ...] = ()


@dataclass(frozen=True)
class ChannelInfo:
    """A group for broadcasts and where it meets.

    Attributes:
        token: its identity; a new one each time it is made.
        host, port: of the sender's store, where the members find each other.
        world_size: the sender (rank 0) and all replica workers.
        backend: "nccl" or "gloo".
        first_rank: of the first worker of the replica that reads this.
    """

    token: str
    host: str
    port: int
    world_size: int
    backend: str
    first_rank: int = 1


@dataclass(frozen=True)
class Manifest:
    """One complete set of weights, staged, or (by `channel`) about to be sent. `transport`: "shm" (any device, one
    host), "ipc" (CUDA, one host) or "broadcast".
    """

    transport: str
    buckets: tuple[Bucket, ...]
    channel: ChannelInfo | None = None

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Manifest:
        """The manifest of shared memory that `dataclasses.asdict` and JSON made a dict of."""
        buckets = tuple(
            Bucket(b["path"], b["nbytes"], tuple(TensorEntry(**e | {"shape": tuple(e["shape"])}) for e in b["entries"]))
            for b in value["buckets"]
        )
        return cls(value["transport"], buckets)

    @property
    def entries(self) -> Iterator[TensorEntry]:
        """All tensors, in the order they were staged."""
        return (entry for bucket in self.buckets for entry in bucket.entries)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors (padding not counted)."""
        return sum(entry.nbytes for entry in self.entries)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape by checkpoint name."""
        return {entry.name: entry.shape for entry in self.entries}


def aligned(offset: int) -> int:
    """The next offset a tensor may start at."""
    return -(-offset // ALIGNMENT) * ALIGNMENT


def planned(tensors: Iterable[tuple[str, str, tuple[int, ...], int]], bucket_bytes: int) -> tuple[Bucket, ...]:
    """Lay tensors, given as (name, dtype, shape, bytes), out in buckets; a larger one gets a bucket of its own.

    Raises:
        WeightSyncError: a name comes twice.
    """
    buckets: list[Bucket] = []
    entries: list[TensorEntry] = []
    seen: set[str] = set()
    cursor = 0
    for name, dtype, shape, nbytes in tensors:
        if name in seen:
            raise sent_twice(name)
        seen.add(name)
        if entries and cursor + nbytes > bucket_bytes:
            buckets.append(Bucket("", cursor, tuple(entries)))
            entries, cursor = [], 0
        entries.append(TensorEntry(name, dtype, shape, cursor, nbytes))
        cursor = aligned(cursor + nbytes)
    if entries:
        buckets.append(Bucket("", cursor, tuple(entries)))
    return tuple(buckets)


def sent_twice(name: str) -> WeightSyncError:
    """The error for a checkpoint name that comes twice in one sync."""
    return WeightSyncError(f"weight {name!r} was staged twice in one sync: send each checkpoint name once")


def merged(manifests: Sequence[Manifest]) -> Manifest:
    """One manifest of what several ranks exported of the same weights, each on its own GPU.

    Raises:
        WeightSyncError: none was given, or their layouts differ.
    """
    if not manifests:
        raise WeightSyncError("no training rank exported its weights")
    first = manifests[0]
    buckets = []
    if any([b.entries for b in m.buckets] != [b.entries for b in first.buckets] for m in manifests):
        raise WeightSyncError(
            "the training ranks exported different weights: postprocess_output_named_parameters must give the same "
            "names and shapes on all ranks"
        )
    for copies in zip(*(m.buckets for m in manifests), strict=True):
        buckets.append(replace(copies[0], handles=tuple(h for copy in copies for h in copy.handles)))
    return replace(first, buckets=tuple(buckets))
