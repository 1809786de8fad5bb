"""Modules that FSDP1 holds, on one rank and two: numbers of one process, and a state that goes to FSDP2 and back."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, always_wrap_policy
from transformers import Qwen2ForCausalLM
from transformers.models.qwen2.modeling_qwen2 import Qwen2MLP

import rlbench.nn
from rlbench.data.base.ragged import rows_in_order
from rlbench.dispatch import by_value
from rlbench.errors import BuildError, EngineError
from rlbench.nn.base import executor_for
from rlbench.nn.lora import inject
from rlbench.rl import grpo
from rlbench.session.options import Train
from rlbench.strategies.options.config import OptionError
from rlbench.workers.train.config import TrainConfig
from tests.modules import qwen_on_meta, save_qwen
from tests.ranks import Ranks, ranks
from tests.strategies.flat_modules import KINDS, STEPS, FlatQwen, Loop, ShardedQwen, train, weights
from tests.strategies.surface import assert_close, rows, train_by_hand
from tests.trainers.policy_reference import batch as policy_batch


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_qwen(tmp_path_factory.mktemp("untied"), tied=False)


@pytest.fixture(params=[1, 2], ids=["one-rank", "two-ranks"])
def flat(request: Any, qwen: str) -> Iterator[Ranks]:
    with ranks(request.param, qwen_on_meta(qwen, FlatQwen), executor="fsdp1") as made:
        yield made


class Plain(rlbench.nn.FsdpTrainModule):
    """An architecture of plain torch, whose weights initialisers make."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.then = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 1))
        self.register_buffer("scale", torch.full((8,), 0.5))

    @property
    def non_split_modules(self) -> set[type[nn.Module]]:
        return {nn.Sequential}

    def materialization_source(self) -> Any:
        return {name: lambda whole: nn.init.normal_(whole, std=0.1) for name, _ in self.named_parameters()}

    def forward(self, x: Tensor) -> Tensor:
        return self.then(self.first(x * self.scale))

    def on_weights_materialized(self) -> None:
        self.optimizer = torch.optim.SGD(self.parameters(), lr=0.1)

    def step(self) -> float:
        loss = (self(torch.ones(4, 8)) - 1.0).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss)


class Recomputed(FlatQwen):
    def on_weights_materialized(self) -> None:
        super().on_weights_materialized()
        self.gradient_checkpointing_enable()
        self.train()


def frozen(base: Any) -> Any:
    class Frozen(base):  # type: ignore[misc]
        def on_weights_materialized(self) -> None:
            for name, parameter in self.named_parameters():
                parameter.requires_grad_("layers.1" in name)
            super().on_weights_materialized()

    return Frozen


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


def test_a_copy_is_refused_as_it_would_compute_with_the_original(qwen: str) -> None:
    with ranks(1, qwen_on_meta(qwen, FlatQwen), executor="fsdp1") as made:
        with pytest.raises(EngineError, match="FlatQwen cannot be copied"):
            made.run(lambda: copy.deepcopy(module))  # type: ignore[name-defined]


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


