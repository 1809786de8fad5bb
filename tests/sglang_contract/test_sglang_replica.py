"""`executor="sglang"` against a server that keeps SGLang's published contract and computes with transformers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from rlbench.data import EncodedImage
from rlbench.dispatch.context import CallContext, set_current
from rlbench.errors import BuildError, DataError, EngineError, StateError, WeightSyncError
from rlbench.runtime.processes import start_time
from rlbench.weights.staging import ShmStage
from rlbench.workers.replica.config import ReplicaConfig
from rlbench.workers.replica.sglang import SglangReplica
from rlbench.workers.replica.sglang_server import SglangServer, command, launch_options
from tests.clock import LIMIT_S, until
from tests.sglang_contract import schema
from tests.workers.tiny_checkpoint import hf_logprobs, make_checkpoint
from tests.workers.turns import CHAT, IM_END, UNCUT, Echo, Rows, job

pytestmark = pytest.mark.engine
HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("sglang"), tied=True)


@pytest.fixture(scope="module")
def installed() -> Iterator[None]:
    """SGLang's name leads to the contract server, here and in processes begun here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(HERE))
        patch.setenv("PYTHONPATH", f"{HERE}:{HERE.parents[1]}")
        yield
    sys.modules.pop("sglang", None)


@pytest.fixture(scope="module")
def replica(folder: Path, installed: None) -> Iterator[SglangReplica]:
    saver = {"enable_memory_saver": True}
    made = SglangReplica(ReplicaConfig(str(folder), dtype="float32", max_model_len=200, engine_kwargs=saver))
    made.build()
    yield made
    server = made.server.process.pid
    made.close()
    assert not psutil.pid_exists(server)


