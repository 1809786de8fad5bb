"""A vLLM replica on CPU: what it draws, what it refuses, and what its device states really free."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rlbench.data import EncodedImage
from rlbench.data.rollouts.jobs import FINISH_REASONS, GeneratedArrays, GenerateJob
from rlbench.dispatch import context as dispatch_context
from rlbench.dispatch.context import CallContext
from rlbench.errors import BuildError, DataError, StateError
from rlbench.workers.replica.config import ReplicaConfig
from rlbench.workers.replica.guests import Guest
from rlbench.workers.replica.vllm import VllmReplica
from rlbench.workers.replica.vllm_setup import register_models
from tests.workers.ending import end_here

from .tiny_checkpoint import hf_logprobs, make_checkpoint

pytestmark = pytest.mark.engine

MIB = 1 << 20
Lane = Callable[..., Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tied"), tied=True)


@pytest.fixture(scope="module")
def lane() -> Iterator[Lane]:
    """Runs calls on one dedicated thread that is not the main one, as the host's compute lane does."""
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="compute") as pool:
        yield lambda function, *args: pool.submit(function, *args).result()


@pytest.fixture(scope="module")
def replica(folder: Path, lane: Lane) -> Iterator[VllmReplica]:
    replica = VllmReplica(ReplicaConfig(str(folder), dtype="float32", kv_cache_bytes=256 * MIB, max_num_seqs=32))
    built = lane(replica.build)
    assert built["device"] == "cpu"
    assert built["dtype"] == "float32"
    assert built["pids"] == [built["pid"]]
    assert built["kv_cache_bytes"] == 256 * MIB
    assert built["max_model_len"] == 512
    assert replica.memory()["kv_cache"] < 64 * MIB, "its pages come as they are used"
    yield replica
    lane(end_here, replica)


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> CallContext:
    """The context of the call in progress."""
    context = CallContext()
    monkeypatch.setattr(dispatch_context, "_current", context)
    return context


def job(prompts: list[Any], n: int = 1, seed: int = 7, shared: bool = False, **sampling: Any) -> GenerateJob:
    """Seeds depend on (prompt, sample) alone, as the driver's do."""
    seeds = np.array([[seed * 1_000_003 + p * 1009 + s for s in range(n)] for p in range(len(prompts))], dtype=np.int64)
    return GenerateJob(prompts, n, {"max_tokens": 12, **sampling}, seeds.reshape(len(prompts), n), shared)


def rows(arrays: GeneratedArrays) -> dict[tuple[int, int], list[int]]:
    """Token ids by (prompt, sample)."""
    return {
        (int(p), int(s)): arrays.token_ids[arrays.offsets[i] : arrays.offsets[i + 1]].tolist()
        for i, (p, s) in enumerate(arrays.keys)
    }


def sequences(arrays: GeneratedArrays) -> list[list[int]]:
    return [arrays.prompt_token_ids[p] + tokens for (p, _), tokens in rows(arrays).items()]


def test_text_chat_and_token_ids_are_served_in_one_job(replica: VllmReplica, lane: Lane) -> None:
    chat = [{"role": "user", "content": "hi"}]
    arrays = lane(replica.generate, job(["hello", chat, [5, 6, 7]], n=2))
    assert sorted(rows(arrays)) == [(p, s) for p in range(3) for s in range(2)]
    tokenizer = replica._tokenizer
    assert arrays.prompt_token_ids[0] == tokenizer("hello")["input_ids"]
    assert tokenizer.decode(arrays.prompt_token_ids[1]).endswith("<|im_start|>assistant\n")
    assert arrays.prompt_token_ids[2] == [5, 6, 7]
    assert arrays.token_ids.dtype == np.int32
    assert arrays.logprobs.dtype == np.float32
    assert len(arrays.texts) == 6
    assert len(arrays.logprobs) == arrays.offsets[-1] == len(arrays.token_ids)
    for text, tokens in zip(arrays.texts, rows(arrays).values(), strict=True):
        assert text == tokenizer.decode(tokens, skip_special_tokens=True)


