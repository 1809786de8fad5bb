"""Buckets through a channel: the sender fills one buffer after the other, the receivers load each as it comes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from rlbench.errors import WeightSyncError
from rlbench.weights.channel import Channel
from rlbench.weights.manifest import Bucket, Manifest
from rlbench.weights.shm import view


def send(channel: Channel, manifest: Manifest, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Send what `manifest` announced. Gathering the next bucket overlaps with loading the last one.

    Raises:
        WeightSyncError: the tensors are not those that were announced, or the other side failed.
    """
    gathered = iter(tensors)
    largest = max((bucket.nbytes for bucket in manifest.buckets), default=0)
    buffer = torch.empty(largest, dtype=torch.uint8, device=channel.device)
    for bucket in manifest.buckets:
        for entry in bucket.entries:
            name, tensor = next(gathered, ("nothing", torch.empty(0)))
            found = (name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
            announced = (entry.name, entry.dtype, entry.shape)
            if found != announced:
                raise WeightSyncError(
                    f"the trainer announced {announced} and came with {found}: postprocess_output_named_parameters "
                    "must give the same each time; sync again"
                )
            if entry.nbytes:
                view(buffer, entry).copy_(tensor.detach())
        if bucket is manifest.buckets[-1]:  # what is wrong at the very end must show before the replicas are complete
            for name, _ in gathered:
                raise WeightSyncError(f"the trainer came with {name!r}, which it had not announced; sync again")
        channel.broadcast(buffer[: bucket.nbytes])


def receive(channel: Channel, bucket: Bucket) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) of one bucket. The buffer is theirs: layers hold on to tensors until they are complete."""
    buffer = torch.empty(bucket.nbytes, dtype=torch.uint8, device=channel.device)
    channel.broadcast(buffer)
    for entry in bucket.entries:
        yield entry.name, view(buffer, entry)
