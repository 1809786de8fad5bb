"""A training rank's life: agreement on calls, states and their memory, the user's methods, staging, what is
refused."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from transformers import Qwen2Config, Qwen2ForCausalLM

import rlbench.nn
from rlbench.errors import BuildError, EngineError, MethodError, StateError, Stopped, WeightSyncError
from rlbench.trainers.models.policy_spec import PolicySpec
from rlbench.weights.manifest import Handover
from rlbench.workers.train.group import RankGroup
from tests.clock import LIMIT_S
from tests.modules import RAGGED, TrainedQwen, batch_of, qwen_on_meta, save_qwen
from tests.ranks import RankFailure, ranks
from tests.weights import read_manifest

pytestmark = pytest.mark.slow

IDS = [[1, 2, 3, 4, 5]]


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Qwen2 of 42 MB, whose memory shows in the process."""
    path = tmp_path_factory.mktemp("large")
    config = Qwen2Config(
        vocab_size=8192,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        tie_word_embeddings=True,
    )
    Qwen2ForCausalLM(config).save_pretrained(path)
    return str(path)


# -- one order of calls --------------------------------------------------------------------------------------


def groups() -> list[RankGroup]:
    """Two ranks' connections to one store in this process, without a process group."""
    found = [RankGroup(rank, 2, "127.0.0.1", 30.0) for rank in range(2)]
    address = found[0].serve()
    assert address is not None
    for group in found:
        client = dist.TCPStore(*address, 2, is_master=False, wait_for_workers=False)
        group._marks = dist.PrefixStore("calls", client)
    return found


def registered(
    found: list[RankGroup], seq: int, timeouts: list[float], delay: float, given_up: Callable[[], bool] = lambda: False
) -> list[bool]:
    answers: list[bool | None] = [None, None]

    def ask(rank: int) -> None:
        answers[rank] = found[rank].register(3, seq, timeouts[rank], given_up)

    first, second = threading.Thread(target=ask, args=(0,)), threading.Timer(delay, ask, args=(1,))
    first.start(), second.start()
    first.join(), second.join()
    assert None not in answers
    return [bool(answer) for answer in answers]


def test_a_call_that_all_ranks_have_runs_on_all() -> None:
    found = groups()
    assert registered(found, 1, [5.0, 5.0], 0.05) == [True, True]
    assert registered(found, 2, [5.0, 5.0], 0.05) == [True, True]


def test_a_call_that_came_too_late_on_one_rank_is_dropped_by_all() -> None:
    assert registered(groups(), 1, [0.2, 5.0], 0.6) == [False, False]


def test_a_call_that_nobody_wants_any_more_is_dropped_by_all_long_before_its_time() -> None:
    """A rank that died says nothing any more: its peers waited for their whole minute."""
    found = groups()
    agreed: list[bool] = []
    waiting = threading.Thread(target=lambda: agreed.append(found[0].register(3, 1, 10 * LIMIT_S, lambda: True)))
    waiting.start()
    waiting.join(LIMIT_S)
    assert agreed == [False]
    assert not found[1].register(3, 1, 10 * LIMIT_S, lambda: False), "whoever comes later"
    assert registered(found, 2, [5.0, 5.0], 0.0, lambda: True) == [True, True], "what all have runs"


def test_the_store_listens_on_the_loopback_alone() -> None:
    group = RankGroup(0, 1, "127.0.0.1", 10.0)
    address = group.serve()
    assert address is not None
    with socket.create_connection(address, timeout=2):
        pass
    with pytest.raises(OSError), socket.create_connection(("127.0.0.2", address[1]), timeout=2):
        pass


def test_a_rank_that_failed_in_the_call_before_is_known_to_all_at_the_next_call_that_runs() -> None:
    found = groups()
    assert registered(found, 1, [5.0, 5.0], 0.0) == [True, True]
    found[1].failed = True
    assert registered(found, 2, [0.2, 5.0], 0.6) == [False, False]
    assert registered(found, 3, [5.0, 5.0], 0.0) == [True, True]
    assert [group.take_failure() for group in found] == [True, True]
    assert registered(found, 4, [5.0, 5.0], 0.0) == [True, True]
    assert not any(group.take_failure() or group.failed for group in found)