def test_sampler_and_prompt_logprobs_equal_the_hf_model(replica: VllmReplica, lane: Lane, folder: Path) -> None:
    arrays = lane(replica.generate, job([[1, 2, 3], [9] * 40, list(range(150))], n=3))
    scored = lane(replica.prompt_logprobs, sequences(arrays))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for i, sequence in enumerate(sequences(arrays)):
        reference = hf_logprobs(model, sequence)
        drawn = arrays.logprobs[arrays.offsets[i] : arrays.offsets[i + 1]]
        np.testing.assert_allclose(scored[i], reference, atol=1e-4)
        np.testing.assert_allclose(drawn, reference[-len(drawn) :], atol=1e-4)


def test_logprobs_belong_to_the_distribution_that_was_sampled(replica: VllmReplica, lane: Lane, folder: Path) -> None:
    arrays = lane(replica.generate, job([[1, 2, 3]], n=4, temperature=0.5))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for i, sequence in enumerate(sequences(arrays)):
        drawn = arrays.logprobs[arrays.offsets[i] : arrays.offsets[i + 1]]
        np.testing.assert_allclose(drawn, hf_logprobs(model, sequence, temperature=0.5)[-len(drawn) :], atol=1e-4)
    single = lane(replica.generate, job([[1, 2, 3]], top_k=1))
    np.testing.assert_allclose(single.logprobs, 0.0, atol=1e-6)  # one token is left, so its probability is 1


def test_a_first_token_has_a_temperature_of_its_own_and_the_rest_follows_on_it(
    replica: VllmReplica, lane: Lane, folder: Path
) -> None:
    """FIRE sampling, against transformers: the log-prob of each token at the temperature it was drawn at."""
    hot = {"temperature": 0.5, "first_token_temperature": 8.0, "ignore_eos": True}
    drawn = lane(replica.generate, job([[1, 2, 3], [60] * 30], n=4, **hot))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for i, sequence in enumerate(sequences(drawn)):
        found = drawn.logprobs[drawn.offsets[i] : drawn.offsets[i + 1]]
        first, rest = (hf_logprobs(model, sequence, temperature=t)[-len(found) :] for t in (8.0, 0.5))
        np.testing.assert_allclose(found, [first[0], *rest[1:]], atol=1e-4)
        assert len(found) == 12
    assert len({tokens[0] for tokens in rows(drawn).values()}) > 4, "first tokens of eight samples, almost at random"
    fewer = lane(replica.generate, job([[1, 2, 3]], n=2, **hot))
    assert rows(fewer) == {key: rows(drawn)[key] for key in [(0, 0), (0, 1)]}, "a sample depends on its seed alone"
    single = lane(replica.generate, job([[1, 2, 3]], n=4, max_tokens=1, **hot))
    assert [len(tokens) for tokens in rows(single).values()] == [1] * 4
    only = lane(replica.generate, job([[1, 2, 3]], stop_token_ids=[65], allowed_token_ids=[65], **hot))
    assert (rows(only), FINISH_REASONS[only.finish[0]]) == ({(0, 0): [65]}, "stop")
    full = lane(replica.generate, job([[5] * 510, [5] * 511], max_tokens=None, **hot))
    assert [len(tokens) for tokens in rows(full).values()] == [2, 1]


def test_a_sequence_that_fills_the_model_can_be_scored(replica: VllmReplica, lane: Lane, folder: Path) -> None:
    sequence = [(7 * i) % 250 for i in range(512)]
    (scored,) = lane(replica.prompt_logprobs, [sequence])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    np.testing.assert_allclose(scored, hf_logprobs(model, sequence), atol=1e-4)


def test_a_sample_depends_on_its_seed_alone(replica: VllmReplica, lane: Lane) -> None:
    prompts = [[3, 4, 5], [60, 61], [7] * 20]
    all_three = rows(lane(replica.generate, job(prompts, n=4)))
    assert len({tuple(tokens) for tokens in all_three.values()}) == 12
    fewer = rows(lane(replica.generate, job(prompts, n=2)))
    assert fewer == {key: all_three[key] for key in fewer}
    whole = job(prompts, n=4)
    turned = GenerateJob(prompts[::-1], 4, whole.sampling, whole.seeds[::-1].copy())
    assert {(2 - p, s): t for (p, s), t in rows(lane(replica.generate, turned)).items()} == all_three


