"""What several GPUs export of the same weights is one manifest, and each worker finds the handle of its own GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rlbench.errors import WeightSyncError
from rlbench.weights.manifest import Layout, Manifest, merged
from rlbench.weights.staging import read_ipc

TENSORS = [("a", torch.ones(10)), ("b", torch.ones(200)), ("c", torch.ones(3, 4, dtype=torch.bfloat16))]


def exported(gpu: str) -> Manifest:
    buckets = Layout(900, TENSORS).buckets
    return Manifest("ipc", tuple(replace(b, handles=((gpu, f"{gpu}-{i}".encode()),)) for i, b in enumerate(buckets)))


def test_each_bucket_has_the_handle_of_every_gpu() -> None:
    one = merged([exported("gpu0"), exported("gpu1")])
    assert [dict(bucket.handles) for bucket in one.buckets] == [
        {"gpu0": b"gpu0-0", "gpu1": b"gpu1-0"},
        {"gpu0": b"gpu0-1", "gpu1": b"gpu1-1"},
    ]
    assert one.shapes == {"a": (10,), "b": (200,), "c": (3, 4)}
    assert one.nbytes == 864


def test_what_one_rank_staged_stays_as_it_is() -> None:
    assert merged([exported("gpu0")]) == exported("gpu0")


def test_ranks_that_exported_different_weights_are_refused() -> None:
    other = Manifest("ipc", Layout(900, [*TENSORS[:2], ("d", TENSORS[2][1])]).buckets)
    for manifests in ([exported("gpu0"), other], [exported("gpu0"), Manifest("ipc", other.buckets[:1])]):
        with pytest.raises(WeightSyncError, match="same names and shapes on all ranks"):
            merged(manifests)
    with pytest.raises(WeightSyncError, match="no training rank exported"):
        merged([])


def test_a_worker_on_a_gpu_where_nobody_exported_says_so() -> None:
    with pytest.raises(WeightSyncError, match="no training rank exported on the GPU of this replica worker"):
        list(read_ipc(exported("gpu0").buckets[0], torch.device("cpu")))


def test_buckets_are_closed_before_they_outgrow_their_size_and_tensors_start_on_cache_lines() -> None:
    first, second = Layout(900, TENSORS).buckets
    assert [(entry.name, entry.offset) for entry in first.entries] == [("a", 0), ("b", 64)]
    assert [(entry.name, entry.offset) for entry in second.entries] == [("c", 0)]
    assert (first.nbytes, second.nbytes) == (896, 64)
    assert len(Layout(10, TENSORS).buckets) == 3  # a larger tensor has a bucket of its own
