"""Weights staged in shared memory reach a vLLM replica whole: verified by log-probs on the same tokens, since
on CPU a tied head keeps a packed copy that no checksum sees."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from rlbench.data.rollouts.jobs import GenerateJob
from rlbench.errors import DataError, StateError, WeightSyncError
from rlbench.weights.loan import Loan
from rlbench.weights.manifest import Bucket, Manifest
from rlbench.weights.names import to_checkpoint_names, unique_parameters
from rlbench.weights.probe import Probe
from rlbench.weights.staging import ShmStage
from rlbench.weights.unchanged import group_of
from rlbench.workers.replica.config import ReplicaConfig
from rlbench.workers.replica.vllm import VllmReplica
from tests.workers.ending import end_here

from .tiny_checkpoint import hf_logprobs, make_checkpoint

pytestmark = pytest.mark.engine

SEQUENCES = [[(13 * i + k) % 250 for i in range(20 + 30 * k)] for k in range(4)]
GROUPS = [
    "norm",
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
    "embed_tokens",
    "lm_head",
]


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def tied(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture(scope="module")
def folder(tied: bool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("sync"), tied=tied)


@pytest.fixture(scope="module")
def replica(folder: Path) -> Iterator[VllmReplica]:
    replica = VllmReplica(ReplicaConfig(str(folder), dtype="float32", kv_cache_bytes=64 << 20, max_num_seqs=16))
    replica.build()
    yield replica
    end_here(replica)


@pytest.fixture
def model(folder: Path) -> PreTrainedModel:
    """The trainer's side: a fresh copy of the checkpoint."""
    loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return loaded


@pytest.fixture(scope="module")
def stage() -> Iterator[ShmStage]:
    """Small buckets, so that one sync takes several and fused weights (q, k, v) are split between them."""
    stage = ShmStage(f"rlbench-test-{uuid.uuid4().hex[:8]}", bucket_bytes=100_000)
    yield stage
    stage.close()


def staged(stage: ShmStage, model: PreTrainedModel) -> Manifest:
    return stage.write(to_checkpoint_names(model, unique_parameters(model)).items())


def gap(replica: VllmReplica, model: PreTrainedModel) -> float:
    """Largest difference of log-probs on the same tokens."""
    found = replica.prompt_logprobs(SEQUENCES)
    return max(float(np.abs(ours - hf_logprobs(model, ids)).max()) for ours, ids in zip(found, SEQUENCES, strict=True))


def one_job() -> GenerateJob:
    return GenerateJob([[1, 2, 3]], 1, {"max_tokens": 4}, np.zeros((1, 1), np.int64))


def test_every_group_of_weights_arrives(replica: VllmReplica, model: PreTrainedModel, stage: ShmStage) -> None:
    """Group by group, so that a group that is not refreshed cannot hide behind another."""
    torch.manual_seed(3)
    for version, group in enumerate(GROUPS, start=1):
        touched = [p for name, p in unique_parameters(model).items() if group in name]
        if not touched:
            assert group == "lm_head"
            assert model.config.tie_word_embeddings
            continue
        with torch.no_grad():
            for parameter in touched:
                parameter.add_(torch.randn_like(parameter), alpha=0.03 if parameter.ndim > 1 else 0.3)
        assert gap(replica, model) > 1e-3, f"perturbing {group} must show before the sync"
        manifest = staged(stage, model)
        assert len(manifest.buckets) > 3
        replica.begin_sync()
        replica.apply_weights(manifest)
        assert gap(replica, model) <= 1e-4, f"{group} did not arrive"
        replica.commit_version(version)
        assert replica.generate(one_job()).versions.tolist() == [version]


