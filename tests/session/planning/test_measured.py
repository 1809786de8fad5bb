"""A plan of a training rank against a rank that takes the step: tensors by owner, within 15 %."""

from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

import rlbench as rb
from rlbench.session.checks.rehearsal import worst_batch
from rlbench.session.planning.plan import plan
from rlbench.session.planning.uses import RANK
from rlbench.tiny.cache import ensure
from rlbench.trainers.models.policy_spec import PolicySpec
from tests.ranks import ranks

TOKENS, LENGTH = 1024, 128
HELD = ("weights", "gradients", "optimizer")
ONE_MILLION = {
    "vocab_size": 2048,
    "hidden_size": 128,
    "intermediate_size": 320,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


BEGIN = """
from rlbench.strategies.memory.live import LiveMemory
live = LiveMemory([*module.parameters(), *module.buffers()])
live.__enter__()
"""
END = """
live.__exit__(None, None, None)
live.peak
"""
ON_GPU = "import torch; torch.cuda.reset_peak_memory_stats(); before = torch.cuda.memory_allocated()"
HIGHEST = "torch.cuda.max_memory_allocated() - before"


def measured(path: str, train: dict[str, Any], count: int) -> dict[str, int]:
    """Bytes by owner of the first rank in its second step, of two micro-batches; `pass`: what comes and goes."""
    ours = ("gradient_checkpointing", "dtype", "lora")
    spec = PolicySpec(path, **{name: value for name, value in train.items() if name in ours})
    with ranks(count, **{name: value for name, value in train.items() if name not in ours}) as engine:
        vocabulary = engine.build(spec)[0]["vocab_size"]
        batch = worst_batch(2 * TOKENS, LENGTH, count, vocabulary)
        step = (batch, cloudpickle.dumps("grpo"), {"token_budget": TOKENS})
        engine.call("policy_forward_backward", *step)
        engine.call("policy_optim_step", {})
        on_gpu = train.get("device") == "cuda"
        engine.run(ON_GPU if on_gpu else BEGIN)
        engine.call("policy_forward_backward", *step)
        peak = int(engine.run(HIGHEST if on_gpu else END)[0])
        engine.call("release_memory_cache", False, False)  # which counts again
        held = engine.call("memory")[0]
        found = {owner: int(held[owner]) for owner in HELD}
        return {**found, "pass": peak - found["gradients"]}


def planned(path: str, train: dict[str, Any], count: int) -> dict[str, int]:
    gpus = f"{count}x100GiB" if train.get("device") == "cuda" else "0x100GiB"
    found = plan(path, train={**train, "shards": count}, gpus=gpus, lengths=LENGTH, token_budget=TOKENS)
    there = 1 if found.request.devices.gpus else count
    owners = {use.owner: use.most // there for use in found.device if use.role == RANK}
    for beside in ("allocator", "sync buffers"):
        owners.pop(beside, None)
    return {**{owner: owners.pop(owner) for owner in HELD}, "pass": sum(owners.values())}


def assert_as_planned(path: str, train: dict[str, Any] | None = None, count: int = 1) -> None:
    found, foretold = measured(path, train or {}, count), planned(path, train or {}, count)
    for owner in HELD:
        assert foretold[owner] == pytest.approx(found[owner], rel=0.01), owner
    assert foretold["pass"] == pytest.approx(found["pass"], rel=0.15)
    assert sum(foretold.values()) == pytest.approx(sum(found.values()), rel=0.15)


@pytest.fixture(scope="module")
def one_million(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder: Path = tmp_path_factory.mktemp("tied")
    Qwen2ForCausalLM(Qwen2Config(**ONE_MILLION, tie_word_embeddings=True)).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(
    ("train", "count"),
    [
        ({}, 1),
        ({}, 2),
        ({"gradient_checkpointing": True}, 1),
        ({"bf16": True}, 1),
        ({"fp16": True}, 1),
        ({"use_mp_opt": True}, 1),
        ({"lora": rb.Lora(rank=8)}, 1),
        ({"lora": rb.Lora(rank=8)}, 2),
        ({"lora": rb.Lora(rank=8, base="nf4")}, 1),
        ({"lora": rb.Lora(rank=8, base="int8"), "bf16": True}, 1),
    ],
    ids=str,
)
def test_a_rank_of_a_million_parameters_takes_what_was_planned(one_million, train, count):
    assert_as_planned(one_million, train, count)


def test_so_does_one_whose_checkpoint_is_in_half_precision_with_an_output_layer_of_its_own(tmp_path):
    model = LlamaForCausalLM(LlamaConfig(**ONE_MILLION, tie_word_embeddings=False)).to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    assert_as_planned(str(tmp_path))


@pytest.mark.gpu
@pytest.mark.parametrize("train", [{}, {"lora": rb.Lora(rank=8)}, {"lora": rb.Lora(rank=8, base="nf4")}], ids=str)
def test_so_does_one_on_a_gpu(train):
    assert_as_planned(str(ensure("bench-10m")), {**train, "device": "cuda"})


@pytest.mark.engine
def test_so_does_one_of_ten_million():
    assert_as_planned(str(ensure("bench-10m")))
