"""Staging weights in shared memory: what is written is what is read, without copies or fresh pages."""

from __future__ import annotations

import pickle
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rlbench.errors import WeightSyncError
from rlbench.weights.staging import SHM_DIR, ShmReader, ShmStage
from tests.weights import read_manifest


@pytest.fixture
def prefix() -> str:
    return f"rlbench-test-{uuid.uuid4().hex[:8]}"


@pytest.fixture
def stage(prefix: str) -> Iterator[ShmStage]:
    stage = ShmStage(prefix, bucket_bytes=1000)
    yield stage
    stage.close()


def mixed() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "scalar": torch.tensor(3.5),
        "half": torch.randn(7, 3, dtype=torch.bfloat16),
        "transposed": torch.randn(20, 5).t(),
        "empty": torch.zeros(0, 4),
        "large": torch.randn(40, 50),  # larger than a bucket
        "ids": torch.arange(30),
    }


def test_tensors_come_back_as_they_went(stage: ShmStage) -> None:
    tensors = mixed()
    manifest = pickle.loads(pickle.dumps(stage.write(tensors.items())))
    found = dict(read_manifest(manifest))
    assert list(found) == list(tensors)
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)
    assert len(manifest.buckets) == 3
    assert manifest.nbytes == sum(t.nbytes for t in tensors.values())
    assert manifest.shapes["transposed"] == (5, 20)


def test_a_second_stage_reuses_files_and_mappings(stage: ShmStage) -> None:
    reader = ShmReader()
    first = stage.write(mixed().items())
    views = dict(read_manifest(first, reader))
    inodes = [Path(bucket.path).stat().st_ino for bucket in first.buckets]
    doubled = {name: tensor * 2 for name, tensor in mixed().items()}
    second = stage.write(doubled.items())
    assert second == first
    assert inodes == [Path(bucket.path).stat().st_ino for bucket in second.buckets]
    again = dict(read_manifest(second, reader))
    for name, tensor in doubled.items():
        assert torch.equal(again[name], tensor)
        assert torch.equal(views[name], tensor)
        assert again[name].data_ptr() == views[name].data_ptr()


def test_the_same_tensors_are_read_by_the_same_views_and_others_by_their_own(stage: ShmStage) -> None:
    reader = ShmReader()
    views = dict(read_manifest(stage.write(mixed().items()), reader))
    again = dict(read_manifest(pickle.loads(pickle.dumps(stage.write(mixed().items()))), reader))
    assert all(again[name] is view for name, view in views.items())
    other = {"half": torch.randn(3, 7, dtype=torch.bfloat16), "scalar": torch.tensor(1.0)}
    found = dict(read_manifest(stage.write(other.items()), reader))
    assert list(found) == list(other) and all(torch.equal(found[name], tensor) for name, tensor in other.items())


def test_a_larger_model_grows_the_files_and_the_reader_follows(stage: ShmStage) -> None:
    reader = ShmReader()
    dict(read_manifest(stage.write([("w", torch.ones(10))]), reader))
    large = torch.randn(2 << 20)
    assert torch.equal(dict(read_manifest(stage.write([("w", large)]), reader))["w"], large)


def test_a_closed_stage_leaves_nothing_and_is_refused_by_readers(stage: ShmStage, prefix: str) -> None:
    manifest = stage.write(mixed().items())
    assert list(Path(SHM_DIR).glob(f"{prefix}-*"))
    stage.close()
    assert not list(Path(SHM_DIR).glob(f"{prefix}-*"))
    with pytest.raises(WeightSyncError, match="sync again"):
        dict(read_manifest(manifest))


@pytest.mark.parametrize("plant", ["file", "link"])
def test_what_another_user_put_under_its_name_is_not_used(stage: ShmStage, plant: str, tmp_path: Path) -> None:
    (bucket,) = stage.write([("a", torch.ones(2))]).buckets
    stage.close()
    target = tmp_path / "target"
    target.touch()
    if plant == "file":
        Path(bucket.path).touch()
        Path(bucket.path).chmod(0o666)
    else:
        Path(bucket.path).symlink_to(target)
    try:
        for use in (lambda: stage.write([("a", torch.ones(2))]), lambda: list(ShmReader().read(bucket))):
            with pytest.raises(WeightSyncError, match=f"{bucket.path} is not used"):
                use()
        assert target.stat().st_size == 0
    finally:
        Path(bucket.path).unlink()


def test_bad_stages_are_refused(stage: ShmStage) -> None:
    with pytest.raises(WeightSyncError, match="'a' was staged twice"):
        stage.write([("a", torch.ones(2)), ("a", torch.ones(2))])
    manifest = stage.write([("a", torch.ones(2))])
    short = replace(manifest.buckets[0], nbytes=1 << 40)
    with pytest.raises(WeightSyncError, match="manifest says"):
        list(ShmReader().read(short))


def test_a_full_shared_memory_says_so(prefix: str) -> None:
    stage = ShmStage(prefix, bucket_bytes=1 << 62)
    huge = torch.empty(1).expand(1 << 46)  # 256 TiB that exist as one number
    with pytest.raises(WeightSyncError, match="shared memory"):
        stage.write([("w", huge)])
    assert not list(Path(SHM_DIR).glob(f"{prefix}-*"))