def test_an_architecture_of_ones_own_starts_and_trains_alike_on_any_number_of_ranks() -> None:
    with rlbench.nn.device("meta"):
        module = Plain()
    losses = []
    for count in (1, 2):
        with ranks(count, module, executor="fsdp1") as made:
            losses.append([made.method("step")[0] for _ in range(3)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5) and losses[0][2] < losses[0][0]


def test_layers_are_computed_again_in_the_backward(qwen: str) -> None:
    with ranks(2, qwen_on_meta(qwen, Recomputed), executor="fsdp1") as made:
        assert train(made) == pytest.approx(train_by_hand(qwen, STEPS, max_norm=0.5)["norms"], abs=1e-5)


def test_what_is_frozen_stays_and_the_rest_trains_as_with_fsdp2(qwen: str) -> None:
    found = []
    for kind, cls in KINDS.items():
        with ranks(2, qwen_on_meta(qwen, frozen(cls)), executor=kind) as made:
            found.append((train(made), weights(made)))
    assert found[0][0] == pytest.approx(found[1][0], abs=1e-5)
    assert_close(found[0][1], found[1][1], atol=1e-5)


def policies(kind: str) -> Any:
    return {"all": always_wrap_policy, "classes": {Qwen2MLP}, "policy": ModuleWrapPolicy({Qwen2MLP})}.get(kind)


@pytest.mark.parametrize("kind", ["all", "classes", "policy"])
def test_a_wrap_policy_of_torchs_says_what_is_a_unit(untied: str, kind: str) -> None:
    class Wrapped(FlatQwen):
        def get_fsdp_wrap_policy(self) -> Any:
            return policies(kind)

    with ranks(2, qwen_on_meta(untied, Wrapped), executor="fsdp1") as made:
        assert train(made, STEPS[:2]) == pytest.approx(train_by_hand(untied, STEPS[:2], 0.5)["norms"], abs=1e-5)


def sharper() -> type:
    class FlatQwen(Loop, rlbench.nn.HuggingFaceFsdpTrainModule, Qwen2ForCausalLM):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            found = super().forward(*args, **kwargs)
            found.logits = found.logits * 2.0
            return found

    return FlatQwen


def test_a_class_is_redefined_around_the_live_module(qwen: str) -> None:
    def looked() -> Tensor:
        with torch.no_grad():
            return module(torch.tensor(rows(2, 5))).logits  # type: ignore[name-defined, no-any-return]

    with ranks(2, qwen_on_meta(qwen, FlatQwen), executor="fsdp1") as made:
        before, sums = made.run(looked)[0], made.call("training_checksums")
        done = made.call("redefine", by_value.dumps(sharper()), by_value.identity(sharper()), None, ("build",))[0]
        assert done["changed"] and made.call("training_checksums") == sums
        torch.testing.assert_close(made.run(looked)[0], 2.0 * before, rtol=0, atol=1e-5)
        assert all(made.method("between", rows(2, 6))[0])


def test_the_passes_of_a_policy_are_those_that_fsdp2_computes(qwen: str) -> None:
    """A weight sync is proven by their log-probs."""
    found = {}
    for kind, cls in KINDS.items():
        with ranks(2, qwen_on_meta(qwen, cls), executor=kind) as made:
            scored = made.call("policy_forward", policy_batch(), {})
            passed = made.call("policy_forward_backward", policy_batch(), cloudpickle.dumps(grpo()), {})[0]
            stepped = made.call("policy_optim_step", {"max_norm": 0.5})[0]
            found[kind] = scored, passed, stepped, weights(made)
    (scored, passed, stepped, after), (expected, passed2, stepped2, after2) = found["fsdp1"], found["fsdp2"]
    assert passed["head"] == passed2["head"] == "chunked"
    assert stepped["metrics"]["grad_norm"] == pytest.approx(stepped2["metrics"]["grad_norm"], abs=1e-5)
    both = (rows_in_order(parts)["logprobs"] for parts in (scored, expected))
    for row, other in zip(*both, strict=True):
        assert np.asarray(row) == pytest.approx(np.asarray(other), abs=1e-5)
    assert_close(after, after2, atol=1e-5)


# -- precision, copies, and what is refused


def test_computing_in_bfloat16_leaves_float32_weights(qwen: str) -> None:
    with ranks(2, qwen_on_meta(qwen, FlatQwen), executor="fsdp1", bf16=True) as made:
        norms = train(made)
        found = weights(made)
    expected = train_by_hand(qwen, STEPS, max_norm=0.5)
    assert norms == pytest.approx(expected["norms"], rel=0.05) and norms != expected["norms"]
    assert {tensor.dtype for tensor in found.values()} == {torch.float32}


OF_FSDP2: list[dict[str, Any]] = [
    {"use_mp_opt": True},
    {"fsdp_cpu_offload": True},
    {"fp16": True},
    {"tensor_parallel": 2},
    {"sequence_parallel": 2},
    {"reshard_after_forward": False},
]


@pytest.mark.parametrize("option", OF_FSDP2, ids=lambda option: next(iter(option)))
def test_options_of_fsdp2_are_refused(option: dict[str, Any]) -> None:
    ((name, value),) = option.items()
    with pytest.raises(OptionError, match=f"{name}={value} cannot be honoured with FSDP1"):
        TrainConfig(executor="fsdp1", **option)
    assert getattr(TrainConfig(**option), name) == value


def test_adapters_are_refused(qwen: str) -> None:
    module = qwen_on_meta(qwen, FlatQwen)
    inject(module, 4, 8.0, ["all-linear"], 0.0)
    with pytest.raises(BuildError, match="LoRA adapters"), ranks(1, module, executor="fsdp1"):
        pass


def test_a_session_trains_with_fsdp2() -> None:
    with pytest.raises(OptionError, match=r"executor.*a session trains with FSDP2"):
        Train(executor="fsdp1")  # type: ignore[call-arg]


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