@pytest.fixture
def by_loader(replica: VllmReplica, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """An entry for each time that vLLM's own loader is given tensors."""
    kind = replica.built.apply_model(type)[0]
    load, calls = kind.load_weights, list[int]()
    monkeypatch.setattr(kind, "load_weights", lambda *args: (calls.append(1), load(*args))[1])
    return calls


def test_later_weights_go_straight_to_where_the_first_went(
    replica: VllmReplica, model: PreTrainedModel, stage: ShmStage, by_loader: list[int]
) -> None:
    """All of them, packed out of one bucket too where they lie behind each other, and a layer's alone."""
    replica.apply_weights(staged(stage, model))
    replica.commit_version(12)
    by_loader.clear()
    one_bucket = ShmStage(f"rlbench-test-{uuid.uuid4().hex[:8]}")
    for version in (13, 14, 15):  # the first of them sees which do
        replica.apply_weights(staged(one_bucket, changed(model, 0.99)))
        assert gap(replica, model) <= 1e-4
        replica.commit_version(version)
    one_bucket.rewrite((name, torch.zeros_like(tensor)) for name, tensor in unique_parameters(model).items())
    assert gap(replica, model) <= 1e-4, "what was staged is written over, and nothing computes with it any more"
    one_bucket.close()
    whole = replace(staged(stage, changed(model, 1.02)), token="straight")
    replica.apply_weights(whole)
    assert gap(replica, model) <= 1e-4
    replica.commit_version(16)
    weights = to_checkpoint_names(model, unique_parameters(model))
    names = {name for name in weights if "layers.1." in name}
    for name in names:
        weights[name].data.mul_(0.98)
    assert gap(replica, model) > 1e-3
    part = stage.rewrite((name, weights[name]) for name in names)
    replica.apply_weights(replace(part, follows="straight", token="part"))
    assert gap(replica, model) <= 1e-4
    replica.commit_version(17)
    assert not by_loader


def test_what_was_generated_after_a_sync_has_the_new_logprobs(
    replica: VllmReplica, model: PreTrainedModel, stage: ShmStage
) -> None:
    """A cached prefix must not survive a sync: the same prompt before and after it."""
    prompt = list(range(200))
    asked = GenerateJob([prompt], 2, {"max_tokens": 8}, np.array([[1, 2]], np.int64))
    replica.generate(asked)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    replica.apply_weights(staged(stage, model))
    replica.commit_version(20)
    arrays = replica.generate(asked)
    for i in range(2):
        drawn = slice(arrays.offsets[i], arrays.offsets[i + 1])
        reference = hf_logprobs(model, prompt + arrays.token_ids[drawn].tolist())
        np.testing.assert_allclose(arrays.logprobs[drawn], reference[len(prompt) - 1 :], atol=1e-4)


def test_discarded_weights_are_filled_by_a_sync(replica: VllmReplica, model: PreTrainedModel, stage: ShmStage) -> None:
    replica.to_state("meta", None)
    with pytest.raises(StateError, match=r"cuda\('weights'\)"):
        replica.begin_sync()
    replica.to_state("cuda", ["weights"])
    replica.apply_weights(staged(stage, model))
    replica.to_state("cuda", ["kv_cache"])
    assert gap(replica, model) <= 1e-4
    replica.commit_version(30)


def loan_of(model: PreTrainedModel, manifest: Manifest) -> Loan:
    expected = [hf_logprobs(model, ids) for ids in SEQUENCES]
    return Loan("kept", 5, manifest, Probe(SEQUENCES), expected, 1e-4)


def changed(model: PreTrainedModel, factor: float) -> PreTrainedModel:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(factor)
    return model


def test_weights_are_lent_for_one_call_and_its_own_come_back_to_the_bit(
    replica: VllmReplica, model: PreTrainedModel, stage: ShmStage
) -> None:
    replica.apply_weights(staged(stage, model))
    replica.commit_version(35)
    prompt = list(range(200))  # of which the cache of prefixes keeps blocks
    asked = GenerateJob([prompt], 2, {"max_tokens": 8}, np.array([[1, 2]], np.int64))
    before, own = replica.prompt_logprobs(SEQUENCES), replica.generate(asked)
    other = changed(model, 1.1)
    lent = replica.generate_lent(loan_of(other, staged(stage, other)), asked)
    assert lent.versions.tolist() == [5, 5] and replica.status()["version"] == 35
    for i in range(2):
        drawn = slice(lent.offsets[i], lent.offsets[i + 1])
        reference = hf_logprobs(other, prompt + lent.token_ids[drawn].tolist())
        np.testing.assert_allclose(lent.logprobs[drawn], reference[len(prompt) - 1 :], atol=1e-4)
    for old, new in zip(before, replica.prompt_logprobs(SEQUENCES), strict=True):
        np.testing.assert_array_equal(old, new)
    again = replica.generate(asked)
    np.testing.assert_array_equal(own.token_ids, again.token_ids)
    np.testing.assert_array_equal(own.logprobs, again.logprobs)


def test_what_does_not_prove_itself_is_not_lent_and_what_does_not_come_back_is_torn(
    replica: VllmReplica, model: PreTrainedModel, stage: ShmStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica.apply_weights(staged(stage, model))
    replica.commit_version(36)
    before, asked = replica.prompt_logprobs(SEQUENCES), one_job()
    wrong = replace(loan_of(model, staged(stage, model)), expected=[row + 1 for row in before])
    with pytest.raises(WeightSyncError, match="goes on with its own weights"):
        replica.generate_lent(wrong, asked)
    with pytest.raises(DataError, match="unknown sampling option"):
        replica.generate_lent(loan_of(model, staged(stage, model)), replace(asked, sampling={"temprature": 1.0}))
    assert replica.generate(asked).versions.tolist() == [36]
    for old, new in zip(before, replica.prompt_logprobs(SEQUENCES), strict=True):
        np.testing.assert_array_equal(old, new)
    other = changed(model, 1.1)
    monkeypatch.setattr(replica._receiver, "put_back", lambda: None)
    with pytest.raises(WeightSyncError, match="did not get its own weights back"):
        replica.generate_lent(loan_of(other, staged(stage, other)), asked)
    with pytest.raises(StateError, match="holds a mixture"):
        replica.generate(asked)
    replica.apply_weights(staged(stage, other))
    replica.commit_version(37)
    assert gap(replica, other) <= 1e-4 and replica.generate(asked).versions.tolist() == [37]


def test_wrong_names_are_refused_and_the_old_weights_stay(
    replica: VllmReplica, model: PreTrainedModel, stage: ShmStage
) -> None:
    replica.apply_weights(staged(stage, model))
    replica.commit_version(40)
    before = replica.prompt_logprobs(SEQUENCES)
    weights = dict(to_checkpoint_names(model, unique_parameters(model)))
    norm = weights.pop("model.norm.weight")
    with pytest.raises(WeightSyncError, match=r"did not send model\.norm\.weight"):
        replica.apply_weights(stage.write(weights.items()))
    misspelt = {**weights, "model.nrom.weight": norm}
    with pytest.raises(WeightSyncError, match=r"does not know model\.nrom\.weight; nearest: model\.norm\.weight"):
        replica.apply_weights(stage.write(misspelt.items()))
    with pytest.raises(WeightSyncError, match=r"model\.norm\.weight \(64,\) instead of \(128,\)"):
        replica.apply_weights(stage.write({**weights, "model.norm.weight": norm[:64]}.items()))
    assert replica.status() == {
        "weights": "cuda",
        "kv_cache": "cuda",
        "version": 40,
        "pending": False,
        "holds": "",
        "running": 0,
        "paused": False,
    }
    for old, new in zip(before, replica.prompt_logprobs(SEQUENCES), strict=True):
        np.testing.assert_array_equal(old, new)


def test_a_version_is_only_served_once_it_is_committed(
    replica: VllmReplica, model: PreTrainedModel, stage: ShmStage
) -> None:
    replica.apply_weights(staged(stage, model))
    assert replica.status()["pending"]
    with pytest.raises(StateError, match="no version"):
        replica.generate(one_job())
    replica.commit_version(50)
    assert replica.generate(one_job()).versions.tolist() == [50]


def test_a_sync_that_ended_on_another_worker_alone_does_not_mix_into_the_next_one(
    replica: VllmReplica, model: PreTrainedModel, stage: ShmStage
) -> None:
    whole = staged(stage, model)
    bucket = next(one for one in whole.buckets if any("q_proj.weight" in entry.name for entry in one.entries))
    part = replace(bucket, entries=tuple(entry for entry in bucket.entries if "q_proj.weight" in entry.name))
    replica._receiver._transfer("start_weight_update")  # what a worker has done whose peer fails in the next bucket
    replica._receiver._transfer("update_weights", {"transport": "shm", "bucket": part})
    replica.apply_weights(whole)
    assert gap(replica, model) <= 1e-4
    replica.commit_version(55)


def test_a_sync_that_fails_half_way_tears_the_replica_until_the_next_one(
    replica: VllmReplica, model: PreTrainedModel, stage: ShmStage
) -> None:
    whole = staged(stage, model)
    lost = replace(whole.buckets[-1], path=whole.buckets[-1].path + "-gone")
    with pytest.raises(WeightSyncError, match=r"reload\(\)"):
        replica.apply_weights(replace(whole, buckets=(*whole.buckets[:-1], lost)))
    assert replica.status()["weights"] == "torn"
    for refused in (lambda: replica.generate(one_job()), lambda: replica.prompt_logprobs(SEQUENCES)):
        with pytest.raises(StateError, match="half-way"):
            refused()
    with pytest.raises(StateError):
        replica.commit_version(60)
    replica.apply_weights(whole)
    assert gap(replica, model) <= 1e-4
    replica.commit_version(60)


def test_a_part_changes_what_it_holds_and_nothing_else(
    replica: VllmReplica, model: PreTrainedModel, stage: ShmStage, tied: bool
) -> None:
    """Group by group as above; the others are not even in memory that could be read."""
    replica.apply_weights(replace(staged(stage, model), token="0"))
    assert replica.status()["holds"] == "", "it is not proven yet"
    replica.commit_version(70)
    torch.manual_seed(5)
    weights = to_checkpoint_names(model, unique_parameters(model))
    groups = sorted({group_of(name) for name in weights})
    assert len(groups) == (4 if tied else 5), "two layers, embedding, norm, head"
    for version, group in enumerate(groups, start=71):
        names = {name for name in weights if group_of(name) == group}
        with torch.no_grad():
            for name in names:
                weights[name].add_(torch.randn_like(weights[name]), alpha=0.03 if weights[name].ndim > 1 else 0.3)
        assert gap(replica, model) > 1e-3, f"{group} must show before the sync"
        changed = stage.rewrite((name, weights[name]) for name in names)
        assert {entry.name for entry in changed.entries} == names
        assert replica.status()["holds"] == str(version - 71)
        replica.apply_weights(replace(changed, follows=str(version - 71), token=str(version - 70)))
        assert gap(replica, model) <= 1e-4, group
        replica.commit_version(version)


def test_a_part_of_what_the_replica_does_not_hold_is_refused(
    replica: VllmReplica, model: PreTrainedModel, stage: ShmStage
) -> None:
    whole = staged(stage, model)
    part = replace(whole.parted({"model.norm.weight"}), follows="a", token="b")
    held = replace(whole, token="a")

    def refused() -> None:
        with pytest.raises(WeightSyncError, match="does not hold the weights that these changes are of"):
            replica.apply_weights(part)
        assert replica.status()["weights"] == "cuda", "it keeps what it has"

    replica.apply_weights(held)
    refused()  # not proven
    replica.commit_version(80)
    replica.check_weights(part)
    for other in (lambda: replica.apply_weights(whole), replica.reload, lambda: replica.to_state("meta", ["weights"])):
        replica.apply_weights(held)
        replica.commit_version(81)
        other()
        if replica.status()["weights"] == "meta":
            replica.to_state("cuda", None)
        refused()
    replica.apply_weights(held)
    replica.commit_version(82)
    nothing = replace(part, unchanged=part.unchanged[1:])
    with pytest.raises(WeightSyncError, match="did not send"):
        replica.apply_weights(nothing)
    with pytest.raises(WeightSyncError, match="does not know"):
        replica.apply_weights(replace(part, buckets=(*part.buckets, *misspelt(part.unchanged[:1]))))


def misspelt(buckets: tuple[Bucket, ...]) -> tuple[Bucket, ...]:
    return tuple(replace(b, entries=tuple(replace(e, name=f"{e.name}s") for e in b.entries)) for b in buckets)


def test_a_part_of_a_layer_is_refused_by_the_layer(
    replica: VllmReplica, model: PreTrainedModel, stage: ShmStage
) -> None:
    """q, k and v are one layer here: what is left of it would be read as undefined memory."""
    whole = staged(stage, model)
    replica.apply_weights(replace(whole, token="a"))
    replica.commit_version(90)
    part = replace(whole.parted({"model.layers.1.self_attn.q_proj.weight"}), follows="a", token="b")
    with pytest.raises(WeightSyncError, match="QKVParallelLinear is made of"):
        replica.apply_weights(part)
    assert replica.status()["weights"] == "torn" and replica.status()["holds"] == ""
    replica.apply_weights(replace(whole, token="c"))
    replica.commit_version(91)
    assert gap(replica, model) <= 1e-4
    assert replica.status()["holds"] == "", "all weights come from now on: the same would fail again"
    replica.state.takes_parts = True


def test_reload_returns_to_the_checkpoint(
    replica: VllmReplica, model: PreTrainedModel, stage: ShmStage, folder: Path
) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.2)
    replica.apply_weights(staged(stage, model))
    replica.commit_version(70)
    assert replica.reload()["version"] == 0
    assert gap(replica, AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)) <= 1e-4