def test_sampling_options_act(replica: VllmReplica, lane: Lane) -> None:
    free = rows(lane(replica.generate, job([[1, 2]], n=2, ignore_eos=True, max_tokens=30)))
    assert [len(tokens) for tokens in free.values()] == [30, 30]
    greedy = rows(lane(replica.generate, job([[1, 2]], n=2, temperature=0.0)))
    assert greedy[0, 0] == greedy[0, 1]
    wanted = greedy[0, 0][3]
    stopped = lane(replica.generate, job([[1, 2]], temperature=0.0, stop_token_ids=[wanted]))
    assert rows(stopped)[0, 0] == greedy[0, 0][: greedy[0, 0].index(wanted) + 1]
    assert FINISH_REASONS[stopped.finish[0]] == "stop"
    banned = rows(lane(replica.generate, job([[1, 2]], temperature=0.0, logit_bias={greedy[0, 0][0]: -100})))
    assert banned[0, 0][0] != greedy[0, 0][0]


def test_a_chat_names_tools_and_takes_options_of_its_template(replica: VllmReplica, lane: Lane) -> None:
    chat = {"tools": [{"type": "function", "function": {"name": "look"}}], "enable_thinking": False}
    asked = replace(job([[{"role": "user", "content": "hi"}]]), chat=chat)
    text = replica._tokenizer.decode(lane(replica.generate, asked).prompt_token_ids[0])
    assert text.startswith("<|im_start|>system\n[{") and '"look"' in text
    assert text.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think></think>")
    with pytest.raises(DataError, match="does not read mood"):
        lane(replica.generate, replace(asked, chat={"mood": "good"}))


def test_a_stop_string_ends_the_sample_and_is_not_in_its_text(replica: VllmReplica, lane: Lane) -> None:
    biased = {replica._tokenizer("a")["input_ids"][0]: 100, replica._tokenizer("b")["input_ids"][0]: 98}
    arrays = lane(replica.generate, job(["x"], n=3, logit_bias=biased, stop=["ab"], max_tokens=200))
    for text, finish in zip(arrays.texts, arrays.finish, strict=True):
        assert FINISH_REASONS[finish] == "stop"
        assert "ab" not in text
    assert all(replica._tokenizer.decode(tokens).endswith("ab") for tokens in rows(arrays).values())


def test_log_probs_that_a_client_did_not_ask_for_are_not_decoded(replica: VllmReplica, lane: Lane) -> None:
    """vLLM gives the same tokens, texts and log-probs; only the texts of those log-probs are missing."""
    from vllm import SamplingParams
    from vllm.inputs.engine import tokens_input
    from vllm.sampling_params import RequestOutputKind

    outputs: dict[str, Any] = {}

    def ask(name: str, by_id: bool) -> None:
        params = SamplingParams(n=2, max_tokens=6, seed=3, logprobs=0, output_kind=RequestOutputKind.FINAL_ONLY)
        told = lambda output: outputs.setdefault(name, []).append(output)  # noqa: E731
        replica.guests.add(Guest(name, tokens_input([1, 2, 3]), params, None, told, logprobs_by_id=by_id))

    def serve() -> None:
        with replica.requests(admit=replica.adapter) as requests:
            while requests.busy:
                assert not list(requests.step())

    ask("asked", by_id=False)
    ask("unasked", by_id=True)
    lane(serve)
    asked, unasked = (outputs[name][-1].outputs for name in ("asked", "unasked"))
    for one, other in zip(asked, unasked, strict=True):
        assert list(one.token_ids) == list(other.token_ids) and one.text == other.text != ""
        for token, with_text, without in zip(one.token_ids, one.logprobs, other.logprobs, strict=True):
            assert with_text[token].logprob == pytest.approx(without[token].logprob, abs=1e-5)
            assert with_text[token].decoded_token is not None and without[token].decoded_token is None


def test_requests_of_clients_outlive_weights_that_did_not_come_and_are_computed_anew(
    replica: VllmReplica, lane: Lane
) -> None:
    """Where calls go on across a sync and that tears the replica, a reload is the way out, with them in the engine."""
    from vllm import SamplingParams
    from vllm.inputs.engine import tokens_input
    from vllm.sampling_params import RequestOutputKind

    outputs: list[Any] = []
    params = SamplingParams(max_tokens=40, seed=3, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY)

    def step(until: Callable[[], bool]) -> None:
        with replica.requests(admit=replica.adapter) as requests:
            while not until():
                assert not list(requests.step())

    replica.guests.add(Guest("open", tokens_input([1, 2, 3]), params, None, outputs.append))
    lane(step, lambda: replica.guests.inside == 1)
    replica.state.weights = "torn"
    lane(replica.reload)
    assert replica.status()["weights"] == "cuda" and replica.guests.inside == 1
    lane(step, lambda: bool(outputs))
    assert len(outputs[-1].outputs[0].token_ids) == 40 and not replica.guests.inside


