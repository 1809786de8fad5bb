"""Weights from every kind of source arrive on every rank, and what does not fit is said in one sentence."""

from __future__ import annotations

import copy
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM, Qwen2ForCausalLM

import rlbench.nn
from rlbench.errors import BuildError, WeightSyncError
from rlbench.trainers.models.policy_spec import PolicySpec
from tests.families.shapes import small_config
from tests.modules import VOCAB, RunningMeanModel, TrainedQwen, qwen_on_meta, save_qwen
from tests.ranks import Ranks, ranks


def custom(source: Any = None) -> RunningMeanModel:
    with rlbench.nn.device("meta"):
        return RunningMeanModel(source=source)


def custom_state() -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    return {name: tensor + 0.1 for name, tensor in RunningMeanModel().state_dict().items()}


def full_state(engine: Ranks) -> dict[str, torch.Tensor]:
    def gather() -> dict[str, Any]:
        found = {}
        for name, tensor in module.state_dict().items():  # type: ignore[name-defined]
            found[name] = (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).cpu().clone()
        return found

    return engine.run(gather)[0]


def units() -> list[str]:
    """The classes of what is gathered and freed as one, below the module itself and beside embeddings."""
    parts = [type(part).__name__ for part in module.modules() if part is not module]  # type: ignore[name-defined]
    return [name for name in parts if name.startswith("FSDP") and "Embedding" not in name and "Linear" not in name]


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("tied", [True, False])
def test_a_folder_gives_the_weights_transformers_would_load(tmp_path: Path, world_size: int, tied: bool) -> None:
    path = save_qwen(tmp_path, tied=tied)
    with ranks(world_size) as engine:
        info = engine.build(qwen_on_meta(path))[0]
        assert info["tied"] is tied
        assert info["source"] == path
        assert_same(full_state(engine), dict(Qwen2ForCausalLM.from_pretrained(path).state_dict()))


@pytest.mark.parametrize("kind", ["dict", ".safetensors", ".pt"])
def test_a_state_dict_fills_a_model_of_ones_own(tmp_path: Path, kind: str) -> None:
    state = custom_state()
    source: Any = state
    if kind != "dict":
        source = str(tmp_path / f"weights{kind}")
        save_file(state, source) if kind == ".safetensors" else torch.save(state, source)
    with ranks(2, custom(source)) as engine:
        assert_same(full_state(engine), state)  # the persistent buffer `scale` too
        assert engine.run(units)[0] == ["FSDPBlock", "FSDPBlock"], "what `non_split_modules` names"


def test_initialisers_draw_the_same_weights_whatever_the_number_of_ranks() -> None:
    names = [name for name, _ in custom().named_parameters()]
    source: dict[str, Any] = dict.fromkeys(names, nn.init.normal_)
    source["head.bias"] = lambda: torch.full((VOCAB,), 0.25)
    sums = []
    for world_size in (1, 2):
        with ranks(world_size, custom(source)) as engine:
            state = full_state(engine)
            assert torch.equal(state["head.bias"], torch.full((VOCAB,), 0.25))
            assert 0.8 < float(state["embed.weight"].std()) < 1.2
            assert not torch.equal(state["blocks.0.mix.weight"], state["blocks.1.mix.weight"])
            sums.append(engine.call("state_checksum")[0])
    assert sums[0] == sums[1]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda s: s.pop("head.weight"), r"1 parameters are missing \(head\.weight"),
        (lambda s: s.update(extra=torch.zeros(2)), r"1 tensors have no parameter \(extra"),
        (
            lambda s: s.update({"head.weight": torch.zeros(3, 3)}),
            r"head\.weight is \(3, 3\), the module wants \(96, 16\)",
        ),
        (lambda s: s.update(heads=s.pop("head.weight")), r"missing \(head\.weight; nearest: heads"),
    ],
)
def test_weights_that_do_not_fit_fail_the_build_on_every_rank_in_one_sentence(change: Any, said: str) -> None:
    state = custom_state()
    change(state)
    with ranks(2) as engine, pytest.raises(BuildError, match=said):
        engine.build(custom(state))


