"""What is saved can be gone on from, on other ranks too; what is exported is the trainer's model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import rlbench as rb
from rlbench.errors import CheckpointError, SessionError
from rlbench.tiny import tasks

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def batch(session):
    session.sync_weights()
    rollouts = session.rollout(tasks.prompts(8, seed=3), n=4, max_tokens=12)
    return rollouts.score(tasks.reward).batch(advantage=rb.rl.group_normalized())


def weights(session):
    return session.train.call_all("state_checksum").result()[0]


def test_a_loaded_session_goes_on_with_other_ranks_and_the_same_replica_output(session, batch, tmp_path):
    session.train_step(batch, lr=1e-3)
    broken = {"loss": float("nan")}  # a run that had one is loaded like any other
    session.core.link.apply({"do": "record", "record": broken})
    saved = session.save(str(tmp_path))
    logprobs = session.logprobs(batch)
    told = json.loads((Path(saved.path) / "session.json").read_text())
    place = {"step", "version", "rollouts", "cursor"}
    assert set(told) == place | {"config", "history", "setup", "evaluations"}, "no tracker's key, no process"
    with rb.Session.load(str(tmp_path), train={"shards": 1}, reference=None) as other:
        assert weights(other) == weights(session)
        assert (other.step, other.version) == (session.step, session.version)
        assert repr(other.history.records) == repr(session.history.records), "as text: a nan is not equal to itself"
        assert other.train.world_size == 1 and other.inference.weight_versions() == [session.version]
        assert np.abs(other.logprobs(batch) - logprobs).max() < 1e-5
        assert other.lr == session.lr
        assert [s.label for s in other.snapshots] == [f"after step {session.step}"], "heal() goes back to it"
        assert other.train_step(batch).step == session.step + 1
    assert Path(saved.path).parent == tmp_path and saved.bytes > 1 << 20 and saved.removed == ()


def test_a_checkpoint_is_never_loaded_over_a_session_that_runs(session, tmp_path):
    session.save(str(tmp_path))
    before, step = weights(session), session.step
    with pytest.raises(SessionError, match="'shared' runs already"):
        rb.Session.load(str(tmp_path), name="shared")
    assert (weights(session), session.step) == (before, step)


def test_saving_again_makes_room_as_asked(session, tmp_path):
    first = session.save(str(tmp_path))
    second = session.save(str(tmp_path), max_num=1)
    assert second.removed == (first.path,) and not Path(first.path).exists() and Path(second.path).is_dir()
    with pytest.raises(CheckpointError, match="max_num=0"):
        session.save(str(tmp_path), max_num=0)


def test_a_damaged_checkpoint_is_refused_before_engines_are_started(session, tmp_path):
    saved = Path(session.save(str(tmp_path)).path)
    kept = Path(session.save(str(tmp_path)).path)
    (kept / "session.json").write_text("{}")
    with pytest.raises(CheckpointError, match=f"session.json has 2 bytes.*the one before it is {saved}"):
        rb.Session.load(str(tmp_path))
    shutil.rmtree(kept)
    shutil.rmtree(saved)
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        rb.Session.load(str(tmp_path))


def test_an_exported_folder_is_the_trainers_model_for_transformers(session, batch, tmp_path, tiny_path):
    done = session.export(str(tmp_path / "model"))
    assert {"model.safetensors", "config.json", "generation_config.json", "tokenizer.json"} <= set(done["files"])
    model = AutoModelForCausalLM.from_pretrained(done["path"])
    tokenizer = AutoTokenizer.from_pretrained(done["path"])
    assert tokenizer.chat_template == AutoTokenizer.from_pretrained(tiny_path).chat_template
    ids = torch.from_numpy(np.concatenate([batch.prompts[0], batch.responses[0]]).astype(np.int64))[None]
    with torch.no_grad():
        logp = torch.log_softmax(model(ids).logits[0], -1)
    start = len(batch.prompts[0])
    expected = logp[torch.arange(start - 1, ids.shape[1] - 1), ids[0, start:]].numpy()
    assert np.abs(session.logprobs(batch)[: len(expected)] - expected).max() < 1e-5


def test_an_exported_folder_is_what_vllm_serves(session, batch, tmp_path):
    """The replica's own loader, on the folder: what it then says of tokens is what the trainer says."""
    done = session.export(str(tmp_path / "model"))
    engine = rb.InferenceEngine(done["path"], name="exported", link=session.core.link, dtype="float32")
    engine.build(data_parallel_size=1)
    try:
        rows = [np.concatenate([batch.prompts[i], batch.responses[i]]).tolist() for i in range(3)]
        found = engine.logprobs(rows)
        flat = np.concatenate([got[len(batch.prompts[i]) - 1 :] for i, got in enumerate(found)])
        assert np.abs(flat - session.logprobs(batch)[: len(flat)]).max() < 1e-4
    finally:
        engine.close()


def test_an_export_never_writes_over_what_is_there(session, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine").write_text("")
    with pytest.raises(CheckpointError, match="not empty"):
        session.export(str(tmp_path / "model"))
    assert [p.name for p in (tmp_path / "model").iterdir()] == ["mine"]
    half = session.export(str(tmp_path / "half"), dtype="bfloat16")
    whole = session.export(str(tmp_path / "whole"))
    assert half["bytes"] * 2 == whole["bytes"]
