"""RLite's quick start as its document prints it, with import, device and sizes changed; and the forms around it."""

import os

import numpy as np
import psutil
import pytest
import torch
import torch.nn.functional as F
from accelerate import init_empty_weights
from transformers import AutoModelForCausalLM, Qwen2ForCausalLM
from vllm import SamplingParams

import rlbench.compat.rlite as rlite
from rlbench.compat.rlite import NeedParallel, RliteInferenceEngine, RliteTrainEngine
from rlbench.engines.base import executor_of
from rlbench.errors import BuildError, CheckpointError, ClusterError, DataError
from rlbench.runtime import cluster as clusters

pytestmark = pytest.mark.engine
LONG = SamplingParams(max_tokens=12, ignore_eos=True, seed=3)
PROMPTS = ["sort 52143", "sort 9071"] * 4


class MyQwenModel(rlite.nn.HuggingFaceFsdp2TrainModule, Qwen2ForCausalLM):
    def on_weights_materialized(self):
        self.optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)

    def train_step(self, input_ids: list[list[int]], grad_acc_steps: int = 1):
        input_ids = torch.tensor(input_ids, dtype=torch.long, device=self.device)
        logits = self(input_ids).logits[:, :-1].contiguous()
        labels = input_ids[:, 1:].contiguous()
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), labels.view(-1)).mean()
        loss = loss / grad_acc_steps
        loss.backward()
        return loss.item()

    def optimizer_step(self):
        self.optimizer.step()
        self.optimizer.zero_grad()


@pytest.fixture(scope="module")
def vllm_engine(cluster, tiny_path):
    rlite.init()
    engine = RliteInferenceEngine(Checkpoint(str(tiny_path)), executor="VllmInferenceExecutor", name="rlite-vllm")
    sizes = {"kv_cache_bytes": 256 << 20, "max_model_len": 128}  # one test fills a model's whole length
    engine.build(tensor_parallel_size=1, pipeline_parallel_size=1, data_parallel_size=1, **sizes)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def fsdp2_engine(vllm_engine, tiny_path):
    with init_empty_weights():
        module = MyQwenModel.from_pretrained(str(tiny_path))
    engine = RliteTrainEngine(module, executor="Fsdp2TrainExecutor", name="rlite-fsdp2")
    engine.build(tensor_parallel_size=2, data_parallel_size=1, colocate_with=vllm_engine)
    yield engine
    engine.close()


class Checkpoint(rlite.nn.BaseInferenceModule):
    def __init__(self, path):
        self.path = path

    def get_checkpoint_path(self):
        return self.path


def test_the_quick_start_runs_as_printed(vllm_engine, fsdp2_engine):
    rollouts = vllm_engine.generate(PROMPTS, sampling_params=LONG)
    before = vllm_engine.logprobs([[1, 2, 3, 4]])[0]
    vllm_engine.meta()
    input_ids = [[x.outputs[0].token_ids for x in rollouts] for _ in range(4)]
    grad_acc_steps = 4
    for step in range(grad_acc_steps):
        losses = fsdp2_engine.train_step(NeedParallel(input_ids[step]), grad_acc_steps)
    assert len(losses) == 2
    fsdp2_engine.optimizer_step()
    vllm_engine.cuda("weights")
    fsdp2_engine.p2p_weight_sync(vllm_engine)
    fsdp2_engine.cpu()
    vllm_engine.cuda("kv_cache")
    fsdp2_engine.cuda()
    assert np.abs(vllm_engine.logprobs([[1, 2, 3, 4]])[0] - before).max() > 1e-3


# -- generating


def test_without_max_tokens_a_completion_ends_where_vllm_ends_it_and_says_so(vllm_engine):
    rollouts = vllm_engine.generate(PROMPTS, ignore_eos=True)
    assert rollouts.lengths.tolist() == [16] * 8
    assert "max_tokens=16" in rollouts.notes[0] and "max_tokens=16" in repr(rollouts)
    given = vllm_engine.generate(PROMPTS[:1], max_tokens=16, ignore_eos=True)
    assert given.notes == () and given.lengths.tolist() == [16]
    whole = vllm_engine.generate([[1, 2, 3]], SamplingParams(max_tokens=None, ignore_eos=True, temperature=0.0))
    assert whole.lengths.tolist() == [vllm_engine.info["max_model_len"] - 3] and whole.notes == ()


