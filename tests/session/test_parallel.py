"""A session whose ranks share layers, or hold copies of the policy: a whole day on one policy."""

from __future__ import annotations

from typing import Any

import pytest

import rlbench as rb
from tests.session.session_trainers import grpo

ALONE = rb.rl.group_normalized()


def score(rollout: Any) -> float:
    return float(len(rollout.token_ids) % 3)


@pytest.mark.curve
@pytest.mark.parametrize(
    "sizes", [{"tensor_parallel": 2}, {"shards": 1, "data_parallel_size": 2}], ids=["split", "copies"]
)
def test_it_samples_trains_goes_back_and_is_kept_as_one_on_one_rank_does(cluster, tmp_path, sizes):
    inference = rb.Inference(dtype="float32", kv_cache_bytes=64 << 20)
    with rb.Session("tiny", train=rb.Train(lr=1e-3, **sizes), inference=inference, undo=1) as session:
        assert session.train.world_size == 2
        batch = session.rollout(["sort 21", "sort 132"], n=4, max_tokens=8).score(score).batch(advantage=ALONE)
        fresh = session.train.call_all("state_checksum").result()
        first = session.train_step(batch)
        assert first["logprob_gap"] < 1e-4, "vLLM computed the same"
        assert first["tokens"] == batch.mask.sum()
        assert session.sync_weights()["gap"] <= 1e-4
        session.undo()
        assert session.train.call_all("state_checksum").result() == fresh
        again = session.train_step(batch)
        assert again["loss"] == first["loss"] and again["grad_norm"] == first["grad_norm"]
        session.save(tmp_path / "run")
        snapshot = session.snapshot()
        kept = session.train.call_all("state_checksum").result()[0]
        session.train_step(batch)
        session.restore(snapshot)
        assert session.train.call_all("state_checksum").result()[0] == kept
        rows_of_each = session.train.run(lambda rows: len(rows), rb.NeedParallel([1, 2]))
        assert rows_of_each == [2 // session.train.data_ranks] * 2
        metrics = grpo(session).step()
        assert metrics["train_steps"] == 1 and metrics["mismatch/max_gap"] < 1e-3
