"""Weight sync between real ranks and a real vLLM replica: equal log-probs, versions, states, and what is refused."""

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import rlbench as rb
from rlbench.errors import BuildError, DataError, EngineError, StateError, WeightSyncError
from rlbench.runtime.processes import start_time
from rlbench.trainers.models.policy_spec import PolicySpec
from tests.clock import until
from tests.engines.syncing import freeze, gap, perturb

pytestmark = pytest.mark.engine
PROMPTS = ["sort 52143", "sort 9071", "sort 3321"]


@pytest.fixture(scope="module")
def infer(cluster, tiny_path):
    engine = rb.InferenceEngine(str(tiny_path), name="sync-inference", kv_cache_bytes=256 << 20)
    engine.build(tensor_parallel_size=1, data_parallel_size=1)
    yield engine
    engine.close()


@pytest.fixture(scope="module", params=[1, 2], ids=["one-rank", "two-ranks"])
def train(request, infer, tiny_path):
    engine = rb.TrainEngine(PolicySpec(str(tiny_path), lr=1e-3), name=f"sync-train{request.param}")
    engine.build(tensor_parallel_size=request.param, data_parallel_size=1, colocate_with=infer)
    yield engine
    engine.close()


def test_after_a_sync_the_replica_computes_the_trainers_log_probs(train, infer):
    train.run(perturb)
    assert gap(train, infer) > 1e-2  # else the next line proves nothing
    before = infer.weight_versions()[0]
    done = train.p2p_weight_sync(infer)
    assert gap(train, infer) <= 1e-4 and done["gap"] <= 1e-4
    assert infer.weight_versions() == [before + 1] == [done["version"]]


def test_rollouts_carry_the_version_they_were_drawn_under(train, infer):
    version = train.p2p_weight_sync(infer)["version"]
    rollouts = infer.generate(PROMPTS, n=2, max_tokens=4)
    assert rollouts.weight_version == version and {r.weight_version for r in rollouts.flat} == {version}


def test_the_sketchs_order_works_and_the_proof_follows_with_the_kv_cache(train, infer):
    infer.meta()
    assert infer.device() == "meta"
    with pytest.raises(StateError, match="cuda"):
        infer.generate(PROMPTS)
    with pytest.raises(StateError, match="cuda"):
        train.p2p_weight_sync(infer)
    infer.cuda("weights")
    train.run(perturb)
    assert train.p2p_weight_sync(infer)["gap"] is None  # no KV cache, so nothing can be computed yet
    with pytest.raises(StateError, match="kv_cache"):
        infer.generate(PROMPTS)
    infer.cuda("kv_cache")
    assert gap(train, infer) <= 1e-4
    assert infer.link.state()["engines"][infer.name]["proof"] is None
    assert infer.generate(PROMPTS, max_tokens=3).samples == 3


def test_offloading_the_replica_really_frees_its_cache(infer):
    infer.generate(["sort 12345678"] * 8, n=8, max_tokens=200, ignore_eos=True)
    before = infer.memory()[0]
    infer.cpu("kv_cache")
    after = infer.memory()[0]
    infer.cuda("kv_cache")
    assert before["kv_cache"] > 1 << 20 and after["kv_cache"] == 0  # pages that are resident, not what was asked for
    assert before["rss"] - after["rss"] > 0.9 * before["kv_cache"]


@pytest.fixture(scope="module")
def reference(infer, tiny_path):
    engine = rb.TrainEngine(PolicySpec(str(tiny_path), trainable=False), name="sync-reference")
    engine.build(tensor_parallel_size=1, data_parallel_size=1)
    yield engine
    engine.close()


def test_a_reference_takes_the_policys_weights_and_gives_none_back(train, infer, reference):
    train.run(perturb)
    own = train.call_all("state_checksum").result()[0]
    assert reference.call_all("state_checksum").result()[0] != own
    done = train.p2p_weight_sync(reference)
    assert reference.call_all("state_checksum").result()[0] == own and done["gap"] <= 1e-4 and done["tensors"] > 10
    assert not list(Path("/dev/shm").glob(f"*{train.name}-copy*"))
    for refused in (
        lambda: reference.p2p_weight_sync(train),  # it trains
        lambda: train.p2p_weight_sync(train),
        lambda: train.p2p_weight_sync("reference"),
    ):
        with pytest.raises(EngineError, match="p2p_weight_sync"):
            refused()
    reference.meta()
    with pytest.raises(StateError, match=r"cuda\('weights'\)"):
        train.p2p_weight_sync(reference)
    reference.cuda()
    assert train.call_all("state_checksum").result()[0] == own


def test_a_replica_that_took_another_trainers_weights_gets_all_of_them(train, infer, reference):
    """Of a trainer of which all is frozen nothing goes twice."""
    train.run(freeze, "model.layers.0.")
    train.p2p_weight_sync(infer)
    assert train.p2p_weight_sync(infer).unchanged > 5
    for unchanged in (False, True):
        done = reference.p2p_weight_sync(infer)
        assert (done.tensors == 0, done.unchanged > 0) == (unchanged, unchanged)
        assert gap(reference, infer) <= 1e-4 < 1e-2 < gap(train, infer)
    assert train.p2p_weight_sync(infer).unchanged == 0 and gap(train, infer) <= 1e-4
    train.run(freeze, "no parameter of this name")
    assert train.p2p_weight_sync(infer).unchanged == 0, "what trains is sent, changed or not"


