"""The transformers replica: same arrays, refusals and states as the vLLM one."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rlbench.data.jobs import FINISH_REASONS, GeneratedArrays, GenerateJob
from rlbench.dispatch import context as dispatch_context
from rlbench.dispatch.context import CallContext
from rlbench.errors import BuildError, DataError, StateError, WeightSyncError
from rlbench.weights.names import unique_parameters
from rlbench.weights.shm import ShmStage
from rlbench.workers.replica_config import ReplicaConfig
from rlbench.workers.replica_hf import HfReplica

from .tiny_checkpoint import hf_logprobs, make_checkpoint

pytestmark = pytest.mark.slow

PROMPTS = [[1, 2, 3], "a longer prompt", [7] * 30]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("hf"), tied=True)


@pytest.fixture(scope="module")
def replica(folder: Path) -> Iterator[HfReplica]:
    replica = HfReplica(ReplicaConfig(str(folder), dtype="float32", max_num_seqs=4))
    assert replica.build()["max_model_len"] == 512
    yield replica
    replica.close()


@pytest.fixture
def stage() -> Iterator[ShmStage]:
    stage = ShmStage(f"rlbench-test-{uuid.uuid4().hex[:8]}")
    yield stage
    stage.close()


def job(n: int = 2, shared: bool = False, **sampling: object) -> GenerateJob:
    seeds = np.arange(len(PROMPTS) * 8, dtype=np.int64).reshape(len(PROMPTS), 8)[:, :n]
    return GenerateJob(PROMPTS, n, {"max_tokens": 10, **sampling}, seeds, shared)


def rows(arrays: GeneratedArrays) -> dict[tuple[int, int], list[int]]:
    return {
        (int(p), int(s)): arrays.token_ids[arrays.offsets[i] : arrays.offsets[i + 1]].tolist()
        for i, (p, s) in enumerate(arrays.keys)
    }


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_the_sampled_distribution(replica: HfReplica, folder: Path, temperature: float) -> None:
    """Left padding, the cache and rows that leave the batch early must not show in the numbers."""
    arrays = replica.generate(job(n=3, temperature=temperature, max_tokens=25))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for i, ((prompt, _), tokens) in enumerate(rows(arrays).items()):
        reference = hf_logprobs(model, arrays.prompt_token_ids[prompt] + tokens, temperature)
        drawn = arrays.logprobs[arrays.offsets[i] : arrays.offsets[i + 1]]
        np.testing.assert_allclose(drawn, reference[-len(tokens) :], atol=1e-4)
        assert FINISH_REASONS[arrays.finish[i]] == ("length" if len(tokens) == 25 else "stop")


def test_prompt_logprobs_equal_one_by_one(replica: HfReplica, folder: Path) -> None:
    sequences = [[(13 * i + k) % 250 for i in range(512 if k == 2 else 5 + 20 * k)] for k in range(6)]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for scored, ids in zip(replica.prompt_logprobs(sequences), sequences, strict=True):
        np.testing.assert_allclose(scored, hf_logprobs(model, ids), atol=1e-4)


def test_a_sample_depends_on_its_seed_alone(replica: HfReplica) -> None:
    many = rows(replica.generate(job(n=5)))
    assert len({tuple(tokens) for tokens in many.values()}) == 15
    few = rows(replica.generate(job(n=1)))
    assert few == {key: many[key] for key in few}


def test_sampling_options_act(replica: HfReplica) -> None:
    greedy = rows(replica.generate(job(n=2, temperature=0.0)))
    assert greedy[0, 0] == greedy[0, 1] != greedy[2, 0]
    np.testing.assert_allclose(replica.generate(job(top_k=1)).logprobs, 0.0, atol=1e-6)
    np.testing.assert_allclose(replica.generate(job(top_p=1e-4)).logprobs, 0.0, atol=1e-6)
    np.testing.assert_allclose(replica.generate(job(min_p=1.0)).logprobs, 0.0, atol=1e-6)
    wanted = greedy[0, 0][3]
    stopped = rows(replica.generate(job(n=1, temperature=0.0, stop_token_ids=[wanted])))[0, 0]
    assert stopped == greedy[0, 0][: greedy[0, 0].index(wanted) + 1]
    late = rows(replica.generate(job(n=1, temperature=0.0, stop_token_ids=[wanted], min_tokens=8)))[0, 0]
    assert len(late) >= 8
    assert wanted not in late[:8]


def test_a_stop_string_is_cut_from_the_text(replica: HfReplica) -> None:
    whole = replica.generate(job(n=1, temperature=0.0)).texts[0]
    stop = whole[2:4]
    cut = replica.generate(job(n=1, temperature=0.0, stop=stop))
    assert cut.texts[0] == whole[: whole.index(stop)]
    assert FINISH_REASONS[cut.finish[0]] == "stop"


def test_stopping_keeps_partial_samples(replica: HfReplica, monkeypatch: pytest.MonkeyPatch) -> None:
    context = CallContext()
    monkeypatch.setattr(dispatch_context, "_current", context)
    asked = iter([False] * 6 + [True] * 100)
    monkeypatch.setattr(context, "stop_requested", lambda: next(asked))
    arrays = replica.generate(job(n=4, ignore_eos=True, max_tokens=200))
    assert [FINISH_REASONS[f] for f in arrays.finish] == ["abort"] * 4  # the first batch of four; no other was started
    assert np.diff(arrays.offsets).tolist() == [6] * 4


def test_a_shared_job_serves_what_was_claimed(replica: HfReplica, monkeypatch: pytest.MonkeyPatch) -> None:
    left = [2, 0]
    context = CallContext(claimer=lambda count: [left.pop(0) for _ in range(min(count, len(left)))])
    monkeypatch.setattr(dispatch_context, "_current", context)
    assert sorted(rows(replica.generate(job(n=2, shared=True)))) == [(0, 0), (0, 1), (2, 0), (2, 1)]


def test_bad_input_is_refused(replica: HfReplica) -> None:
    with pytest.raises(DataError, match="temperature"):
        replica.generate(job(temprature=1.0))
    with pytest.raises(DataError, match="top_p"):
        replica.generate(job(top_p=0.0))
    with pytest.raises(DataError, match="prompt 0 has 512 tokens"):
        replica.generate(GenerateJob([[1] * 512], 1, {}, np.zeros((1, 1), np.int64)))
    with pytest.raises(BuildError, match="vllm"):
        HfReplica(ReplicaConfig("x", tensor_parallel_size=2)).build()
    with pytest.raises(BuildError, match="no-such-folder"):
        HfReplica(ReplicaConfig("./no-such-folder")).build()


def test_a_sync_replaces_the_weights_and_wrong_names_do_not(replica: HfReplica, folder: Path, stage: ShmStage) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    weights = unique_parameters(model)
    ids = list(range(50))
    before = replica.prompt_logprobs([ids])[0]
    with pytest.raises(WeightSyncError, match=r"did not send model\.norm\.weight"):
        replica.apply_weights(stage.write((k, v) for k, v in weights.items() if k != "model.norm.weight"))
    np.testing.assert_array_equal(replica.prompt_logprobs([ids])[0], before)
    replica.apply_weights(stage.write(weights.items()))
    with pytest.raises(StateError, match="no version"):
        replica.generate(job())
    replica.commit_version(3)
    np.testing.assert_allclose(replica.prompt_logprobs([ids])[0], hf_logprobs(model, ids), atol=1e-4)
    assert set(replica.generate(job()).versions) == {3}
    stage.write((k, torch.zeros_like(v)) for k, v in weights.items())  # the replica holds a copy, not the stage
    np.testing.assert_allclose(replica.prompt_logprobs([ids])[0], hf_logprobs(model, ids), atol=1e-4)
    assert replica.reload()["version"] == 0


def test_discarded_weights_are_gone_until_they_are_loaded(replica: HfReplica) -> None:
    held = replica.memory()["weights"]
    before = replica.prompt_logprobs([list(range(40))])[0]
    assert replica.to_state("meta", None)["memory"]["weights"] == 0 < held
    with pytest.raises(StateError, match=r"cuda\(\)"):
        replica.generate(job())
    replica.to_state("cuda", ["weights"])
    with pytest.raises(StateError, match=r"reload\(\)"):
        replica.prompt_logprobs([[1, 2]])
    assert replica.to_state("cuda", None)["reloaded_from"] == replica.config.path
    np.testing.assert_array_equal(replica.prompt_logprobs([list(range(40))])[0], before)
