"""The old log-probs of a batch outlive the kernel, go back with a snapshot, and take no room they do not need."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rlbench.data import Ragged, TrainBatch
from rlbench.runtime import registry
from rlbench.session import beside
from rlbench.session.beside import Anchors


@pytest.fixture(autouse=True)
def state(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


def batch(seed: int) -> TrainBatch:
    random = np.random.default_rng(seed)
    responses = Ragged.from_rows([random.integers(0, 99, 3), random.integers(0, 99, 2)], np.int32)
    return TrainBatch(
        prompts=Ragged.from_rows([[1], [2]], np.int32),
        responses=responses,
        mask=np.ones(5, bool),
        advantages=np.ones(5, np.float32),
        sampler_logprobs=random.normal(size=5).astype(np.float32),
        group=np.zeros(2, np.int32),
        weight_version=np.zeros(2, np.int64),
    )


def logprobs(seed: int) -> np.ndarray:
    return np.full(5, -float(seed), np.float32)


def files() -> int:
    return len(list((registry.snapshot_folder("s") / "anchors").glob("*.npy")))


def test_a_batch_on_its_first_step_is_left_as_it_is():
    assert Anchors("s").applied(batch(1)).old_logprobs is None


def test_a_new_kernel_finds_them_and_the_first_that_were_kept_stay():
    Anchors("s").keep(batch(1), logprobs(1))
    Anchors("s").keep(batch(1), logprobs(2))
    assert Anchors("s").applied(batch(1)).old_logprobs.tolist() == logprobs(1).tolist()
    assert Anchors("s").applied(batch(2)).old_logprobs is None
    assert Anchors("other").applied(batch(1)).old_logprobs is None


def test_what_the_batch_brings_along_counts_more():
    Anchors("s").keep(batch(1), logprobs(1))
    given = replace(batch(1), old_logprobs=logprobs(3))
    assert Anchors("s").applied(given).old_logprobs is given.old_logprobs


def test_going_back_leaves_those_there_were_at_the_snapshot():
    kept = Anchors("s")
    kept.keep(batch(1), logprobs(1))
    kept.note(["snap"])
    kept.keep(batch(2), logprobs(2))
    kept.go_back("snap")
    assert kept.applied(batch(1)).old_logprobs is not None and kept.applied(batch(2)).old_logprobs is None
    kept.go_back(None)
    assert kept.applied(batch(1)).old_logprobs is None
    kept.go_back("snap")
    assert kept.applied(batch(1)).old_logprobs is not None, "the snapshot still has them"


def test_a_file_stays_while_a_state_or_a_snapshot_needs_it():
    kept = Anchors("s")
    kept.keep(batch(1), logprobs(1))
    kept.note(["snap"])
    kept.go_back(None)
    assert files() == 1
    kept.note([], dropped=["snap"])
    assert files() == 0


def test_only_the_latest_batches_are_kept():
    kept = Anchors("s")
    for seed in range(beside.KEPT + 2):
        kept.keep(batch(seed), logprobs(seed))
    assert files() == beside.KEPT
    assert kept.applied(batch(1)).old_logprobs is None and kept.applied(batch(2)).old_logprobs is not None


def test_they_are_their_owners_alone():
    Anchors("s").keep(batch(1), logprobs(1))
    folder = registry.snapshot_folder("s") / "anchors"
    assert folder.stat().st_mode & 0o777 == 0o700
