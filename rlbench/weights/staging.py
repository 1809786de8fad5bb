"""Weights staged where replicas on this host read them without a copy: shared memory, or one GPU's memory (CUDA IPC).

Files under /dev/shm are mapped once on each side and reused, as fresh pages cost four times a copy. The sender must not
stage again before the replicas have applied, since they read views. IPC is not exercised on a CPU host.
"""

from __future__ import annotations

import mmap
import os
import pickle
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from rlbench.errors import WeightSyncError
from rlbench.private import others_access
from rlbench.units import format_bytes
from rlbench.weights.facts import gpu_uuid
from rlbench.weights.manifest import Bucket, Layout, Manifest, TensorEntry

SHM_DIR = "/dev/shm"
DEFAULT_BUCKET_BYTES = 256 << 20


@dataclass
class _Mapping:
    """One mapped file and the whole of it as a byte tensor."""

    inode: int
    nbytes: int
    data: torch.Tensor


class ShmStage:
    """The sender's side: one persistent file per bucket, its name begun by `prefix`, which no other sender has."""

    def __init__(self, prefix: str, bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> None:
        self.prefix = prefix
        self.bucket_bytes = bucket_bytes
        self._mappings: list[_Mapping] = []
        self._written = Manifest("shm", ())

    def write(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Manifest:
        """Copy the tensors into shared memory, over what was staged before; one is taken at a time."""
        layout = Layout(self.bucket_bytes)
        for name, tensor in tensors:
            index, entry = layout.place(name, tensor)
            view(self._room(index, entry.offset + entry.nbytes), entry).copy_(tensor.detach())
        buckets = enumerate(layout.buckets)
        self._written = Manifest("shm", tuple(replace(bucket, path=self._path(index)) for index, bucket in buckets))
        return self._written

    def rewrite(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Manifest:
        """Copy tensors over those of their names, of type and shape as before; all others stay as they were written,
        and are what the manifest has unchanged."""
        places = {e.name: (index, e) for index, bucket in enumerate(self._written.buckets) for e in bucket.entries}
        names = set()
        for name, tensor in tensors:
            index, entry = places[name]
            view(self._mappings[index].data, entry).copy_(tensor.detach())
            names.add(name)
        return self._written.parted(names)

    def close(self) -> None:
        """Unmap and unlink everything; staging again afterwards starts with fresh files."""
        for index in range(len(self._mappings)):
            Path(self._path(index)).unlink(missing_ok=True)
        self._mappings.clear()

    def _path(self, index: int) -> str:
        return f"{SHM_DIR}/{self.prefix}-{index}"

    def _room(self, index: int, nbytes: int) -> torch.Tensor:
        """Return bucket `index` as bytes, at least `nbytes` of them; its file grows where it is too small."""
        if index < len(self._mappings) and self._mappings[index].nbytes >= nbytes:
            return self._mappings[index].data
        size = file_bytes(nbytes, self.bucket_bytes)
        with _own_file(self._path(index), os.O_RDWR | os.O_CREAT) as descriptor:
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
        self._mappings[index : index + 1] = [mapping]
        return mapping.data


def file_bytes(nbytes: int, bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> int:
    """Return the size of a file that is to hold so many bytes of a bucket: doubling keeps small models small, and maps
    a large one a few times only, in the first sync."""
    return min(max(2 * nbytes, 1 << 20), max(bucket_bytes, nbytes))


class ShmReader:
    """The receiver's side: maps each file once and hands out views of it, the same for the same tensors."""

    def __init__(self) -> None:
        self._mappings: dict[str, _Mapping] = {}
        self._views: dict[str, tuple[_Mapping, tuple[TensorEntry, ...], list[tuple[str, torch.Tensor]]]] = {}

    def read(self, bucket: Bucket) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, tensor) of one bucket: views of shared memory, valid until the sender stages again."""
        mapping = self._open(bucket)
        seen, entries, views = self._views.get(bucket.path, (None, (), []))
        if seen is not mapping or entries != bucket.entries:
            views = [(entry.name, view(mapping.data, entry)) for entry in bucket.entries]
            self._views[bucket.path] = mapping, bucket.entries, views
        yield from views

    def close(self) -> None:
        """Forget all mappings (they go when the last view of them goes)."""
        self._mappings.clear()
        self._views.clear()

    def _open(self, bucket: Bucket) -> _Mapping:
        try:
            status = os.stat(bucket.path)
            mapping = self._mappings.get(bucket.path)
            if mapping is None or (mapping.inode, mapping.nbytes) != (status.st_ino, status.st_size):
                with _own_file(bucket.path, os.O_RDWR) as descriptor:
                    mapping = self._mappings[bucket.path] = _map(descriptor)
        except OSError as error:
            raise WeightSyncError(
                f"the staged weights {bucket.path} cannot be read here ({error.strerror}): sender and replica "
                "must be on one host, and the sender must still hold its stage; sync again"
            ) from error
        if mapping.nbytes < bucket.nbytes:
            raise WeightSyncError(f"{bucket.path} holds {mapping.nbytes} bytes, the manifest says {bucket.nbytes}")
        return mapping


class IpcStage:
    """The sender's side: buffers on its GPU, kept until the replicas applied (`close`), or until it stages again."""

    def __init__(self, bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> None:
        if not torch.cuda.is_available():
            raise WeightSyncError('transport "ipc" needs a GPU that trainer and replica share; use transport "shm"')
        self.bucket_bytes = bucket_bytes
        self._buffers: list[torch.Tensor] = []

    def write(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Manifest:
        """Copy the tensors, one bucket of them at a time, into fresh device buffers and describe them."""
        self._buffers = []
        layout = Layout(self.bucket_bytes)
        pending: list[tuple[TensorEntry, torch.Tensor]] = []
        for name, tensor in tensors:
            index, entry = layout.place(name, tensor)
            if index > len(self._buffers):
                self._fill(layout.buckets[-2].nbytes, pending)
                pending = []
            pending.append((entry, tensor.detach()))
        if pending:
            self._fill(layout.buckets[-1].nbytes, pending)
        torch.cuda.synchronize()
        handles = [(gpu_uuid(buffer.device), pickle.dumps(reduce_tensor(buffer)[1])) for buffer in self._buffers]
        exported = zip(layout.buckets, handles, strict=True)
        return Manifest("ipc", tuple(replace(bucket, handles=(handle,)) for bucket, handle in exported))

    def close(self) -> None:
        """Free the buffers."""
        self._buffers = []
        torch.cuda.ipc_collect()

    def _fill(self, nbytes: int, tensors: list[tuple[TensorEntry, torch.Tensor]]) -> None:
        buffer = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
        for entry, tensor in tensors:
            view(buffer, entry).copy_(tensor)
        self._buffers.append(buffer)


def read_ipc(bucket: Bucket, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) on a worker's `device`: views of the sender's GPU memory, valid until the sync ends."""
    handle = dict(bucket.handles).get(gpu_uuid(device))
    if handle is None:
        raise WeightSyncError(
            f'transport "ipc": no training rank exported on the GPU of this replica worker ({device}); leave transport '
            "out to have one chosen that works"
        )
    arguments = list(pickle.loads(handle))
    arguments[6] = device.index  # the sender's device index means nothing here; the uuid was compared
    buffer = rebuild_cuda_tensor(*arguments)
    for entry in bucket.entries:
        yield entry.name, view(buffer, entry)


def view(data: torch.Tensor, entry: TensorEntry) -> torch.Tensor:
    """Return one tensor of a byte buffer, without a copy."""
    return data[entry.offset : entry.offset + entry.nbytes].view(getattr(torch, entry.dtype)).view(entry.shape)


@contextmanager
def _own_file(path: str, flags: int) -> Iterator[int]:
    """Open a stage file of this user's alone: the names are no secret, and everybody may use them in shared memory."""
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW, 0o600)
    except OSError:  # it may be a link, or a file that we are kept out of
        _need_own(path, os.lstat(path))
        raise
    try:
        _need_own(path, os.fstat(descriptor))
        yield descriptor
    finally:
        os.close(descriptor)


def _need_own(path: str, status: os.stat_result) -> None:
    others = others_access(status)
    if others is not None:
        raise WeightSyncError(
            f"{path} is not used for weights, since another user could read or change them there: it is {others}. "
            "Remove it, or end this session and start one of another name"
        )


def _map(descriptor: int) -> _Mapping:
    status = os.fstat(descriptor)
    mapped = mmap.mmap(descriptor, status.st_size)
    return _Mapping(status.st_ino, status.st_size, torch.frombuffer(mapped, dtype=torch.uint8))