# -- the user's code -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("through", ["a cell", "a method"])
def test_layers_that_stay_gathered_do_not_outlive_a_failure_of_another_rank(qwen: str, through: str) -> None:
    """Who holds them gathers nothing in the next forward, where the rank that failed waits to gather with it."""

    def numbers(failing: int = -1) -> float:
        found = module(torch.arange(6)[None]).logits.double().sum()  # type: ignore[name-defined]
        if rank == failing:  # type: ignore[name-defined]
            raise ValueError("mine alone")
        return float(found)

    with ranks(2, qwen_on_meta(qwen), reshard_after_forward=False) as engine:
        expected = engine.run(numbers)
        if through == "a cell":
            found = engine.outcomes("run", [(cloudpickle.dumps(numbers), (1,), {})] * 2)
        else:
            engine.run(numbers)
            found = engine.outcomes("call_method", [("fails_on", (1,), {})] * 2)
        assert [isinstance(one, RankFailure) for one in found] == [False, True]
        assert engine.call("register", 1, 1, 20.0, bool) == [True, True]  # `bool()`: nobody gives it up
        assert engine.run(numbers) == expected


def test_methods_run_on_every_rank_and_know_where_they_are(qwen: str) -> None:
    with ranks(2, qwen_on_meta(qwen)) as engine:
        assert engine.method("where") == [(0, 2, "cpu"), (1, 2, "cpu")]
        assert engine.method("train") == [None, None]  # not the module itself, which cannot travel
        assert engine.run(lambda: module.training) == [True, True]  # type: ignore[name-defined]


def test_only_the_users_methods_can_be_called(qwen: str) -> None:
    with ranks(1, qwen_on_meta(qwen)) as engine:
        for name, said in [
            ("trainstep", "nearest: train_step"),
            ("forward", "no method"),
            ("parameters", "no method"),
        ]:
            with pytest.raises(MethodError, match=said):
                engine.method(name)


def test_forward_instead_of_a_call_says_what_to_write(qwen: str) -> None:
    with ranks(2, qwen_on_meta(qwen)) as engine:
        with pytest.raises(EngineError, match=r"call self\(\.\.\.\)"):
            engine.method("through_forward", IDS)
        assert engine.method("train_step", IDS)[0] > 0


def test_an_exception_in_a_method_of_one_rank_leaves_the_others_usable(qwen: str) -> None:
    with ranks(2, qwen_on_meta(qwen)) as engine:
        args = [("fails_on", (1,), {})] * 2
        good, bad = engine.outcomes("call_method", args)
        assert good == 0
        assert isinstance(bad, RankFailure)
        assert isinstance(bad.error, ValueError)
        assert len(engine.method("train_step", IDS)) == 2


def test_run_has_a_namespace_that_stays(qwen: str) -> None:
    def remember() -> None:
        global note
        note = rank * 10  # type: ignore[name-defined]

    with ranks(2, qwen_on_meta(qwen)) as engine:
        engine.run(remember)
        assert engine.run(lambda: (note, world_size, strategy.is_rank_0())) == [(0, 2, True), (10, 2, False)]  # type: ignore[name-defined]  # noqa: F821
        assert engine.run("import math\nnote += 1\nmath.floor(note + 0.5)") == [1, 11]
        assert engine.run("x = 1") == [None, None]


def test_a_learning_rate_change_takes_effect(qwen: str) -> None:
    def moved(lr: float) -> float:
        with ranks(1, qwen_on_meta(qwen)) as engine:
            before = engine.run(lambda: module.lm_head.weight.full_tensor().clone())[0]  # type: ignore[name-defined]
            engine.call("set_lr", lr)
            engine.method("train_step", IDS)
            engine.method("optimizer_step")
            after = engine.run(lambda: module.lm_head.weight.full_tensor().clone())[0]  # type: ignore[name-defined]
            return float((after - before).detach().abs().max())

    assert moved(0.0) == 0.0
    assert moved(1e-3) == pytest.approx(1e-3, rel=1e-2)  # Adam's first step
    with ranks(1, qwen_on_meta(qwen)) as engine, pytest.raises(EngineError, match="learning rate"):
        engine.call("set_lr", -1.0)


# -- building ------------------------------------------------------------------------------------------------


def test_a_second_build_and_a_call_before_the_first_are_refused(qwen: str) -> None:
    with ranks(1) as engine:
        with pytest.raises(StateError, match="build"):
            engine.method("where")
        engine.build(qwen_on_meta(qwen))
        with pytest.raises(BuildError, match="built already"):
            engine.build(qwen_on_meta(qwen))


def test_a_module_that_is_not_of_our_bases_is_refused(qwen: str) -> None:
    with rlbench.nn.device("meta"):
        plain = Qwen2ForCausalLM(Qwen2Config.from_pretrained(qwen))
    with (
        ranks(1) as engine,
        pytest.raises(BuildError, match=r"class Mine\(rlbench\.nn\.HuggingFaceFsdp2TrainModule"),
    ):
        engine.build(plain)


