"""What travels from a training rank to a replica: where each tensor lies. Plain values, no torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

from rlbench.errors import WeightSyncError

ALIGNMENT = 64  # bytes; every tensor starts on a cache line, which any dtype may be viewed from


@dataclass(frozen=True)
class TensorEntry:
    """One tensor in a bucket: its checkpoint name, torch's name of its dtype, and the bytes it takes from `offset`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Bucket:
    """One contiguous buffer, which by "broadcast" only exists while it is sent."""

    path: str  # of its file, for transport "shm"
    nbytes: int
    entries: tuple[TensorEntry, ...]
    handles: tuple[tuple[str, bytes], ...] = ()  # for "ipc": a GPU's uuid and the pickled CUDA IPC handle


@dataclass(frozen=True)
class ChannelInfo:
    """A group for broadcasts and where it meets."""

    token: str  # its identity; a new one each time it is made
    host: str  # of the sender's store, where the members find each other
    port: int
    world_size: int  # the sender (rank 0) and all replica workers
    backend: str  # "nccl" or "gloo"
    first_rank: int = 1  # of the first worker of the replica that reads this


@dataclass(frozen=True)
class AdapterInfo:
    """What the tensors of a LoRA adapter do not say of it; `number`: of the adapter in a replica, from 1 on."""

    number: int
    rank: int
    alpha: float
    targets: tuple[str, ...]  # ends of the names of the layers it is on


@dataclass(frozen=True)
class Handover:
    """To which engine weights go, by which token all its replicas have `held` since an earlier sync ("": by none), and
    the `token` of this one; `delta`: as differences to those held."""

    to: str
    held: str
    token: str
    delta: bool = False


@dataclass(frozen=True)
class Manifest:
    """One complete set of weights, or one `adapter` alone, staged, or (by `channel`) about to be sent.

    `unchanged`: what replicas that hold the weights of the token `follows` have already; with it the set is complete.
    `delta`: tensors come as differences to those of `follows`, of which both sides hold copies (`delta.py`).
    """

    transport: str
    buckets: tuple[Bucket, ...]
    channel: ChannelInfo | None = None
    adapter: AdapterInfo | None = None
    unchanged: tuple[Bucket, ...] = ()
    follows: str = ""
    token: str = ""  # of what a replica then holds
    version: int = 0  # that it becomes, once it is proven
    delta: bool = False

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Manifest:
        """Read a manifest of shared memory that `dataclasses.asdict` and JSON made a dict of."""
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
        """Shape by checkpoint name, of what is left out as unchanged too."""
        return {entry.name: entry.shape for entry in (*self.entries, *self.left_out)}

    @property
    def left_out(self) -> Iterator[TensorEntry]:
        """All tensors that are unchanged."""
        return (entry for bucket in self.unchanged for entry in bucket.entries)

    def parted(self, sent: Set[str]) -> Manifest:
        """Return the same set of which only the tensors `sent` go, in the places they have."""
        unchanged = {entry.name for entry in self.entries} - sent
        return replace(self, buckets=_only(self.buckets, sent), unchanged=_only(self.buckets, unchanged))

    def whole(self) -> Manifest:
        """Return what lies in shared memory, whatever of it was written last."""
        entries: dict[tuple[str, int], list[TensorEntry]] = {}
        for bucket in (*self.buckets, *self.unchanged):
            entries.setdefault((bucket.path, bucket.nbytes), []).extend(bucket.entries)
        files = sorted(entries, key=lambda file: (len(file[0]), file[0]))  # their names end in numbers
        in_order = (tuple(sorted(entries[file], key=lambda e: (e.offset, e.nbytes))) for file in files)
        return Manifest(self.transport, tuple(Bucket(*file, es) for file, es in zip(files, in_order, strict=True)))


class Layout:
    """Places tensors (meta tensors too) in buckets of at most `bucket_bytes`; a larger one gets a bucket of its own."""

    def __init__(self, bucket_bytes: int, tensors: Iterable[tuple[str, Any]] = ()) -> None:
        self._bucket_bytes = bucket_bytes
        self._names: set[str] = set()
        self._buckets: list[list[TensorEntry]] = []
        for name, tensor in tensors:
            self.place(name, tensor)

    def place(self, name: str, tensor: Any) -> tuple[int, TensorEntry]:
        """Return in which bucket the next tensor lies, and where; WeightSyncError where a name comes twice."""
        if name in self._names:
            raise WeightSyncError(f"weight {name!r} was staged twice in one sync: send each checkpoint name once")
        self._names.add(name)
        offset = _end(self._buckets[-1]) if self._buckets else 0
        if not self._buckets or offset + tensor.nbytes > self._bucket_bytes:
            self._buckets.append([])
            offset = 0
        dtype = str(tensor.dtype).removeprefix("torch.")
        entry = TensorEntry(name, dtype, tuple(tensor.shape), offset, tensor.nbytes)
        self._buckets[-1].append(entry)
        return len(self._buckets) - 1, entry

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """What was placed so far."""
        return tuple(Bucket("", _end(entries), tuple(entries)) for entries in self._buckets)


def _only(buckets: Sequence[Bucket], names: Set[str]) -> tuple[Bucket, ...]:
    """Return the buckets with the entries of these names alone; those without any are left out."""
    parts = (replace(bucket, entries=tuple(e for e in bucket.entries if e.name in names)) for bucket in buckets)
    return tuple(part for part in parts if part.entries)


def _end(entries: Sequence[TensorEntry]) -> int:
    """Return the offset behind the last tensor at which another may start."""
    return -(-(entries[-1].offset + entries[-1].nbytes) // ALIGNMENT) * ALIGNMENT


def merged(parts: Sequence[Manifest | None]) -> Manifest:
    """Join what several ranks exported of the same weights, each on its own GPU, into one manifest; ranks that exported
    nothing gave None."""
    manifests = [part for part in parts if part is not None]
    if not manifests:
        raise WeightSyncError("no training rank exported its weights")
    first = manifests[0]
    if any([b.entries for b in m.buckets] != [b.entries for b in first.buckets] for m in manifests):
        raise WeightSyncError(
            "the training ranks exported different weights: postprocess_output_named_parameters must give the same "
            "names and shapes on all ranks"
        )
    by_rank = zip(*(manifest.buckets for manifest in manifests), strict=True)
    buckets = (replace(same[0], handles=tuple(handle for copy in same for handle in copy.handles)) for same in by_rank)
    return replace(first, buckets=tuple(buckets))