def test_a_missing_folder_and_a_foreign_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "broken.pt").write_bytes(b"not a checkpoint")
    for source, said in [
        (str(tmp_path / "nothing"), "no model at"),
        (str(tmp_path / "broken.pt"), "cannot be read as a checkpoint"),
        (str(tmp_path), "holds no weights"),
        (7, "must be a path, a dict of tensors or a dict of initialisers"),
    ]:
        with ranks(1) as engine, pytest.raises(BuildError, match=said):
            engine.build(custom(source))


class Mapping(RunningMeanModel):
    """Reads and writes under other names, and keeps its head to itself."""

    def preprocess_input_named_parameters(self, name: str, param: Any) -> Any:
        return None if name == "leftover" else (name.removeprefix("old."), param)

    def postprocess_output_named_parameters(self, name: str, param: Any, full_state_dict: Any) -> Any:
        if name == "head.bias":
            return None
        if name == "head.weight":
            return "sum", param.full_tensor() + full_state_dict["embed.weight"].full_tensor()
        return f"new.{name}", param.full_tensor()


def test_the_hooks_map_drop_and_combine_tensors_on_the_way_in_and_out() -> None:
    from tests.weights import read_manifest

    state = custom_state()
    source = {f"old.{name}": tensor for name, tensor in state.items()} | {"leftover": torch.zeros(1)}
    with rlbench.nn.device("meta"):
        module = Mapping(source=source)
    with ranks(2, module) as engine:
        manifest, none = engine.call("stage_weights", {"transport": "shm", "prefix": "rlb-test-hooks"})
        sent = {name: tensor.clone() for name, tensor in read_manifest(manifest)}
    assert none is None
    assert "head.bias" not in sent
    assert "new.head.bias" not in sent
    assert torch.equal(sent["sum"], state["head.weight"] + state["embed.weight"])
    assert torch.equal(sent["new.blocks.1.mix.weight"], state["blocks.1.mix.weight"])


def test_names_that_only_transformers_can_map_are_mapped(tmp_path: Path) -> None:
    path = save_qwen(tmp_path / "whole")
    model = Qwen2ForCausalLM.from_pretrained(path)
    model.model.save_pretrained(tmp_path / "base")  # names without "model.", as a base checkpoint has them
    with ranks(2, qwen_on_meta(str(tmp_path / "base"), TrainedQwen)) as engine:
        assert_same(full_state(engine), dict(model.state_dict()))


def test_half_precision_weights_train_as_float32_masters_and_a_frozen_module_keeps_them(
    tmp_path: Path,
) -> None:
    path = save_qwen(tmp_path, dtype=torch.bfloat16)

    class Frozen(rlbench.nn.HuggingFaceFsdp2TrainModule, Qwen2ForCausalLM):
        pass

    for cls, kept in ((TrainedQwen, torch.float32), (Frozen, torch.bfloat16)):
        with ranks(1) as engine:
            info = engine.build(qwen_on_meta(path, cls))[0]
            assert info["dtype"] == "bfloat16"  # of computation
            assert {tensor.dtype for n, tensor in full_state(engine).items()} == {kept}


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_neox"])
def test_what_one_engine_staged_another_takes_by_the_checkpoints_names(family: str, tmp_path: Path) -> None:
    torch.manual_seed(2)
    AutoModelForCausalLM.from_config(small_config(family)).save_pretrained(tmp_path)

    def halve() -> None:
        with torch.no_grad():
            for parameter in module.parameters():  # type: ignore[name-defined]
                parameter.mul_(0.5)

    with ranks(1) as engine:
        engine.build(PolicySpec(str(tmp_path)))
        staged = asdict(engine.call("stage_weights", {"transport": "shm", "prefix": f"rlb-test-{family}"})[0])
        first = engine.call("state_checksum")
        engine.run(halve)
        halved = engine.call("state_checksum")
        other = copy.deepcopy(staged)
        other["buckets"][0]["entries"][0]["name"] = "of.another.architecture"
        with pytest.raises(WeightSyncError, match=r"of\.another\.architecture"):
            engine.call("load_staged", other)
        assert engine.call("state_checksum") == halved != first
        engine.call("load_staged", staged)
        assert engine.call("state_checksum") == first
