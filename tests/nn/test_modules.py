"""Modules on meta: how they are made, that they travel light, and what is refused."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

import rlbench.nn
from rlbench.errors import BuildError, StateError
from rlbench.nn.walk import every_module
from tests.modules import RunningMeanModel, TrainedQwen, qwen_on_meta


def test_making_on_meta_reads_no_weights_and_keeps_buffers(qwen: str, tmp_path: Path) -> None:
    shutil.copy(Path(qwen) / "config.json", tmp_path)  # no weights there at all
    with init_empty_weights():
        module = TrainedQwen.from_pretrained(tmp_path)
    assert all(parameter.is_meta for parameter in module.parameters())
    real = Qwen2ForCausalLM.from_pretrained(qwen)
    for name, buffer in real.named_buffers():
        assert torch.equal(buffer, module.get_buffer(name))
    assert module.materialization_source() == str(tmp_path)
    assert not module.training  # as transformers leaves a loaded model


def test_dtype_and_config_overrides_are_taken_on_meta(qwen: str) -> None:
    with rlbench.nn.device("meta"):
        module = TrainedQwen.from_pretrained(qwen, dtype=torch.bfloat16, attention_dropout=0.25)
    assert {parameter.dtype for parameter in module.parameters()} == {torch.bfloat16}
    assert module.config.attention_dropout == 0.25


def test_a_module_travels_light_and_arrives_whole(qwen: str) -> None:
    module = qwen_on_meta(qwen)
    blob = cloudpickle.dumps(module)
    assert len(blob) < 4 * sum(parameter.numel() for parameter in module.parameters()) / 4
    back = cloudpickle.loads(blob)
    assert [n for n, _ in back.named_parameters()] == [n for n, _ in module.named_parameters()]
    assert torch.equal(back.get_buffer("model.rotary_emb.inv_freq"), module.get_buffer("model.rotary_emb.inv_freq"))
    assert back.materialization_source() == qwen


def test_the_units_of_sharding_are_the_decoder_layers(qwen: str) -> None:
    assert {cls.__name__ for cls in qwen_on_meta(qwen).non_split_modules} == {"Qwen2DecoderLayer"}


def test_outside_an_engine_a_module_is_alone(qwen: str) -> None:
    module = qwen_on_meta(qwen)
    assert (module.rank, module.world_size, module.stop_requested()) == (0, 1, False)
    with pytest.raises(StateError, match="build"):
        _ = module.strategy


def test_a_module_with_weights_is_refused_naming_the_mend(qwen: str) -> None:
    with pytest.raises(BuildError, match=r"not on meta.*rlbench\.nn\.device\('meta'\)"):
        rlbench.nn.check_module(TrainedQwen.from_pretrained(qwen))


def test_plain_meta_device_is_recognised_by_its_lost_buffers(qwen: str) -> None:
    with torch.device("meta"):
        module = TrainedQwen(Qwen2Config.from_pretrained(qwen))
    with pytest.raises(BuildError, match=r"lost buffers.*torch\.device\('meta'\) empties"):
        rlbench.nn.check_module(module)


def test_a_wrong_path_is_one_sentence_without_asking_the_network() -> None:
    with rlbench.nn.device("meta"), pytest.raises(BuildError, match="no model at '/nowhere/at/all'"):
        TrainedQwen.from_pretrained("/nowhere/at/all")


def test_a_config_of_another_architecture_is_refused(qwen: str) -> None:
    class Llama(rlbench.nn.HuggingFaceFsdp2TrainModule, LlamaForCausalLM):
        pass

    with rlbench.nn.device("meta"), pytest.raises(BuildError, match="'qwen2' model, and Llama is a 'llama'"):
        Llama.from_pretrained(qwen)


def test_a_module_without_a_source_says_what_to_define(qwen: str) -> None:
    with rlbench.nn.device("meta"):
        module = TrainedQwen(Qwen2Config.from_pretrained(qwen))
    module.name_or_path = module.config._name_or_path = ""
    with pytest.raises(BuildError, match="from_pretrained"):
        module.materialization_source()
    with pytest.raises(BuildError, match="materialization_source"):
        rlbench.nn.Fsdp2TrainModule().materialization_source()


def test_only_what_the_user_wrote_is_callable() -> None:
    infos = {info["name"]: info for info in rlbench.nn.callable_methods(TrainedQwen)}
    assert set(infos) == {
        "train_step",
        "optimizer_step",
        "through_forward",
        "fails_on",
        "where",
        "train",
        "eval",
    }
    assert infos["train_step"]["signature"] == "(input_ids: 'list[list[int]]', scale: 'float' = 1.0) -> 'float'"
    assert infos["train_step"]["doc"] == "One backward of the language loss."


def test_helpers_hooks_and_forward_are_not_callable_but_static_and_class_methods_are() -> None:
    class Mine(RunningMeanModel):
        def _helper(self) -> None: ...

        @staticmethod
        def add(a: int, b: int) -> int:
            return a + b

        @classmethod
        def named(cls, name: str) -> Any: ...

    infos = {info["name"]: info["signature"] for info in rlbench.nn.callable_methods(Mine)}
    assert set(infos) == {"add", "named", "train", "eval"}
    assert infos["add"].startswith("(a: ")
    assert infos["named"].startswith("(name: ")


def test_every_module_is_walked_once():
    shared = nn.Linear(2, 2)
    inner = nn.Sequential(shared, nn.ModuleDict({"a": nn.ReLU(), "b": shared}))
    whole = nn.Sequential(inner, nn.ModuleList([shared, inner]))
    whole.register_module("none", None)
    walked = list(every_module(whole))
    assert len(walked) == len(set(walked)) and set(walked) == set(whole.modules())