def test_an_offloaded_trainer_is_refused_with_the_mend(train, infer):
    train.cpu("optimizer")
    train.meta("weights")
    with pytest.raises(StateError, match=r"cuda\('weights'\)"):
        train.p2p_weight_sync(infer)
    train.cuda()
    train.p2p_weight_sync(infer)
    assert gap(train, infer) <= 1e-4


def test_weights_of_another_architecture_are_refused_and_the_replica_keeps_serving(infer, tiny_path, tmp_path):
    import json
    import shutil

    other = tmp_path / "wider"
    shutil.copytree(tiny_path, other)
    config = json.loads((other / "config.json").read_text())
    config["intermediate_size"] *= 2
    (other / "config.json").write_text(json.dumps(config))
    tensors = load_file(other / "model.safetensors")
    for name, tensor in tensors.items():
        if ".mlp." in name:
            dim = 1 if "down" in name else 0
            tensors[name] = torch.cat([tensor, tensor], dim=dim).contiguous()
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    wide = rb.TrainEngine(PolicySpec(str(other)), name="wide").build(tensor_parallel_size=1, data_parallel_size=1)
    with pytest.raises(WeightSyncError, match="shapes differ"):
        wide.p2p_weight_sync(infer)
    wide.close()
    infer.cpu("kv_cache")
    infer.cuda()  # nothing of the refused sync is left to prove
    assert infer.generate(PROMPTS, max_tokens=3).samples == 3


def test_prompts_come_back_in_order_with_their_samples(infer):
    prompts = [f"sort {i}" for i in range(20)]
    rollouts = infer.generate(prompts, {"max_tokens": 5, "n": 3})
    assert [g.prompt for g in rollouts] == prompts and all(len(g.outputs) == 3 for g in rollouts)
    for rollout in rollouts.flat:
        assert len(rollout.logprobs) == len(rollout.token_ids) and rollout.finish_reason in ("stop", "length")


def test_text_chat_and_token_ids_are_all_prompts(infer):
    chat = [{"role": "user", "content": "sort 21"}]
    rollouts = infer.generate(["sort 21", chat, [65, 66, 67]], max_tokens=3)
    assert rollouts[2].prompt_token_ids == [65, 66, 67]
    assert len(rollouts[1].prompt_token_ids) > len(rollouts[0].prompt_token_ids)  # the chat template


def test_two_replicas_share_the_work_and_draw_the_same_samples(infer, tiny_path, cluster):
    infer.reload()
    pair = rb.InferenceEngine(str(tiny_path), name="pair", dtype="float32", kv_cache_bytes=64 << 20)
    pair.build(data_parallel_size=2)
    prompts = [f"sort {i}" for i in range(1000, 1060)]
    infer.link.set(rollouts=500)
    alone = infer.generate(prompts, n=2, max_tokens=6)
    pair.link.set(rollouts=500)
    shared = pair.generate(prompts, n=2, max_tokens=6)
    served = pair.control("status")
    pair.close()
    assert [r.token_ids for r in alone.flat] == [r.token_ids for r in shared.flat]
    assert len(served) == 2


@pytest.mark.parametrize(
    ("prompts", "options", "match"),
    [
        ([], {}, "empty"),
        (["sort 1"], {"n": 0}, "n=0"),
        ([""], {}, "prompt 0 is empty|prompt 0 is an empty"),
        (["sort 1"], {"temperatur": 0.5}, "temperature"),
        (["sort 1", "x" * 5000], {}, "prompt 1"),
        ([3.5], {}, "prompt 0"),
        (["sort 1"], {"max_tokens": 0}, "max_tokens"),
    ],
)
def test_bad_requests_get_one_sentence_and_leave_the_engine_usable(infer, prompts, options, match):
    with pytest.raises(DataError, match=match):
        infer.generate(prompts, **options)
    assert infer.generate(["sort 12"], max_tokens=2).samples == 1


def test_a_wrong_path_is_refused_before_anything_starts(cluster, tmp_path):
    with pytest.raises(BuildError, match="no model folder"):
        rb.InferenceEngine(str(tmp_path / "nowhere")).build()
    with pytest.raises(BuildError, match=r"config\.json"):
        rb.InferenceEngine(str(tmp_path)).build()


@pytest.mark.curve
def test_a_hub_id_without_network_says_so_in_one_sentence(cluster, monkeypatch):
    engine = rb.TrainEngine(PolicySpec("nobody/has-this-model"), name="hub")
    with pytest.raises(BuildError, match="nobody/has-this-model"):
        engine.build(tensor_parallel_size=1, data_parallel_size=1)
    assert not engine.built


@pytest.mark.curve
def test_a_tensor_parallel_replica_takes_the_trainers_weights_too(infer, tiny_path):
    wide = rb.InferenceEngine(str(tiny_path), name="wide-replica", dtype="float32", kv_cache_bytes=64 << 20)
    wide.build(tensor_parallel_size=2, data_parallel_size=1)
    mapped = "".join(Path(f"/proc/{pid}/maps").read_text() for pid in wide.info["pids"])
    shared = re.findall(r"/dev/shm/.*", mapped)
    assert shared and all(path.endswith(" (deleted)") for path in shared), "what a killed worker would leave"
    single = rb.TrainEngine(PolicySpec(str(tiny_path)), name="for-wide")
    single.build(tensor_parallel_size=1, data_parallel_size=1)
    single.run(perturb)
    assert single.p2p_weight_sync(wide)["gap"] <= 1e-4
    assert wide.generate(PROMPTS, n=2, max_tokens=4).samples == 6
    children = wide.info["pids"][1:]
    single.close()
    wide.close()
    assert len(children) == 2
    until(lambda: all(start_time(pid) is None for pid in children))