def test_sampling_params_are_vllms_object_a_mapping_or_keywords(vllm_engine):
    drawn = [
        vllm_engine.generate(PROMPTS, sampling_params=LONG),
        vllm_engine.generate(PROMPTS, LONG),
        vllm_engine.generate(PROMPTS, {"max_tokens": 12, "ignore_eos": True, "seed": 3}, use_tqdm=False),
        vllm_engine.generate(PROMPTS, max_tokens=12, ignore_eos=True, seed=3),
    ]
    assert len({one.texts for one in drawn}) == 1, "a seed draws the same samples"
    assert vllm_engine.generate(PROMPTS, LONG, seed=4).texts != drawn[0].texts
    assert vllm_engine.generate(PROMPTS[:2], SamplingParams(n=3, max_tokens=2)).samples == 6
    with pytest.raises(DataError, match="sampling_params"):
        vllm_engine.generate(PROMPTS, {"n": 2}, sampling_params=LONG)
    for refused in ("logprobs", "prompt_logprobs", "detokenize", "output_kind", "thinking_token_budget"):
        given = {
            "logprobs": 4,
            "prompt_logprobs": 1,
            "detokenize": False,
            "thinking_token_budget": 5,
            "output_kind": __import__("vllm").sampling_params.RequestOutputKind.DELTA,
        }[refused]
        with pytest.raises(DataError, match=refused):
            vllm_engine.generate(PROMPTS, SamplingParams(**{refused: given}))
    assert vllm_engine.generate(["sort 1"], max_tokens=2).samples == 1


def test_a_grammar_bounds_what_is_sampled(vllm_engine):
    grammar = {"regex": "[0-9]{3}"}
    with pytest.warns(UserWarning, match="structured_outputs"):
        rollouts = vllm_engine.generate(["sort 1"], n=4, max_tokens=8, structured_outputs=grammar)
    assert all(len(text) == 3 and text.isdigit() for text in rollouts.texts)
    with pytest.raises(DataError, match="structured_outputs"):
        vllm_engine.generate(["sort 1"], max_tokens=8, structured_outputs={"regexp": "x"})
    with pytest.raises(DataError):
        vllm_engine.generate(["sort 1"], max_tokens=8, structured_outputs={"regex": "("})
    assert vllm_engine.generate(["sort 1"], max_tokens=2).samples == 1


def test_prompts_are_vllms_dicts(vllm_engine):
    ids = vllm_engine.generate(["sort 52143"], LONG)[0].prompt_token_ids
    by_ids = vllm_engine.generate([{"prompt_token_ids": ids}, {"prompt": "sort 52143"}], max_tokens=4, temperature=0.0)
    assert by_ids[0].prompt_token_ids == by_ids[1].prompt_token_ids == ids and by_ids.texts[0] == by_ids.texts[1]
    with pytest.raises(DataError, match=r"cat\.png"):
        vllm_engine.generate([{"prompt": "what is it?", "multi_modal_data": {"image": "cat.png"}}])


def test_a_hook_makes_the_turns_and_ends_them(vllm_engine):
    def post_generation_hook(generation, input_queue, output_queue):
        if len(generation.outputs) < 10:  # more turns than an environment has by default
            again = generation.inputs[-1] + generation.outputs[-1].outputs[0].text + " "
            history = rlite.IndexedGenerationHistory(generation.index, [*generation.inputs, again], generation.outputs)
            input_queue.put(history)
        else:
            output_queue.put(generation)

    rollouts = vllm_engine.generate(
        PROMPTS[:2], SamplingParams(max_tokens=3), post_generation_hook=post_generation_hook
    )
    assert rollouts.turn_rewards.lengths.tolist() == [10, 10]
    with pytest.raises(DataError, match="post_generation_hook"):
        vllm_engine.generate(PROMPTS, env=object(), post_generation_hook=post_generation_hook)


