from __future__ import annotations

from collections.abc import Iterator

import torch

from rlbench.weights.manifest import Manifest
from rlbench.weights.staging import ShmReader


def read_manifest(manifest: Manifest, reader: ShmReader | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    """Every (name, tensor) of a shared-memory manifest."""
    reader = reader or ShmReader()
    for bucket in manifest.buckets:
        yield from reader.read(bucket)
