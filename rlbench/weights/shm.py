"""Weights through shared memory: files under /dev/shm, mapped once on each side and reused.

A mapping whose pages are already there is written at memcpy speed; fresh pages cost four times that, and
Ray's object store twenty times. So the writer keeps its files between syncs, and the reader keeps its
mappings. The writer must not stage again before the replicas have applied: the reader's tensors are views of
the files, not copies.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from rlbench.errors import WeightSyncError
from rlbench.private import others_access
from rlbench.units import format_bytes
from rlbench.weights.manifest import Bucket, Manifest, TensorEntry, aligned, sent_twice

SHM_DIR = "/dev/shm"
DEFAULT_BUCKET_BYTES = 256 << 20


@dataclass
class _Mapping:
    """One mapped file and the whole of it as a byte tensor."""

    inode: int
    nbytes: int
    data: torch.Tensor


class ShmStage:
    """The sender's side: persistent shared-memory files, one per bucket.

    Args:
        prefix: start of the file names under /dev/shm; unique per sender, so that whoever ends a session can
            sweep it.
        bucket_bytes: a bucket is closed before it grows beyond this; a larger tensor gets a bucket of its
            own.
    """

    def __init__(self, prefix: str, bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> None:
        if "/" in prefix or bucket_bytes <= 0:
            raise ValueError(f"prefix {prefix!r} must be a file name and bucket_bytes {bucket_bytes} positive")
        self.prefix = prefix
        self.bucket_bytes = bucket_bytes
        self._mappings: list[_Mapping] = []

    def write(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Manifest:
        """Copy the tensors (any device, any strides) into shared memory, in order, and describe where they
        lie.

        The iterator is consumed one tensor at a time, so gathered parameters need not exist all at once.
        Overwrites what was staged before: call it only once the replicas have applied that.

        Raises:
            WeightSyncError: a name comes twice, shared memory is full, or another user holds the file's name.
        """
        buckets: list[Bucket] = []
        entries: list[TensorEntry] = []
        seen: set[str] = set()
        cursor = 0
        for name, tensor in tensors:
            if name in seen:
                raise sent_twice(name)
            seen.add(name)
            nbytes = tensor.numel() * tensor.element_size()
            if entries and cursor + nbytes > self.bucket_bytes:
                buckets.append(self._bucket(len(buckets), cursor, entries))
                entries, cursor = [], 0
            target = self._room(len(buckets), cursor + nbytes)[cursor : cursor + nbytes]
            if nbytes:
                target.view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())
            dtype = str(tensor.dtype).removeprefix("torch.")
            entries.append(TensorEntry(name, dtype, tuple(tensor.shape), cursor, nbytes))
            cursor = aligned(cursor + nbytes)
        if entries:
            buckets.append(self._bucket(len(buckets), cursor, entries))
        return Manifest("shm", tuple(buckets))

    def close(self) -> None:
        """Unmap and unlink everything; staging again afterwards starts with fresh files."""
        for index in range(len(self._mappings)):
            Path(self._path(index)).unlink(missing_ok=True)
        self._mappings.clear()

    def _path(self, index: int) -> str:
        return f"{SHM_DIR}/{self.prefix}-{index}"

    def _bucket(self, index: int, nbytes: int, entries: list[TensorEntry]) -> Bucket:
        return Bucket(self._path(index), nbytes, tuple(entries))

    def _room(self, index: int, nbytes: int) -> torch.Tensor:
        """Bucket `index` as bytes, at least `nbytes` of them. Grows the file where it is too small."""
        if index < len(self._mappings) and self._mappings[index].nbytes >= nbytes:
            return self._mappings[index].data
        # Doubling keeps small models small and maps a large one a few times only, in the first sync.
        size = min(max(2 * nbytes, 1 << 20), max(self.bucket_bytes, nbytes))
        descriptor = _open_own(self._path(index), os.O_RDWR | os.O_CREAT)
        try:
            os.posix_fallocate(descriptor, 0, size)  # a full /dev/shm says so here, not by SIGBUS in the copy
            mapping = _map(descriptor)
        except OSError as error:
            if index == len(self._mappings):
                Path(self._path(index)).unlink()
            free = os.statvfs(SHM_DIR)
            raise WeightSyncError(
                f"no room in {SHM_DIR} for a bucket of {format_bytes(size)} "
                f"({format_bytes(free.f_bavail * free.f_frsize)} free: {error.strerror}): give the machine or "
                "container more shared memory (docker: --shm-size)"
            ) from error
        finally:
            os.close(descriptor)
        self._mappings[index : index + 1] = [mapping]
        return mapping.data


class ShmReader:
    """The receiver's side: maps each file once and hands out views of it."""

    def __init__(self) -> None:
        self._mappings: dict[str, _Mapping] = {}

    def read(self, bucket: Bucket) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, tensor) of one bucket: views of shared memory, valid until the sender stages again.

        Raises:
            WeightSyncError: the file is gone, another user's, or smaller than the manifest says.
        """
        data = self._open(bucket)
        for entry in bucket.entries:
            yield entry.name, view(data, entry)

    def close(self) -> None:
        """Forget all mappings (they go when the last view of them goes)."""
        self._mappings.clear()

    def _open(self, bucket: Bucket) -> torch.Tensor:
        try:
            found = os.stat(bucket.path)
            known = self._mappings.get(bucket.path)
            if known is None or (known.inode, known.nbytes) != (found.st_ino, found.st_size):
                descriptor = _open_own(bucket.path, os.O_RDWR)
                try:
                    known = self._mappings[bucket.path] = _map(descriptor)
                finally:
                    os.close(descriptor)
        except OSError as error:
            raise WeightSyncError(
                f"the staged weights {bucket.path} cannot be read here ({error.strerror}): sender and replica "
                "must be on one host, and the sender must still hold its stage; sync again"
            ) from error
        if known.nbytes < bucket.nbytes:
            raise WeightSyncError(f"{bucket.path} holds {known.nbytes} bytes, the manifest says {bucket.nbytes}")
        return known.data


def read_manifest(manifest: Manifest, reader: ShmReader | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every (name, tensor) of a shared-memory manifest as zero-copy views."""
    reader = reader or ShmReader()
    for bucket in manifest.buckets:
        yield from reader.read(bucket)


def view(data: torch.Tensor, entry: TensorEntry) -> torch.Tensor:
    """One tensor of a byte buffer, without a copy."""
    dtype = getattr(torch, entry.dtype)
    return data[entry.offset : entry.offset + entry.nbytes].view(dtype).view(entry.shape)


def _open_own(path: str, flags: int) -> int:
    """Open a stage file of this user's alone: the names are no secret, and everybody may use them in shared memory."""
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW, 0o600)
    except OSError:
        others = others_access(os.lstat(path))
        if others is None:
            raise
        raise _open_to(others, path) from None  # a link, or a file that we are kept out of
    others = others_access(os.fstat(descriptor))
    if others is None:
        return descriptor
    os.close(descriptor)
    raise _open_to(others, path)


def _open_to(others: str, path: str) -> WeightSyncError:
    return WeightSyncError(
        f"{path} is not used for weights, since another user could read or change them there: it is {others}. Remove "
        "it, or end this session and start one of another name"
    )


def _map(descriptor: int) -> _Mapping:
    status = os.fstat(descriptor)
    mapped = mmap.mmap(descriptor, status.st_size)
    return _Mapping(status.st_ino, status.st_size, torch.frombuffer(mapped, dtype=torch.uint8))
