"""The strategy without ranks: the same surface as the one with, the same numbers, no process group."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import Qwen2ForCausalLM

from rlbench.errors import StateError
from rlbench.strategies import FakeStrategy, FSDPV2Strategy, StrategyBase, get_fake_strategy
from tests.strategies.surface import assert_close, rows, run_steps, state_of, train_by_hand, whole


def test_it_has_every_public_method_with_the_signature_of_the_real_one() -> None:
    public = [n for n in dir(FSDPV2Strategy) if not n.startswith("_") and n not in ("shard",)]
    assert len(public) > 30
    for name in public:
        real, fake = getattr(FSDPV2Strategy, name), getattr(FakeStrategy, name)
        if callable(real):
            assert inspect.signature(real) == inspect.signature(fake), name
    assert issubclass(FakeStrategy, StrategyBase)


SEED: dict[str, dict[str, Any]] = {
    "__init__": {
        "seed": 42,
        "max_norm": 0.0,
        "micro_train_batch_size": 1,
        "train_batch_size": 1,
        "bf16": True,
        "args": None,
    },
    "prepare_model": {"is_training": False, "shard_size": -1, "reshard_after_forward": True},
    "init_model_context": {"meta_init": False},
    "save_ckpt": {
        "tag": None,
        "max_num": 3,
        "max_mem": 1000,
        "client_state": {},
        "save_latest": True,
        "optimizer": None,
        "scheduler": None,
    },
    "load_ckpt": {
        "optimizer": None,
        "scheduler": None,
        "load_module_strict": True,
        "load_optimizer_states": True,
        "load_lr_scheduler_states": True,
    },
    "all_reduce": {"op": "mean"},
    "report_memory": {"prefix": ""},
    "moving_average": {"beta": 0.992, "device": "cpu"},
}
ORDER = {
    "backward": "loss model optimizer",
    "optimizer_step": "optimizer model scheduler name",
    "prepare_model": "model is_training shard_size reshard_after_forward",
    "save_ckpt": "model save_dir tag max_num max_mem client_state save_latest optimizer scheduler",
    "load_ckpt": "model load_dir optimizer scheduler load_module_strict load_optimizer_states load_lr_scheduler_states",
    "save_model": "model tokenizer output_dir",
    "moving_average": "model model_ema beta device",
    "maybe_load_optimizer": "optimizer device",
}


def test_signatures_and_defaults_are_the_documents() -> None:
    for name, defaults in SEED.items():
        parameters = inspect.signature(getattr(FSDPV2Strategy, name)).parameters
        assert {key: parameters[key].default for key in defaults} == defaults, name
    for name, order in ORDER.items():
        found = list(inspect.signature(getattr(FSDPV2Strategy, name)).parameters)[1:]
        assert found[: len(order.split())] == order.split(), name
    assert inspect.signature(FSDPV2Strategy.optimizer_step).parameters["name"].default == "model"


def test_it_trains_as_torch_alone_does_and_joins_no_group(qwen: str) -> None:
    steps = [[rows(2, 2 * step), rows(2, 2 * step + 1)] for step in range(3)]
    s = get_fake_strategy({"bf16": False, "max_norm": 0.05, "micro_train_batch_size": 2, "train_batch_size": 4})
    model = s.prepare_model(Qwen2ForCausalLM.from_pretrained(qwen), is_training=True)
    optimizer = s.create_optimizer(model, lr=1e-2, weight_decay=0.1)
    results = run_steps(s, model, optimizer, steps)
    expected = train_by_hand(qwen, steps, 0.05)
    assert_close(whole(dict(model.named_parameters())), expected["parameters"])
    assert_close(state_of(model, optimizer), expected["state"])
    assert [r["grad_norm"] for r in results if r["stepped"]] == pytest.approx(expected["norms"], rel=1e-4)
    assert not dist.is_initialized()


def test_defaults_are_those_of_the_options() -> None:
    s = get_fake_strategy()
    assert (s.accumulation, s.max_norm, s.bf16, s.world_size, s.rank) == (128, 1.0, True, 1, 0)


def test_it_seeds_the_process_by_its_option() -> None:
    drawn = []
    for seed in (3, 3, 4):
        get_fake_strategy({"seed": seed})
        drawn.append(float(torch.rand(1)))
    assert drawn[0] == drawn[1] != drawn[2]


def test_communication_of_one(capsys: pytest.CaptureFixture[str]) -> None:
    s = get_fake_strategy()
    assert s.all_reduce({"a": 2, "b": torch.tensor([1.0, 3.0])}, "sum")["b"].tolist() == [1.0, 3.0]
    assert s.all_reduce(3, "max") == 3 and s.all_gather(3) == [3] and s.is_rank_0()
    assert s.all_gather(torch.ones(2, 2)).tolist() == [[1.0, 1.0]] * 2  # a tensor, as with ranks, not a list of them
    s.barrier()
    s.report_memory("here")
    assert "MEMORY STATUS: here, " in capsys.readouterr().out


def test_bf16_computes_in_bfloat16_over_the_float32_parameters(qwen: str) -> None:
    for bf16, expected in ((True, torch.bfloat16), (False, torch.float32)):
        s = get_fake_strategy({"bf16": bf16, "train_batch_size": 1})
        model = s.prepare_model(Qwen2ForCausalLM.from_pretrained(qwen, dtype=torch.bfloat16), is_training=True)
        s.prepare_model(model, is_training=True)  # a second time changes nothing
        seen: list[Any] = []
        model.model.layers[0].mlp.up_proj.register_forward_hook(lambda m, i, o, seen=seen: seen.append(o.dtype))
        with torch.no_grad():
            model(torch.tensor(rows(1)))
        assert seen == [expected] and next(model.parameters()).dtype == torch.float32
    assert not torch.is_autocast_enabled("cpu")


def test_a_model_read_without_memory_is_filled_when_it_is_prepared(qwen: str) -> None:
    s = get_fake_strategy({"bf16": False})
    with s.init_model_context(meta_init=True):
        model = Qwen2ForCausalLM.from_pretrained(qwen)
    assert all(parameter.is_meta for parameter in model.parameters())
    s.prepare_model(model)
    reference = Qwen2ForCausalLM.from_pretrained(qwen)
    assert_close(whole(dict(model.named_parameters())), whole(dict(reference.named_parameters())), 0.0)


def test_offloading_is_checked_as_with_ranks() -> None:
    s = get_fake_strategy({"adam_offload": True, "train_batch_size": 1, "bf16": False})
    layer = s.prepare_model(nn.Linear(2, 2), is_training=True)
    optimizer = s.maybe_offload_optimizer(s.create_optimizer(layer, lr=1.0))
    with pytest.raises(StateError, match="maybe_load_optimizer"):
        s.optimizer_step(optimizer, layer, None)
    s.offload_model(layer)
    with pytest.raises(StateError, match="reload_model"):
        layer(torch.ones(1, 2))


def test_the_mixed_precision_optimizer_and_a_checkpoint(tmp_path: Path) -> None:
    s = get_fake_strategy({"use_mp_opt": True, "train_batch_size": 1})
    layer = s.prepare_model(nn.Linear(2, 2), is_training=True)
    optimizer = s.create_optimizer(layer, lr=1e-3)
    s.backward(layer(torch.ones(1, 2, dtype=torch.bfloat16)).sum(), layer, optimizer)
    s.optimizer_step(optimizer, layer, None)
    kept = optimizer.state[layer.weight]["master"].clone()
    s.save_ckpt(layer, str(tmp_path), optimizer=optimizer)
    s.backward(layer(torch.ones(1, 2, dtype=torch.bfloat16)).sum(), layer, optimizer)
    s.optimizer_step(optimizer, layer, None)
    assert not torch.equal(optimizer.state[layer.weight]["master"], kept)
    s.load_ckpt(layer, str(tmp_path), optimizer)
    assert layer.weight.dtype == torch.bfloat16 and torch.equal(optimizer.state[layer.weight]["master"], kept)


def test_a_model_whose_weights_could_not_be_loaded_is_filled_by_the_next_call(qwen: str) -> None:
    class Away(Qwen2ForCausalLM):
        here = False

        def materialization_source(self) -> str:
            if not self.here:
                raise OSError("the hub is away")
            return qwen

    strategy = get_fake_strategy({"bf16": False})
    with strategy.init_model_context(meta_init=True):
        model = Away(Qwen2ForCausalLM.config_class.from_pretrained(qwen))
    with pytest.raises(OSError, match="away"):
        strategy.prepare_model(model)
    Away.here = True
    assert not any(parameter.is_meta for parameter in strategy.prepare_model(model).parameters())