def test_stopping_keeps_every_token_drawn_and_leaves_the_engine_usable(
    replica: VllmReplica, lane: Lane, called: CallContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    reports: list[dict[str, Any]] = []
    drawn: list[int] = []
    processor = replica.built.output_processor
    process = processor.process_outputs

    def counting(outputs: list[Any], **options: Any) -> Any:
        drawn.extend(len(output.new_token_ids) for output in outputs)
        return process(outputs, **options)

    monkeypatch.setattr(processor, "process_outputs", counting)

    def watch() -> None:
        while not called.progress.get("tokens"):
            pass
        reports.append(called.progress)
        called.request_stop()

    watcher = threading.Thread(target=watch)
    watcher.start()
    arrays = lane(replica.generate, job([[i, 2] for i in range(64)], ignore_eos=True, max_tokens=500))
    watcher.join()
    lengths = np.diff(arrays.offsets)
    aborted = arrays.finish == FINISH_REASONS.index("abort")
    assert aborted.any()
    assert (lengths > 0).all()
    assert (lengths[aborted] < 500).all()
    assert len(arrays.token_ids) == len(arrays.logprobs) == sum(drawn)
    assert len(arrays.texts) == len(arrays.keys) < 64  # only 32 run at a time: the rest was not started
    assert reports[0]["total"] == 64
    assert reports[0]["running"] > 0
    assert replica.status()["running"] == 0
    assert not replica.built.has_unfinished_requests()
    called._stop = False
    assert len(lane(replica.generate, job([[1, 2]])).keys) == 1


def test_a_model_of_text_refuses_images_before_it_samples(replica: VllmReplica, lane: Lane) -> None:
    image = EncodedImage.from_any(np.zeros((4, 4, 3), np.uint8))
    with pytest.raises(DataError, match=r"prompt 1 has 1 image, but Qwen2ForCausalLM .* takes text alone"):
        lane(replica.generate, replace(job(["a", "b"]), media=((), (image,))))
    assert replica.status()["running"] == 0 and lane(replica.generate, job(["a"])).texts


def test_a_shared_job_serves_what_was_claimed(replica: VllmReplica, lane: Lane, called: CallContext) -> None:
    left = list(range(0, 40, 2))  # the odd prompts went to another replica

    def claim(count: int) -> list[int]:
        taken, left[:] = left[:count], left[count:]
        return taken

    called.claimer = claim
    prompts = [[i + 1, 2, 3] for i in range(40)]
    arrays = lane(replica.generate, job(prompts, n=3, shared=True))
    assert sorted(rows(arrays)) == [(p, s) for p in range(0, 40, 2) for s in range(3)]
    assert sorted(arrays.prompt_token_ids) == list(range(0, 40, 2))
    called.claimer = None
    alone = rows(lane(replica.generate, job(prompts, n=3)))
    assert rows(arrays) == {key: alone[key] for key in rows(arrays)}


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (job([[1], []]), ["prompt 1", "empty"]),
        (job([[1], ""]), ["prompt 1", "empty"]),
        (job([[1], [2] * 512]), ["prompt 1", "512 tokens", "max_model_len"]),
        (job([[1, 100_000]]), ["prompt 0", "100000", "vocabulary"]),
        (job([[1]], max_tokens=0), ["max_tokens"]),
        (job([[1]], temprature=0.5), ["temprature", "temperature"]),
        (job([[1]], top_p=7.0), ["top_p"]),
        (job([[1]], allowed_token_ids=[100_000]), ["allowed_token_ids"]),
        (job([[1]], first_token_temperature=0), ["first_token_temperature", "above 0"]),
        (job([[1]], first_token_temperature=9, stop=["x"]), ["first_token_temperature", "stop"]),
        (GenerateJob([[1]], 1, {"seed": 3}, np.zeros((1, 1), np.int64)), ["seed"]),
    ],
    ids=lambda value: None if isinstance(value, list) else "job",
)
def test_bad_input_is_refused_in_one_sentence(
    replica: VllmReplica, lane: Lane, bad: GenerateJob, words: list[str]
) -> None:
    with pytest.raises(DataError) as caught:
        lane(replica.generate, bad)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert not replica.built.has_unfinished_requests()
    assert len(lane(replica.generate, job([[1, 2]])).keys) == 1