# -- building


def test_a_second_build_is_refused_or_does_nothing(vllm_engine, fsdp2_engine):
    for engine in (vllm_engine, fsdp2_engine):
        workers = engine.workers
        with pytest.raises(BuildError, match="built already"):
            engine.build(tensor_parallel_size=1)
        assert engine.build(tensor_parallel_size=1, ignore_rebuild_error=True) is engine and engine.workers == workers
        with pytest.raises(BuildError, match="pipeline_parallel_size"):
            engine.build(tensor_parallel_size=1, pipeline_parallel_size=2)


def test_devices_of_ones_own_are_shared_with_nobody(vllm_engine, fsdp2_engine, tiny_path):
    def made(name):
        with init_empty_weights():
            return RliteTrainEngine(MyQwenModel.from_pretrained(str(tiny_path)), name=name)

    with pytest.raises(BuildError, match="allow_colocate"):
        made("all").build(tensor_parallel_size=4, data_parallel_size=1, allow_colocate=False)
    with pytest.raises(BuildError, match="colocate_with"):
        made("both").build(
            tensor_parallel_size=1, data_parallel_size=1, allow_colocate=False, colocate_with=vllm_engine
        )
    alone = made("alone").build(tensor_parallel_size=1, data_parallel_size=1, allow_colocate=False)
    try:
        with pytest.raises(BuildError, match="allow_colocate"):
            made("beside").build(tensor_parallel_size=1, data_parallel_size=1, colocate_with=alone)
        with pytest.raises(BuildError, match="devices are left"):
            made("four").build(tensor_parallel_size=4, data_parallel_size=1)
    finally:
        alone.close()


@pytest.mark.parametrize("name", ["vllm", "vLLM", "VLLM", "VllmInferenceExecutor"])
def test_executors_have_the_names_of_their_classes(name):
    assert executor_of(name, ("vllm",), "InferenceEngine") == "vllm"


def test_process_groups_use_the_interface_that_init_was_told(cluster, tiny_path, monkeypatch):
    others = [name for name, found in psutil.net_if_addrs().items() if any(a.family.name == "AF_INET" for a in found)]
    interface = max(others, key=lambda name: name != "lo")  # one that is not loopback, where there is one
    (address,) = (a.address for a in psutil.net_if_addrs()[interface] if a.family.name == "AF_INET")
    monkeypatch.setattr(clusters, "_interface", None)
    with pytest.raises(ClusterError, match="eth77"):
        rlite.init(network_interface="eth77")
    assert rlite.init(network_interface=interface) == cluster
    with init_empty_weights():
        module = MyQwenModel.from_pretrained(str(tiny_path))
    engine = RliteTrainEngine(module, name="rlite-interface").build(tensor_parallel_size=2, data_parallel_size=1)
    try:
        assert engine.call_all("rendezvous").result()[0][0] == address

        def gloo():
            return os.environ["GLOO_SOCKET_IFNAME"]

        assert engine.run(gloo) == [interface] * 2
    finally:
        engine.close()


# -- the train engine's state


def test_the_state_dict_is_the_whole_model_and_can_be_put_back(fsdp2_engine, tiny_path):
    kept = fsdp2_engine.state_dict()
    model = AutoModelForCausalLM.from_pretrained(str(tiny_path), dtype=torch.float32)
    shapes = [{name: tuple(tensor.shape) for name, tensor in state.items()} for state in (kept, model.state_dict())]
    assert shapes[0] == shapes[1]
    model.load_state_dict(kept)
    fsdp2_engine.load_state_dict({name: tensor * 0.5 for name, tensor in kept.items()})
    halved = fsdp2_engine.state_dict()
    assert all(torch.equal(halved[name], tensor * 0.5) for name, tensor in kept.items())
    fsdp2_engine.load_state_dict(kept)
    assert all(torch.equal(a, kept[name]) for name, a in fsdp2_engine.state_dict().items())
    with pytest.raises(BuildError, match="missing"):
        fsdp2_engine.load_state_dict({"model.norm.weight": kept["model.norm.weight"]})


