"""Names of weights: tied ones once, a checkpoint's own, and mismatches named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

import rlbench.nn
from rlbench.errors import WeightSyncError
from rlbench.weights.names import (
    check_names,
    checkpoint_shapes,
    to_checkpoint_names,
    unique_parameters,
    weight_files,
)
from tests.families.shapes import small_config


def model(tied: bool) -> Qwen2ForCausalLM:
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=50,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=1,
            num_key_value_heads=1,
            tie_word_embeddings=tied,
        )
    )


@pytest.mark.parametrize("tied", [True, False])
def test_what_is_sent_is_what_the_saved_checkpoint_holds(tmp_path: Path, tied: bool) -> None:
    made = model(tied)
    sent = to_checkpoint_names(made, unique_parameters(made))
    assert ("lm_head.weight" in sent) is not tied
    for size in ("50KB", "1GB"):  # in several files with an index, and in one
        folder = tmp_path / size
        made.save_pretrained(folder, max_shard_size=size)
        held = checkpoint_shapes(folder)
        assert held == {name: tuple(tensor.shape) for name, tensor in sent.items()}
        check_names({name: tuple(tensor.shape) for name, tensor in sent.items()}, held)
    torch.save(made.state_dict(), tmp_path / "pytorch_model.bin")
    check_names(held, checkpoint_shapes(tmp_path), tied=["lm_head.weight"] if tied else [])


@pytest.mark.parametrize("family", ["gpt_neox", "qwen3_moe", "mixtral", "gpt2"])
def test_a_class_of_the_users_own_sends_the_names_of_its_architecture(family: str) -> None:
    config = small_config(family)
    with torch.device("meta"):
        plain = AutoModelForCausalLM.from_config(config)
        own = type("MyModel", (rlbench.nn.HuggingFaceFsdp2TrainModule, type(plain)), {})(config)
    names = to_checkpoint_names(plain, unique_parameters(plain))
    assert list(to_checkpoint_names(own, unique_parameters(own))) == list(names)
    assert type(own).__name__ == "MyModel"
    if family == "gpt_neox":
        assert "embed_out.weight" in names  # else nothing was renamed, and nothing is proved


def test_buffers_of_a_checkpoint_are_sent_and_others_are_not() -> None:
    module = torch.nn.Module()
    module.register_buffer("kept", torch.ones(2))
    module.register_buffer("derived", torch.ones(2), persistent=False)
    module.weight = torch.nn.Parameter(torch.ones(3))
    assert set(unique_parameters(module)) == {"weight", "kept"}
    assert to_checkpoint_names(module, {"weight": module.weight}) == {"weight": module.weight}


def test_mismatches_are_named() -> None:
    held = {"a.weight": (2, 3), "b.weight": (4,)}
    check_names(held, held)
    with pytest.raises(WeightSyncError, match=r"does not know b\.wieght; nearest: b\.weight.*did not send b\.weight"):
        check_names({"a.weight": (2, 3), "b.wieght": (4,)}, held)
    with pytest.raises(WeightSyncError, match=r"a\.weight \(3, 2\) instead of \(2, 3\)"):
        check_names({**held, "a.weight": (3, 2)}, held)
    with pytest.raises(WeightSyncError, match="lm_head"):
        check_names({**held, "lm_head.weight": (1,)}, held)
    check_names({**held, "lm_head.weight": (1,)}, held, tied=["lm_head.weight"])


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightSyncError, match="no weights"):
        checkpoint_shapes(tmp_path)


def test_a_stray_file_hides_no_weights(tmp_path: Path) -> None:
    for name in ("pytorch_model.bin", "adapter_model.safetensors"):
        (tmp_path / name).touch()
    assert [path.name for path in weight_files(tmp_path)] == ["pytorch_model.bin"]