def test_a_layer_that_goes_on_with_the_weight_it_is_made_of_is_told_from_one_that_packs_it(
    replica: VllmReplica,
) -> None:
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    from rlbench.weights.vllm_direct import is_copied

    for packs in (True, False):
        layer = torch.nn.Linear(64, 32, bias=False).requires_grad_(False)
        weight = layer.weight
        if packs:
            dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
        else:
            layer.cpu_linear = lambda x, _, bias, weight=weight: torch.nn.functional.linear(x, weight, bias)
        assert is_copied(layer, weight) is packs
    assert not is_copied(torch.nn.Linear(2, 2), weight)


def test_weights_that_were_not_proven_are_followed_by_some_that_vllms_own_loader_loads(
    replica: VllmReplica, model: PreTrainedModel, stage: ShmStage, by_loader: list[int]
) -> None:
    whole = staged(stage, model)
    replica.apply_weights(whole)
    assert replica.status()["pending"]
    by_loader.clear()
    for version in (90, 91):
        replica.apply_weights(whole)
        replica.commit_version(version)
        assert gap(replica, model) <= 1e-4
    assert len(by_loader) >= 2


def test_a_short_proof_of_an_adapter_leaves_the_other_cores_to_the_ranks(
    replica: VllmReplica, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rlbench.workers.replica import vllm, vllm_requests, vllm_setup

    counts: list[int] = []
    monkeypatch.setattr(vllm_requests, "score", lambda *_: counts.append(torch.get_num_threads()))
    usual, ids = replica._threads, [[1, 2, 3]]
    vllm_setup.use_threads(3)
    monkeypatch.setattr(replica, "_threads", 3)
    for pending, adapter, limit in ((True, 1, 1 << 31), (True, 0, 1 << 31), (False, 1, 1 << 31), (True, 1, 0)):
        monkeypatch.setattr(replica.state, "pending", pending)
        monkeypatch.setattr(replica, "adapter", adapter)
        monkeypatch.setattr(vllm, "SMALL_PROOF", limit)
        replica.prompt_logprobs(ids)
        assert torch.get_num_threads() == 3
    vllm_setup.use_threads(usual)
    assert counts == [1, 3, 3, 3]