def test_what_was_saved_loads_in_transformers_and_here(fsdp2_engine, tmp_path):
    kept = fsdp2_engine.state_dict()
    saved = fsdp2_engine.save(tmp_path / "model", dtype="float32")
    assert {"model.safetensors", "config.json", "tokenizer.json"} <= set(saved["files"])
    model = AutoModelForCausalLM.from_pretrained(saved["path"], dtype=torch.float32)
    assert all(torch.equal(tensor, kept[name]) for name, tensor in model.state_dict().items())
    with pytest.raises(CheckpointError, match="not empty"):
        fsdp2_engine.save(tmp_path / "model")
    fsdp2_engine.load_state_dict({name: tensor * 0.5 for name, tensor in kept.items()})
    fsdp2_engine.load(saved["path"])
    assert all(torch.equal(a, kept[name]) for name, a in fsdp2_engine.state_dict().items())


def test_modes_and_caches(vllm_engine, fsdp2_engine):
    fsdp2_engine.train()
    assert fsdp2_engine.training is True
    fsdp2_engine.eval()
    assert fsdp2_engine.training is False
    for engine in (vllm_engine, fsdp2_engine):
        freed = engine.release_memory_cache(cpu=True)
        assert len(freed) == engine.world_size and all(one["cpu"] >= 0 and one["gpu"] == 0 for one in freed)


def test_a_method_that_the_engine_hides_is_told():
    engine = RliteTrainEngine(lambda: None, name="hiding")
    with pytest.warns(UserWarning, match="save"):
        engine._make_methods([{"name": "save", "signature": "()", "doc": None}])


# -- FSDP1


def written_by_a_user(base):
    class Mine(base, Qwen2ForCausalLM):
        def on_weights_materialized(self):
            self.optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)

        def train_step(self, input_ids):
            ids = torch.tensor(input_ids, device=self.device)
            loss = self(input_ids=ids, labels=ids).loss
            loss.backward()
            norm = self.clip_grad_norm_(1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
            return loss.item(), float(norm)

    return Mine


def test_a_module_of_fsdp1s_base_trains_and_reaches_the_replica_with_its_proof(vllm_engine, tiny_path, tmp_path):
    cls = written_by_a_user(rlite.nn.HuggingFaceFsdpTrainModule)
    with init_empty_weights():
        module = cls.from_pretrained(str(tiny_path))
    with pytest.raises(BuildError, match=r"inherits from FsdpTrainModule.*executor='fsdp1'"):
        RliteTrainEngine(module, executor="Fsdp2TrainExecutor")
    with pytest.raises(BuildError, match="tensor_parallel=2 cannot be honoured with FSDP1"):
        RliteTrainEngine(module, tensor_parallel=2).build(tensor_parallel_size=1, data_parallel_size=1)
    engine = RliteTrainEngine(module, name="rlite-fsdp1")
    try:
        engine.build(tensor_parallel_size=2, data_parallel_size=1, colocate_with=vllm_engine)
        model = AutoModelForCausalLM.from_pretrained(str(tiny_path), dtype=torch.float32)
        assert engine.info["executor"] == "fsdp1" and "fsdp1" in repr(engine)
        assert engine.info["parameters"] == sum(p.numel() for p in model.parameters())
        assert engine.methods()[:1] == ["train_step"]
        steps = [engine.train_step(NeedParallel([[1, 2, 3, 4, 5, 6], [4, 3, 2, 1, 5, 6]])) for _ in range(3)]
        assert steps[-1][0][0] < steps[0][0][0] and steps[0][0][1] == steps[0][1][1]
        assert engine.p2p_weight_sync(vllm_engine)["gap"] <= 1e-4
        saved = engine.save(tmp_path / "model", dtype="float32")["path"]
        found = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32).state_dict()
        assert all(torch.equal(found[name], tensor) for name, tensor in engine.state_dict().items())
        engine.meta()
        engine.cuda()
        assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in engine.state_dict().items())
        assert engine.p2p_weight_sync(vllm_engine)["gap"] <= 1e-4
    finally:
        engine.close()