@pytest.mark.parametrize("kind", [FileNotFoundError, SystemExit])
def test_a_hook_that_fails_on_one_rank_fails_the_build_on_all(qwen: str, kind: type[BaseException]) -> None:
    class Failing(TrainedQwen):
        def on_weights_materialized(self) -> None:
            if self.rank == 1:
                raise kind("my processor")

    with ranks(2) as engine:
        master = engine.outcomes("rendezvous")[0]
        first, second = engine.outcomes("build", [(cloudpickle.dumps(qwen_on_meta(qwen, Failing)), master)] * 2)
    assert isinstance(first.error, EngineError)
    assert "rank 1" in str(first.error)
    assert type(second.error).__name__ == kind.__name__


@pytest.mark.parametrize("trainable", [True, False])
def test_a_policy_is_made_from_a_path_alone(qwen: str, trainable: bool) -> None:
    spec = PolicySpec(qwen, trainable=trainable, lr=3e-3, max_norm=0.5, weight_decay=0.1)
    with ranks(2) as engine:
        info = engine.build(spec)[0]
        assert info["optimizer"] == (["AdamW"] if trainable else [])
        assert info["trainable"] == (info["parameters"] if trainable else 0)
        assert [m["name"] for m in info["methods"]] == ["train", "eval"]
        assert engine.call("module_source_path")[0] == qwen
        assert len(engine.call("policy_forward", batch_of(RAGGED), {})) == 2
        if trainable:
            assert engine.run(lambda: (strategy.max_norm, module.optimizer.defaults["lr"]))[0] == (0.5, 3e-3)  # type: ignore[name-defined]
        else:
            with pytest.raises(EngineError, match="0 optimizers"):
                engine.call("policy_optim_step", {})


def test_a_policy_path_that_is_no_model_is_one_sentence(tmp_path: Path) -> None:
    for path, said in [
        ("/no/such/model", "no model at"),
        (str(tmp_path), "neither a folder with a config.json"),
    ]:
        with ranks(1) as engine, pytest.raises(BuildError, match=said):
            engine.build(PolicySpec(path))


# -- states --------------------------------------------------------------------------------------------------


def test_meta_gives_the_memory_back_and_cuda_reads_the_weights_again(large: str) -> None:
    with ranks(1, qwen_on_meta(large)) as engine:
        first = engine.call("state_checksum")
        engine.method("train_step", IDS)
        engine.method("optimizer_step")
        held = engine.call("memory")[0]
        assert held["optimizer"] == pytest.approx(2 * held["weights"], rel=0.01)
        assert engine.call("state_checksum") != first
        before = held["rss"]
        released = engine.call("to_state", "meta", None)[0]
        assert (released["weights"], released["optimizer"]) == ("meta", "meta")
        assert released["freed"] == pytest.approx(3 * held["weights"], rel=0.01)
        assert before - released["rss"] > 2.5 * held["weights"]  # the process is smaller by it
        assert any("trained weights" in lost for lost in released["lost"])
        assert engine.call("memory")[0]["weights"] == 0
        back = engine.call("to_state", "cuda", None)[0]
        assert back["materialized_from"] == large
        assert engine.call("state_checksum") == first
        engine.method("train_step", IDS)
        assert engine.method("optimizer_step")[0]["stepped"]


@pytest.mark.parametrize("state", ["cpu", "meta"])
def test_what_a_state_forbids_is_refused_naming_the_mend(qwen: str, state: str) -> None:
    with ranks(2, qwen_on_meta(qwen)) as engine:
        engine.call("to_state", state, ["weights"])
        assert engine.call("status")[0]["weights"] == state
        for verb, args in [
            ("call_method", ("where", (), {})),
            ("policy_forward", (batch_of(RAGGED), {})),
            ("policy_optim_step", ({},)),
            ("stage_weights", ({"transport": "shm", "prefix": "rlb-test-state"},)),
            ("state_checksum", ()),
        ]:
            with pytest.raises(StateError, match=r"cuda\('weights'\)"):
                engine.call(verb, *args)
        engine.call("to_state", "cuda", "weights")
        assert engine.method("where")[1] == (1, 2, "cpu")


def test_offloaded_optimizer_state_comes_back_and_bars_the_step_until_then(qwen: str) -> None:
    with ranks(1, qwen_on_meta(qwen)) as engine:
        engine.call("policy_forward_backward", batch_of(RAGGED), cloudpickle.dumps("grpo"), {})
        engine.call("to_state", "cpu", "optimizer")
        with pytest.raises(StateError, match=r"cuda\('optimizer'\)"):
            engine.call("policy_optim_step", {})
        engine.call("to_state", "cuda", None)
        assert engine.call("policy_optim_step", {})[0]["stepped"]


