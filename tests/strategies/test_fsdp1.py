"""Modules that FSDP1 holds, on one rank and two: numbers of one process, and a state that goes to FSDP2 and back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, always_wrap_policy
from transformers import Qwen2ForCausalLM
from transformers.models.qwen2.modeling_qwen2 import Qwen2MLP

import rlbench.nn
from rlbench.errors import BuildError, EngineError, StateError
from rlbench.nn.base import executor_for
from rlbench.strategies.options.config import OptionError
from tests.modules import qwen_on_meta, save_qwen
from tests.ranks import Ranks, ranks
from tests.strategies.surface import assert_close, rows, run_steps, train_by_hand, whole

STEPS = [[rows(4, 0), rows(4, 1)], [rows(4, 2), rows(4, 3)], [rows(4, 4), rows(4, 5)]]


class Loop:
    """What a user writes, whichever FSDP holds the module."""

    def on_weights_materialized(self: Any) -> None:
        self.optimizer = self.strategy.create_optimizer(self, lr=1e-2, weight_decay=0.1)
        self.forwards = 0
        self.register_forward_hook(lambda *_: setattr(self, "forwards", self.forwards + 1))

    def accumulate(self: Any, input_ids: list[list[int]], of: int) -> float:
        own = len(input_ids) // self.world_size
        ids = torch.tensor(input_ids[self.rank * own : (self.rank + 1) * own])
        logits = self(ids).logits[:, :-1]
        loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten()) / of
        loss.backward()
        return float(loss.detach())

    def looked_at(self: Any) -> None:
        with torch.no_grad():
            self(torch.tensor(rows(1, 7)))  # what it gathers must not be used again after the step

    def clipped(self: Any, max_norm: float) -> float:
        self.looked_at()
        norm = float(self.clip_grad_norm_(max_norm))
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm

    def stepped(self: Any, max_norm: float) -> Any:
        self.looked_at()
        return self.strategy.step_now(self.optimizer, self, max_norm=max_norm)["grad_norm"]

    def fails(self: Any, where: str) -> None:
        def fail(*_: Any) -> None:
            raise ValueError("my own mistake")

        part = self.model.layers[1].mlp
        hook = part.register_forward_hook(fail) if where == "forward" else part.register_full_backward_hook(fail)
        try:
            self(torch.tensor(rows(2, 5))).logits.sum().backward()
        finally:
            hook.remove()

    def through_a_part(self: Any) -> None:
        self.model(torch.tensor(rows(2, 5)))

    def between(self: Any, input_ids: list[list[int]]) -> list[bool]:
        """What stands in the place of parameters between a forward and its backward."""
        loss = self(torch.tensor(input_ids)).logits.sum()
        found = [isinstance(parameter, nn.Parameter) for parameter in self.parameters()]
        loss.backward()
        self.zero_grad()
        self(torch.tensor(input_ids))  # whose result nobody uses
        return found


class FlatQwen(Loop, rlbench.nn.HuggingFaceFsdpTrainModule, Qwen2ForCausalLM):
    pass


class ShardedQwen(Loop, rlbench.nn.HuggingFaceFsdp2TrainModule, Qwen2ForCausalLM):
    pass


ACCUMULATING = {"micro_train_batch_size": 2, "train_batch_size": 8}
KINDS: dict[str, Any] = {"fsdp1": FlatQwen, "fsdp2": ShardedQwen}


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_qwen(tmp_path_factory.mktemp("untied"), tied=False)


@pytest.fixture(params=[1, 2], ids=["one-rank", "two-ranks"])
def flat(request: Any, qwen: str) -> Iterator[Ranks]:
    with ranks(request.param, qwen_on_meta(qwen, FlatQwen), executor="fsdp1") as made:
        yield made


def train(engine: Ranks, steps: list[Any] = STEPS, step: str = "stepped", max_norm: float = 0.5) -> list[float]:
    norms = []
    for micro_batches in steps:
        for data in micro_batches:
            engine.method("accumulate", data, len(micro_batches))
        norms.append(engine.method(step, max_norm)[0])
    return norms


def weights(engine: Ranks) -> dict[str, Tensor]:
    found: dict[str, Tensor] = engine.call("whole_state")[0]
    return {name: tensor for name, tensor in found.items() if name != "lm_head.weight"}


# -- a step


@pytest.mark.parametrize("step", ["clipped", "stepped"])
def test_a_users_loop_trains_as_one_plain_process_does(flat: Ranks, qwen: str, step: str) -> None:
    expected = train_by_hand(qwen, STEPS, max_norm=0.5)
    forwards = flat.run(lambda: module.forwards)[0]  # type: ignore[name-defined]
    assert train(flat, step=step) == pytest.approx(expected["norms"], abs=1e-5)
    assert_close(weights(flat), expected["parameters"], atol=1e-5)
    assert flat.run(lambda: module.forwards)[0] == forwards + 9  # type: ignore[name-defined]


def test_a_part_instead_of_the_module_is_explained(qwen: str) -> None:
    with ranks(2, qwen_on_meta(qwen, FlatQwen), executor="fsdp1") as made:
        with pytest.raises(EngineError, match=r"through self\(\.\.\.\)"):
            made.method("through_a_part")
        assert train(made, STEPS[:1]) == pytest.approx(train_by_hand(qwen, STEPS[:1])["norms"], abs=1e-5)


def test_parameters_keep_names_ties_and_decay_and_lie_in_rows_over_the_ranks(flat: Ranks, qwen: str) -> None:
    def look() -> Any:
        named = module.named_parameters(remove_duplicate=False)  # type: ignore[name-defined]
        decays = [(group["weight_decay"], len(group["params"])) for group in module.optimizer.param_groups]  # type: ignore[name-defined]
        return {name: parameter.numel() for name, parameter in named}, decays

    plain = Qwen2ForCausalLM.from_pretrained(qwen)
    found = flat.run(look)
    for name, parameter in plain.named_parameters(remove_duplicate=False):
        assert sum(held[name] for held, _ in found) == parameter.numel(), name
    assert dict(found[0][1]) == dict(train_by_hand(qwen, [])["groups"])
    assert found[0][0].keys() == dict(plain.named_parameters(remove_duplicate=False)).keys()


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_pass_that_ends_early_leaves_nothing_behind(flat: Ranks, qwen: str, where: str) -> None:
    train(flat, STEPS[:1])
    with pytest.raises(ValueError, match="my own mistake"):
        flat.method("fails", where)
    flat.run(lambda: module.zero_grad())  # type: ignore[name-defined]
    assert all(flat.method("between", rows(2, 6))[0])
    train(flat, STEPS[1:])
    assert_close(weights(flat), train_by_hand(qwen, STEPS, max_norm=0.5)["parameters"], atol=1e-5)


def policies(kind: str) -> Any:
    return {"all": always_wrap_policy, "classes": {Qwen2MLP}, "policy": ModuleWrapPolicy({Qwen2MLP})}.get(kind)


@pytest.mark.parametrize("kind", ["all", "classes", "policy"])
def test_a_wrap_policy_of_torchs_says_what_is_a_unit(untied: str, kind: str) -> None:
    class Wrapped(FlatQwen):
        def get_fsdp_wrap_policy(self) -> Any:
            return policies(kind)

    with ranks(2, qwen_on_meta(untied, Wrapped), executor="fsdp1") as made:
        assert train(made, STEPS[:2]) == pytest.approx(train_by_hand(untied, STEPS[:2], 0.5)["norms"], abs=1e-5)


# -- states, and what is kept


class Renamed(FlatQwen):
    def postprocess_output_named_parameters(self, name: str, param: Any, full_state_dict: Any) -> Any:
        if name.endswith("up_proj.weight"):
            gate = full_state_dict[name.replace("up_proj", "gate_proj")].full_tensor()
            return name, param.full_tensor() + gate
        return None if name.endswith("k_proj.bias") else (name, param.full_tensor())


@pytest.mark.parametrize("count", [1, 2])
def test_a_hook_is_given_parameters_that_it_can_gather(qwen: str, tmp_path: Path, count: int) -> None:
    with ranks(count, qwen_on_meta(qwen, Renamed), executor="fsdp1") as made:
        made.call("save_weights", str(tmp_path / "out"), "float32")
    found, plain = (
        load_file(tmp_path / "out" / "model.safetensors"),
        Qwen2ForCausalLM.from_pretrained(qwen).state_dict(),
    )
    name, gate = "model.layers.1.mlp.up_proj.weight", "model.layers.1.mlp.gate_proj.weight"
    assert torch.equal(found[name], plain[name] + plain[gate]) and torch.equal(found[gate], plain[gate])
    assert "model.layers.1.self_attn.k_proj.bias" not in found and len(found) == len(plain) - 3  # two biases, and a tie


ARRANGED = [("fsdp1", 2), ("fsdp2", 1), ("fsdp1", 1), ("fsdp2", 2), ("fsdp1", 2)]


def test_a_run_goes_on_in_the_other_on_any_number_of_ranks(qwen: str, tmp_path: Path) -> None:
    steps, before = [*STEPS, *STEPS[:2]], ""
    expected = train_by_hand(qwen, steps, max_norm=0.5)
    for number, ((kind, count), step) in enumerate(zip(ARRANGED, steps, strict=True)):
        with ranks(count, qwen_on_meta(qwen, KINDS[kind]), executor=kind) as made:
            if before:
                made.call("load_checkpoint", before)
            train(made, [step])
            before = made.call("save_checkpoint", str(tmp_path), f"after-{number}", "{}")[0].path
            found, sums = weights(made), made.call("state_checksum")
            if number == len(steps) - 1:
                snapshot = str(tmp_path / "snapshot")
                made.call("write_snapshot", snapshot)
                kept = made.call("training_checksums")
                train(made, STEPS[:1])
                assert made.call("training_checksums") != kept
                made.call("read_snapshot", snapshot)
                assert made.call("training_checksums") == kept and made.call("state_checksum") == sums
    assert_close(found, expected["parameters"], atol=1e-5)


def test_states_release_and_bring_back(flat: Ranks, qwen: str) -> None:
    expected = train_by_hand(qwen, STEPS, max_norm=0.5)
    train(flat, STEPS[:1])
    for state in ("cpu", "cuda"):
        flat.call("to_state", state)
    train(flat, STEPS[1:])
    assert_close(weights(flat), expected["parameters"], atol=1e-5)
    freed = flat.call("to_state", "meta")
    total = sum(tensor.numel() for tensor in expected["parameters"].values())
    assert sum(one["freed"] for one in freed) >= 3 * 4 * total
    with pytest.raises(StateError, match="meta"):
        flat.method("accumulate", STEPS[0][0], 1)
    flat.call("to_state", "cuda")
    train(flat)
    assert_close(weights(flat), expected["parameters"], atol=1e-5)


def test_a_model_that_a_script_prepares_trains_is_kept_and_averaged(qwen: str, tmp_path: Path) -> None:
    folder, saved = str(tmp_path), str(tmp_path / "hf")

    def work() -> Any:
        s = strategy  # type: ignore[name-defined]
        plain = Qwen2ForCausalLM.from_pretrained(qwen)
        model, optimizer = s.prepare((plain, torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.0)))
        average = s.prepare_model(Qwen2ForCausalLM.from_pretrained(qwen), is_training=True)
        run_steps(s, model, optimizer, STEPS[:1])
        s.save_ckpt(model, folder, "one", optimizer=optimizer)
        run_steps(s, model, optimizer, STEPS[1:2])
        s.moving_average(model, average, beta=0.75)
        s.save_model(model, None, saved)
        s.load_ckpt(model, folder, optimizer)
        run_steps(s, model, optimizer, STEPS[1:2])
        return whole({name: p.full_tensor() for name, p in (*model.named_parameters(),)}), whole(
            {name: p.full_tensor() for name, p in average.named_parameters()}
        )

    with ranks(2, qwen_on_meta(qwen, FlatQwen), executor="fsdp1", **ACCUMULATING) as made:
        found, average = made.run(work)[0]
    kept, before = (dict(Qwen2ForCausalLM.from_pretrained(path).named_parameters()) for path in (saved, qwen))
    assert_close(kept, found, atol=0)
    assert_close(average, {name: 0.75 * p.detach() + 0.25 * found[name] for name, p in before.items()}, atol=1e-6)


# -- precision, copies, and what is refused


def test_computing_in_bfloat16_leaves_float32_weights(qwen: str) -> None:
    with ranks(2, qwen_on_meta(qwen, FlatQwen), executor="fsdp1", bf16=True) as made:
        norms = train(made)
        found = weights(made)
    expected = train_by_hand(qwen, STEPS, max_norm=0.5)
    assert norms == pytest.approx(expected["norms"], rel=0.05) and norms != expected["norms"]
    assert {tensor.dtype for tensor in found.values()} == {torch.float32}


@pytest.mark.parametrize(("count", "shards"), [(2, 1), pytest.param(4, 2, marks=pytest.mark.slow)])
def test_copies_train_alike_and_are_kept_once(qwen: str, tmp_path: Path, count: int, shards: int) -> None:
    with ranks(count, qwen_on_meta(qwen, FlatQwen), executor="fsdp1", shard_size=shards) as made:
        train(made, STEPS[:1])
        saved = made.call("save_checkpoint", str(tmp_path), "x", "{}")[0]
        norms = train(made, STEPS[1:])
        numbers = made.run(lambda: sum(parameter.numel() for parameter in module.parameters()))  # type: ignore[name-defined]
    assert norms == pytest.approx(train_by_hand(qwen, STEPS, max_norm=0.5)["norms"][1:], abs=1e-5)
    assert sum(numbers) == count // shards * sum(p.numel() for p in Qwen2ForCausalLM.from_pretrained(qwen).parameters())
    with ranks(2, qwen_on_meta(qwen, ShardedQwen)) as made:
        made.call("load_checkpoint", saved.path)
        assert train(made, STEPS[1:]) == pytest.approx(norms, abs=1e-5)
        again = made.call("save_checkpoint", str(tmp_path), "y", "{}")[0]
    assert saved.bytes < 1.1 * again.bytes


@pytest.mark.parametrize("option", [{"use_mp_opt": True}, {"fsdp_cpu_offload": True}, {"fp16": True}])
def test_options_of_fsdp2_are_refused(qwen: str, option: dict[str, Any]) -> None:
    with (
        pytest.raises(OptionError, match=f"{next(iter(option))}=True cannot be honoured with FSDP1"),
        ranks(1, qwen_on_meta(qwen, FlatQwen), executor="fsdp1", **option),
    ):
        pass


def test_a_policy_that_takes_a_tie_apart_is_refused(qwen: str) -> None:
    class Apart(FlatQwen):
        def get_fsdp_wrap_policy(self) -> Any:
            return {nn.Embedding}

    with pytest.raises(BuildError, match="lm_head"), ranks(1, qwen_on_meta(qwen, Apart), executor="fsdp1"):
        pass


def test_the_base_chooses_the_executor_and_another_is_refused() -> None:
    assert executor_for(FlatQwen) == executor_for(FlatQwen, "fsdp1") == "fsdp1"
    assert executor_for(ShardedQwen) == executor_for(rlbench.nn.BaseTrainModule) == "fsdp2"
    assert executor_for(rlbench.nn.BaseTrainModule, "fsdp1") == "fsdp1"
    with pytest.raises(BuildError, match=r"FlatQwen inherits from FsdpTrainModule.*executor='fsdp1'"):
        executor_for(FlatQwen, "fsdp2")
