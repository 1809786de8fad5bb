"""Weights between processes on one GPU, without a copy through the host: CUDA IPC handles in the manifest.

A bucket is one byte buffer on the trainer's GPU; its handle travels in the manifest, and the replica maps the
same memory. Only this module knows about it. Needs CUDA; not exercised on a CPU host (tests: `pytest -m
gpu`).
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from rlbench.errors import WeightSyncError
from rlbench.weights.facts import gpu_uuid
from rlbench.weights.manifest import Bucket, Manifest, TensorEntry, aligned, sent_twice
from rlbench.weights.shm import DEFAULT_BUCKET_BYTES, view


class IpcStage:
    """The sender's side: buffers on its GPU, exported once each. The sender keeps them until the replicas
    applied (`close`), or until it stages again. With several GPUs each has a sender of its own.
    """

    def __init__(self, bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> None:
        if not torch.cuda.is_available():
            raise WeightSyncError('transport "ipc" needs a GPU that trainer and replica share; use transport "shm"')
        self.bucket_bytes = bucket_bytes
        self._buffers: list[torch.Tensor] = []

    def write(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Manifest:
        """Copy the tensors into fresh device buffers and describe them; consumes the iterator one tensor at a
        time.
        """
        self._buffers = []
        buckets: list[Bucket] = []
        pending: list[tuple[str, torch.Tensor]] = []
        size = 0
        seen: set[str] = set()
        for name, tensor in tensors:
            if name in seen:
                raise sent_twice(name)
            seen.add(name)
            nbytes = tensor.numel() * tensor.element_size()
            if pending and size + nbytes > self.bucket_bytes:
                buckets.append(self._export(pending))
                pending, size = [], 0
            pending.append((name, tensor.detach()))
            size = aligned(size + nbytes)
        if pending:
            buckets.append(self._export(pending))
        torch.cuda.synchronize()
        return Manifest("ipc", tuple(buckets))

    def close(self) -> None:
        """Free the buffers."""
        self._buffers = []
        torch.cuda.ipc_collect()

    def _export(self, tensors: list[tuple[str, torch.Tensor]]) -> Bucket:
        from torch.multiprocessing.reductions import reduce_tensor

        entries, cursor = [], 0
        for name, tensor in tensors:
            nbytes = tensor.numel() * tensor.element_size()
            dtype = str(tensor.dtype).removeprefix("torch.")
            entries.append(TensorEntry(name, dtype, tuple(tensor.shape), cursor, nbytes))
            cursor = aligned(cursor + nbytes)
        buffer = torch.empty(cursor, dtype=torch.uint8, device="cuda")
        for entry, (_, tensor) in zip(entries, tensors, strict=True):
            view(buffer, entry).copy_(tensor)
        self._buffers.append(buffer)
        _, arguments = reduce_tensor(buffer)
        return Bucket("", cursor, tuple(entries), ((gpu_uuid(buffer.device), pickle.dumps(arguments)),))


class IpcReader:
    """The receiver's side, on the worker's `device`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def read(self, bucket: Bucket) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, tensor): views of the sender's GPU memory, valid until the sync ends."""
        from torch.multiprocessing.reductions import rebuild_cuda_tensor

        handle = dict(bucket.handles).get(gpu_uuid(self.device))
        if handle is None:
            raise WeightSyncError(
                f'transport "ipc": no training rank exported on the GPU of this replica worker ({self.device}); leave '
                "transport out to have one chosen that works"
            )
        arguments: list[Any] = list(pickle.loads(handle))
        arguments[6] = self.device.index  # the sender's device index means nothing here; the uuid was compared
        buffer = rebuild_cuda_tensor(*arguments)
        for entry in bucket.entries:
            yield entry.name, view(buffer, entry)

    def close(self) -> None:
        """Let the sender have its memory back."""
        if self.device.type == "cuda":
            torch.cuda.ipc_collect()
