"""What a replica computes in where nobody says: the same as a trainer of its checkpoint."""

import json

import pytest

from rlbench.workers.replica.config import ReplicaConfig, compute_dtype


@pytest.mark.parametrize("on_gpu", [True, False])
@pytest.mark.parametrize("held", ["float32", "bfloat16", "float16", None])
def test_a_replica_computes_in_what_a_trainer_of_its_checkpoint_does(held, on_gpu, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2", "dtype": held}))
    expected = "bfloat16" if on_gpu or held == "bfloat16" else "float32"
    assert compute_dtype(ReplicaConfig(str(tmp_path)), on_gpu) == expected
    assert compute_dtype(ReplicaConfig(str(tmp_path), dtype="float16"), on_gpu) == "float16"
