"""Layers split over ranks that see the same rows, alone and with shards and replicas: the loss, the gradients and the
steps of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rlbench.errors import BuildError
from rlbench.options import OptionError
from rlbench.session.options import Train
from rlbench.session.planning.devices import Devices
from rlbench.session.planning.model import policy_of
from rlbench.session.planning.request import Request
from rlbench.session.planning.uses import rank_uses
from rlbench.trainers.models.policy_module import make_policy
from rlbench.trainers.models.policy_spec import Lora, PolicySpec
from tests.modules import RAGGED, VOCAB, TrainedQwen, qwen_on_meta
from tests.ranks import ranks
from tests.strategies.test_strategy import assert_close, parameters, plain_loop, rows
from tests.trainers.policy_reference import GRPO, assert_gradients, batch, by_hand, forward_backward

pytestmark = pytest.mark.slow

WITH_SHARDS, WITH_REPLICAS = {"tensor_parallel": 2}, {"tensor_parallel": 2, "shard_size": 1}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 16},  # norms of queries and keys, over the rank's heads
    "olmo2": {},  # norms over all heads: what the layers give is gathered, and split again
    "phi3": {"pad_token_id": 0},  # one layer for queries, keys and values
}


@pytest.mark.parametrize(
    ("count", "options"),
    [
        (2, WITH_SHARDS),
        (2, {**WITH_SHARDS, "fsdp_cpu_offload": True}),
        (4, WITH_SHARDS),
        (4, WITH_REPLICAS),
        (4, {"shard_size": 2}),
    ],
)
def test_a_users_loop_trains_as_a_plain_loop_does(qwen: str, count: int, options: dict[str, Any]) -> None:
    data = [rows(4, seed) for seed in range(3)]
    expected, norms = plain_loop(qwen, [[step] for step in data], max_norm=0.5)
    together = options.get("tensor_parallel", 1)
    share = 4 // (count // together)
    with ranks(count, qwen_on_meta(qwen), max_norm=0.5, **options) as engine:
        for step, norm in zip(data, norms, strict=True):
            own = [step[rank // together * share :][:share] for rank in range(count)]
            engine.call_each("call_method", [("train_step", (part,), {}) for part in own])
            done = engine.method("optimizer_step")
            assert all(one == done[0] for one in done) and done[0]["grad_norm"] == pytest.approx(norm, rel=1e-5)
        assert_close(parameters(engine), expected)


def saved(kind: str, folder: Path) -> str:
    """A model of a family with its weights; returns its folder."""
    torch.manual_seed(1)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = AutoConfig.for_model(kind, vocab_size=VOCAB, num_key_value_heads=2, **sizes, **FAMILIES[kind])
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("kind", FAMILIES)
def test_loss_and_gradients_are_those_of_one_process_for_every_kind_of_plan(kind: str, tmp_path: Path) -> None:
    path = saved(kind, tmp_path / kind)
    model = AutoModelForCausalLM.from_pretrained(path)
    expected, metrics = by_hand(model, batch(), GRPO, "token-mean")
    expected.backward()
    with ranks(2, make_policy(PolicySpec(path)), tensor_parallel=2) as engine:
        found = forward_backward(engine, batch(), token_budget=45)
        assert {name: found[0]["metrics"][name] for name in metrics} == pytest.approx(metrics, abs=1e-5)
        assert found[0]["micro_batches"] > 1 and found[0]["metrics"] == found[1]["metrics"]
        assert_gradients(engine, model)


def test_rows_are_split_over_those_that_do_not_share_layers(qwen: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(qwen)
    expected, metrics = by_hand(model, batch(), GRPO, "token-mean")
    expected.backward()
    with ranks(4, qwen_on_meta(qwen), tensor_parallel=2) as engine:
        found = forward_backward(engine, batch(), token_budget=45)
        assert [list(part["rows"]) for part in found[::2]] == [list(part["rows"]) for part in found[1::2]]
        assert sorted(row for part in found[::2] for row in part["rows"]) == list(range(len(RAGGED)))
        assert found[0]["metrics"]["loss"] == pytest.approx(metrics["loss"], abs=1e-5)
        assert found[0]["metrics"]["tokens"] == metrics["tokens"]
        assert_gradients(engine, model)


def test_what_is_frozen_stays_so(qwen: str) -> None:
    def trained() -> set[str]:
        return {name for name, p in module.named_parameters() if p.requires_grad}  # type: ignore[name-defined]

    given = qwen_on_meta(qwen)
    given.model.layers[0].requires_grad_(False)
    with ranks(2, given, tensor_parallel=2) as engine:
        assert not any("layers.0." in name for name in engine.run(trained)[0])


def test_a_plan_knows_what_a_rank_holds(qwen: str) -> None:
    devices, train = Devices(0, 1 << 40), Train(tensor_parallel=2, shards=1)
    planned = rank_uses(policy_of(Request(qwen, devices, train)), Request(qwen, devices, train, lengths=8), (8,))
    with ranks(2, qwen_on_meta(qwen), tensor_parallel=2) as engine:
        assert {part["weights"] for part in engine.call("memory")} == {planned[0].most}


class Planless(TrainedQwen):
    """Does not say how its layers are split."""

    tp_plan: Any = None


def test_what_cannot_be_split_is_refused_before_anything_is_loaded(qwen: str) -> None:
    quantised = PolicySpec(qwen, lora=Lora(rank=4, base="int8"))
    cases = [
        (2, 2, qwen_on_meta(qwen, Planless), "tp_plan"),
        (4, 4, qwen_on_meta(qwen), "num_key_value_heads=2"),
        (2, 2, make_policy(quantised), "quantised"),
    ]
    for count, together, module, token in cases:
        with ranks(count, tensor_parallel=together) as engine, pytest.raises(BuildError, match=token):
            engine.build(module)
    with ranks(2, tensor_parallel=3) as engine, pytest.raises(OptionError, match="divide"):
        engine.build(qwen_on_meta(qwen))