def weights(seed: int, folder: Path) -> dict[str, torch.Tensor]:
    """Return other weights of the same shapes, by their checkpoint names."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(folder)
    return {name: tensor + 0.05 * torch.randn_like(tensor) for name, tensor in model.named_parameters()}


def test_sampled_tokens_have_the_models_log_probs_and_seeds_give_the_same_again(replica, folder):
    found = Rows(replica.generate(job(["hello", CHAT, [5, 6, 7]], n=3, max_tokens=12)))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert len(found.keys) == 9
    for key in found.keys:
        prompt, tokens = found.arrays.prompt_token_ids[key[0]], found.of("token_ids", key)
        expected = hf_logprobs(model, [*prompt, *tokens])[len(prompt) - 1 :]
        np.testing.assert_allclose(found.of("logprobs", key), expected, atol=1e-4)
        assert found.finish(key) == ("stop" if tokens[-1] == IM_END else "length")
    again = Rows(replica.generate(job(["hello", CHAT, [5, 6, 7]], n=3, max_tokens=12)))
    assert all(again.of("token_ids", key) == found.of("token_ids", key) for key in found.keys)
    assert len({tuple(found.of("token_ids", (0, sample))) for sample in range(3)}) == 3


def test_options_of_sampling_have_their_effect(replica):
    greedy = [Rows(replica.generate(job(["ab"], temperature=0.0, seed=seed))).of("token_ids") for seed in (1, 2)]
    assert greedy[0] == greedy[1]
    whole = Rows(replica.generate(job(["ab"], max_tokens=None, ignore_eos=True))).of("token_ids")
    assert len(whole) == 200 - 2
    (a,) = replica._tokenizer("a")["input_ids"]
    stopped = Rows(replica.generate(job(["ab"], logit_bias={a: 100.0}, stop=["aaa"])))
    assert stopped.of("token_ids") == [a] * 3 and stopped.finish() == "stop"
    whole = replica.generate(job(["ab"], logit_bias={a: 100.0}, stop=["aba", "a"], include_stop_str_in_output=True))
    assert whole.texts == ["a"]


REFUSED = [{"top_p": 0.9}, {"top_k": 5}, {"bad_words": ["a"]}, {"structured_outputs": {"x": 1}}]


def test_images_are_refused_in_words(replica):
    image = EncodedImage.from_any(np.zeros((4, 4, 3), np.uint8))
    with pytest.raises(DataError, match="sequence 1 has images"):
        replica.prompt_logprobs([[1, 2], [1, 2]], ((), (image,)))


@pytest.mark.parametrize("option", REFUSED, ids=lambda option: next(iter(option)))
def test_what_sglang_cannot_do_as_asked_is_refused(replica, option):
    with pytest.raises(DataError, match=next(iter(option))):
        replica.generate(job(["ab"], **option))


def test_episodes_of_several_turns_train_on_the_tokens_as_sampled(replica, folder):
    found = Rows(replica.generate(job([CHAT], Echo("ok \u00e9"), n=2, **UNCUT)))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompt = found.arrays.prompt_token_ids[0]
    for key in found.keys:
        tokens, mask = found.of("token_ids", key), np.array(found.of("mask", key))
        expected = hf_logprobs(model, [*prompt, *tokens])[len(prompt) - 1 :]
        np.testing.assert_allclose(np.array(found.of("logprobs", key))[mask], expected[mask], atol=1e-4)
        assert mask.sum() == 12 and max(found.of("turns", key)) == 2


def test_a_stop_keeps_every_token_drawn_and_leaves_no_request(replica, folder):
    context = CallContext()
    set_current(context)
    try:
        threading.Timer(0.5, context.request_stop).start()
        found = Rows(replica.generate(job(["ab"], n=4, max_tokens=None, ignore_eos=True)))
    finally:
        set_current(None)
    lengths = [len(found.of("token_ids", key)) for key in found.keys]
    assert found.keys and all(0 < length < 198 for length in lengths)
    assert {found.finish(key) for key in found.keys} == {"abort"} and replica.status()["running"] == 0
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = found.of("token_ids")
    expected = hf_logprobs(model, [*found.arrays.prompt_token_ids[0], *tokens])[1:]
    np.testing.assert_allclose(found.of("logprobs"), expected, atol=1e-4)


def test_a_pause_holds_generation_where_it_is(replica):
    answers: list[Any] = []
    one = job(["ab"], max_tokens=64, ignore_eos=True)
    asked = threading.Thread(target=lambda: answers.append(replica.generate(one)))
    asked.start()
    until(lambda: replica.status()["running"])
    replica.pause()
    asked.join(1.0)
    assert asked.is_alive() and replica.status()["paused"]
    replica.resume()
    asked.join(LIMIT_S)
    assert len(Rows(answers[0]).of("token_ids")) == 64


def test_weights_come_by_shared_memory_prove_themselves_and_go_back(replica, folder):
    tokens = [[5, 6, 7, 8], list(range(3, 203))]  # the second fills the model
    first = replica.prompt_logprobs(tokens)
    new, stage = weights(1, folder), ShmStage("rlb-test-sglang")
    try:
        manifest = stage.write(new.items())
        replica.begin_sync()
        replica.apply_weights(manifest)
        with pytest.raises(StateError, match="sync"):
            replica.generate(job(["ab"]))
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        model.load_state_dict(new, strict=False)
        model.tie_weights()
        for row, ids in zip(replica.prompt_logprobs(tokens), tokens, strict=True):
            np.testing.assert_allclose(row, hf_logprobs(model, ids), atol=1e-4)
        replica.commit_version(3)
        assert Rows(replica.generate(job(["ab"]))).arrays.versions.tolist() == [3]
        wrong = stage.write([(f"no.{name}", tensor) for name, tensor in new.items()])
        with pytest.raises(WeightSyncError, match="no\\."):
            replica.apply_weights(wrong)
        assert replica.status()["weights"] == "cuda" and replica.status()["version"] == 3
    finally:
        stage.close()
        moved = replica.reload()
    assert moved["version"] == 0 and moved["reloaded_from"] == str(folder)
    for row, before in zip(replica.prompt_logprobs(tokens), first, strict=True):
        np.testing.assert_array_equal(row, before)
    assert not [path for path in Path("/dev/shm").iterdir() if path.name.startswith("rlb-sglang-")]


def test_memory_is_released_and_taken_back_by_tag(replica):
    assert replica.memory()["weights"] > 0
    replica.to_state("cpu", ["kv_cache"])
    with pytest.raises(StateError, match="KV cache"):
        replica.generate(job(["ab"]))
    replica.to_state("cuda", ["kv_cache"])
    replica.to_state("meta")
    assert replica.memory()["weights"] == 0
    assert replica.to_state("cuda")["reloaded_from"] is not None
    assert Rows(replica.generate(job(["ab"]))).of("token_ids")


def test_an_error_of_the_server_is_told_in_its_words_and_it_goes_on(replica, monkeypatch):
    monkeypatch.setattr(type(replica._limits), "get_vocab_size", lambda self: 10**6)
    with pytest.raises(EngineError, match="length"):
        replica.server.post("/generate", {"input_ids": [1] * 300, "sampling_params": {}})
    with pytest.raises(EngineError, match="422"):
        replica.server.post("/generate", {"inputs": [1]})
    with pytest.raises(EngineError, match="length"):
        list(replica.server.stream({"input_ids": [1] * 300, "sampling_params": {}}))
    assert Rows(replica.generate(job(["ab"]))).of("token_ids")


def test_a_server_that_dies_or_cannot_start_is_said_with_its_log(folder, installed):
    with pytest.raises(BuildError, match="unrecognized arguments: --no_such"):
        SglangServer(ReplicaConfig(str(folder), dtype="float32", engine_kwargs={"no_such": 1}))
    with pytest.raises(BuildError, match="dtype"):
        SglangServer(ReplicaConfig(str(folder), dtype="float32", engine_kwargs={"dtype": "float16"}))
    with pytest.raises(BuildError, match="adapters"):
        SglangReplica(ReplicaConfig(str(folder), adapters=2))
    dying = SglangReplica(ReplicaConfig(str(folder), dtype="float32"))
    dying.build()
    dying.server.process.kill()
    with pytest.raises(EngineError, match="does not answer"):
        dying.generate(job(["ab"]))
    dying.close()
    code = f"""