def test_weights_somebody_made_a_numpy_view_of_are_released_all_the_same(large: str) -> None:
    def look() -> None:
        module.keep = module.lm_head.weight.to_local().detach().numpy()  # type: ignore[name-defined]
        del module.keep  # type: ignore[name-defined]

    with ranks(1, qwen_on_meta(large)) as engine:
        before = engine.call("state_checksum")
        engine.run(look)
        engine.call("to_state", "meta", None)
        assert engine.call("memory")[0]["weights"] == 0
        engine.call("to_state", "cuda", None)
        assert engine.call("state_checksum") == before
        assert engine.method("train_step", IDS)[0] > 0


def test_unknown_states_and_tags_are_refused(qwen: str) -> None:
    with ranks(1, qwen_on_meta(qwen)) as engine:
        with pytest.raises(EngineError, match="nearest: weights"):
            engine.call("to_state", "cpu", "weight")
        with pytest.raises(EngineError, match="unknown state"):
            engine.call("to_state", "gpu", None)
        engine.call("to_state", "meta", None)
        with pytest.raises(StateError, match="nothing to keep"):
            engine.call("to_state", "cpu", None)


# -- staging -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
def test_staged_weights_are_what_a_checkpoint_of_the_module_holds(tmp_path: Path, tied: bool) -> None:
    path = save_qwen(tmp_path, tied=tied)
    expected = {n: p.detach() for n, p in Qwen2ForCausalLM.from_pretrained(path).named_parameters()}
    with ranks(2, qwen_on_meta(path)) as engine:
        transport = {"transport": "shm", "prefix": f"rlb-test-stage-{os.getpid()}", "bucket_bytes": 1 << 14}
        for _ in range(2):  # the buffers are reused
            manifest, other = engine.call("stage_weights", transport)
            assert other is None
            assert len(manifest.buckets) > 1
            sent = {name: tensor.clone() for name, tensor in read_manifest(manifest)}
            assert set(sent) == set(expected)
            assert all(torch.equal(sent[name], tensor) for name, tensor in expected.items())
        held = [Path(bucket.path) for bucket in manifest.buckets]
        assert all(file.exists() for file in held)
    assert not any(file.exists() for file in held)  # close() leaves nothing behind


def test_a_broadcast_is_announced_without_gathering_a_weight(qwen: str) -> None:
    """A broadcast gathered everything twice: once to say what would come."""

    options = {"to": "replicas", "sender": 0, "host": "127.0.0.1", "world_size": 2, "backend": "gloo", "held": ""}
    options["handover"] = Handover("replicas", held="", token="first")
    transport = {"transport": "shm", "prefix": f"rlb-test-announce-{os.getpid()}"}
    with ranks(2, qwen_on_meta(qwen)) as engine:
        counts = [engine.call("issued_collectives")[0]]
        announced, other = engine.call("announce_weights", options)
        counts.append(engine.call("issued_collectives")[0])
        staged = engine.call("stage_weights", transport)[0]
        counts.append(engine.call("issued_collectives")[0])
        weights = [entry.name for bucket in staged.buckets for entry in bucket.entries]
        assert [entry.name for bucket in announced.buckets for entry in bucket.entries] == weights and other is None
        assert counts[1] - counts[0] < len(weights) <= counts[2] - counts[1]


@pytest.mark.parametrize("kind", [KeyError, SystemExit])
def test_a_stop_and_a_failing_hook_end_staging_on_all_ranks(qwen: str, kind: type[BaseException]) -> None:
    class FailingHook(TrainedQwen):
        def postprocess_output_named_parameters(self, name: str, param: Any, full_state_dict: Any) -> Any:
            full = param.full_tensor()
            if self.rank == 1 and "layers.1" in name:
                raise kind("lora")
            return name, full

    transport = {"transport": "shm", "prefix": f"rlb-test-stop-{os.getpid()}"}
    with ranks(2, qwen_on_meta(qwen)) as engine:
        for outcome in engine.outcomes("stage_weights", [(transport,)] * 2, stopping=(1,)):
            assert isinstance(outcome.error, Stopped)
        assert engine.call("stage_weights", transport)[0] is not None
    with ranks(2, qwen_on_meta(qwen, FailingHook)) as engine:
        first, second = engine.outcomes("stage_weights", [(transport,)] * 2)
        assert "rank 1" in str(first.error)
        assert type(second.error).__name__ == kind.__name__
        assert engine.method("where")[0] == (0, 2, "cpu")


def test_a_name_sent_twice_fails_on_all_ranks(qwen: str) -> None:
    class Twice(TrainedQwen):
        def postprocess_output_named_parameters(self, name: str, param: Any, full_state_dict: Any) -> Any:
            return "same", param.full_tensor()

    transport = {"transport": "shm", "prefix": f"rlb-test-twice-{os.getpid()}"}
    with ranks(2, qwen_on_meta(qwen, Twice)) as engine:
        first, second = engine.outcomes("stage_weights", [(transport,)] * 2)
    assert isinstance(first.error, WeightSyncError)
    assert isinstance(second.error, EngineError)
