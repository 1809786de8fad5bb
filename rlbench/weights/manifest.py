"""What travels from a training rank to a replica: where each tensor lies. Plain values, no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

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
    "ipc", the pickled CUDA IPC handle of the buffer by the GPU's uuid.
    """

    path: str
    nbytes: int
    entries: tuple[TensorEntry, ...]
    handles: tuple[tuple[str, bytes], ...] = ()


@dataclass(frozen=True)
class Manifest:
    """One complete set of weights, staged. `transport`: "shm" (any device, one host) or "ipc" (CUDA, one
    host).
    """

    transport: str
    buckets: tuple[Bucket, ...]

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