import os, signal
from rlbench.workers.replica.config import ReplicaConfig
from rlbench.workers.replica.sglang_server import SglangServer
print(SglangServer(ReplicaConfig({str(folder)!r}, dtype="float32")).process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    killed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    server = int(killed.stdout)
    until(lambda: start_time(server) is None, what="a server outlives the process that began it")


def test_without_sglang_the_error_says_what_to_install(folder, monkeypatch):
    monkeypatch.setattr("rlbench.workers.replica.sglang_server.importlib.util.find_spec", lambda name: None)
    with pytest.raises(BuildError, match="pip install sglang"):
        SglangReplica(ReplicaConfig(str(folder))).build()


def test_a_servers_arguments_are_sglangs(folder, monkeypatch):
    monkeypatch.setattr("rlbench.workers.replica.sglang_server.has_nvidia_gpu", lambda: True)
    monkeypatch.setattr("rlbench.workers.replica.sglang_server._capability", lambda: (9, 0))
    options = launch_options(ReplicaConfig(str(folder), tensor_parallel_size=2, enforce_eager=True))
    assert set(options) <= set(json.loads(schema.FILE.read_text())["arguments"])
    assert options["dtype"] == "bfloat16" and options["tp_size"] == 2 and options["enable_memory_saver"] is True
    line = command(options)
    assert line[line.index("--tp-size") + 1] == "2" and "--enable-memory-saver" in line


@pytest.mark.long
def test_the_schema_is_that_of_a_wheel_of_sglangs(tmp_path):
    known = json.loads(schema.FILE.read_text())
    ask = ["pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", str(tmp_path)]
    subprocess.run([sys.executable, "-m", *ask, f"sglang=={known['version']}"], check=True)
    (wheel,) = tmp_path.glob("sglang-*.whl")
    assert schema.published(wheel) == known


SESSION = """
import rlbench as rb
from rlbench.tiny import tasks

prompts, saver = tasks.prompts(4), {"enable_memory_saver": True}
try:
    session = rb.Session("tiny", inference=rb.Inference(executor="sglang", engine_kwargs=saver))
    for _ in range(2):
        rollouts = session.rollout(prompts, n=4, max_tokens=8).score(tasks.reward)
        session.train_step(rollouts.batch(advantage=rb.rl.group_normalized()))
        assert session.sync_weights().gap <= 1e-4
    version = session.version
    assert session.rollout(prompts, n=2).versions.tolist() == [version] * 8
    session.undo()
    session.sync_weights()
    print("whole", session.evaluate(prompts, tasks.reward, max_tokens=8))
finally:
    rb.shutdown()
"""


@pytest.mark.curve
def test_a_session_rolls_out_steps_syncs_and_goes_back_with_it(tmp_path):
    environment = os.environ | {"PYTHONPATH": f"{HERE}:{HERE.parents[1]}", "XDG_STATE_HOME": str(tmp_path)}
    ran = subprocess.run([sys.executable, "-c", SESSION], env=environment, capture_output=True, text=True)
    assert ran.returncode == 0 and "whole" in ran.stdout, ran.stderr[-3000:]