def test_releasing_the_kv_cache_gives_memory_back(replica: VllmReplica, lane: Lane) -> None:
    lane(replica.to_state, "cuda", None)
    asked = job([[1, 2, 3], [4] * 130], n=2, max_tokens=20)
    before = rows(lane(replica.generate, asked))
    resident = replica.memory()
    moved = lane(replica.to_state, "cpu", ["kv_cache"])
    assert moved["kv_cache"] == "meta"
    assert moved["weights"] == "cuda"
    assert moved["memory"]["kv_cache"] == 0
    assert moved["memory"]["weights"] == resident["weights"]
    assert moved["freed_bytes"] >= 0.9 * resident["kv_cache"] > 0
    with pytest.raises(StateError, match=r"cuda\('kv_cache'\)"):
        lane(replica.generate, asked)
    lane(replica.to_state, "cuda", ["kv_cache"])
    assert rows(lane(replica.generate, asked)) == before
    assert 0 < replica.memory()["kv_cache"] <= 256 * MIB


def test_discarded_weights_are_gone_and_refused_until_they_are_back(replica: VllmReplica, lane: Lane) -> None:
    sequence = [list(range(60))]
    scored = lane(replica.prompt_logprobs, sequence)[0]
    held = replica.memory()["weights"]
    moved = lane(replica.to_state, "meta", None)
    assert held > 0
    assert moved["memory"]["weights"] == 0
    assert replica.status()["weights"] == "meta"
    with pytest.raises(StateError, match=r"cuda\(\)"):
        lane(replica.prompt_logprobs, sequence)
    lane(replica.to_state, "cuda", ["weights"])
    assert replica.status()["weights"] == "empty"
    lane(replica.to_state, "cuda", ["kv_cache"])
    with pytest.raises(StateError, match=r"reload\(\)"):
        lane(replica.generate, job([[1]]))
    assert lane(replica.reload)["reloaded_from"] == replica.config.path
    np.testing.assert_array_equal(lane(replica.prompt_logprobs, sequence)[0], scored)
    assert replica.memory()["weights"] == held


def test_plain_cuda_after_meta_reloads_and_says_so(replica: VllmReplica, lane: Lane) -> None:
    sequence = [list(range(60))]
    scored = lane(replica.prompt_logprobs, sequence)[0]
    lane(replica.to_state, "meta", None)
    moved = lane(replica.to_state, "cuda", None)
    assert moved["reloaded_from"] == replica.config.path
    assert moved["version"] == 0
    np.testing.assert_array_equal(lane(replica.prompt_logprobs, sequence)[0], scored)
    assert lane(replica.to_state, "cuda", None)["reloaded_from"] is None


def test_an_unknown_state_or_tag_names_the_right_one(replica: VllmReplica, lane: Lane) -> None:
    with pytest.raises(StateError, match="kv_cache"):
        lane(replica.to_state, "cuda", ["kv_cahe"])
    with pytest.raises(StateError, match="meta"):
        lane(replica.to_state, "met", None)


def test_the_first_replica_of_an_architecture_imports_vllm_once(
    replica: VllmReplica, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM keeps notes of classes on disk; where there are none, it would look at a class in another process."""
    from vllm.model_executor.models import registry

    monkeypatch.setattr(registry.subprocess, "run", lambda *_, **__: pytest.fail("a process was started"))
    monkeypatch.setattr(registry._LazyRegisteredModel, "_get_cache_dir", lambda *_: tmp_path)
    facts = registry.ModelRegistry.models["GPT2LMHeadModel"].inspect_model_cls()
    assert facts.architecture == "GPT2LMHeadModel" and list(tmp_path.glob("*gpt2*")), "there were no notes"


def test_a_class_that_cannot_be_imported_fails_the_build_and_says_which(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("class Mine: ...")
    (tmp_path / "leaving.py").write_text("raise SystemExit(2)")
    for place, said in [("leaving.py", "SystemExit"), ("absent.py", "absent"), ("json.py", "rename it")]:
        with pytest.raises(BuildError, match=f"{place}:Mine.*{said}"):
            register_models({"Mine": f"{tmp_path / place}:Mine"})
    with pytest.raises(BuildError, match="AttributeError"):
        register_models({"Mine": "json:Mine"})
