"""A plan of a training rank against a rank that takes the step: tensors by owner, within 15 %."""

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

import rlbench as rb
from rlbench.session.planning.uses import RANK
from rlbench.strategies.memory.live import LiveMemory
from rlbench.tiny.cache import ensure
from rlbench.trainers.passes.attention import packed_attention
from rlbench.trainers.passes.chunked_head import Head
from tests.session.planning.measuring import LENGTH, TOKENS, assert_as_planned

ONE_MILLION = {
    "vocab_size": 2048,
    "hidden_size": 128,
    "intermediate_size": 320,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


@pytest.fixture(scope="module")
def one_million(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder: Path = tmp_path_factory.mktemp("tied")
    Qwen2ForCausalLM(Qwen2Config(**ONE_MILLION, tie_word_embeddings=True)).save_pretrained(folder)
    return str(folder)


def test_a_plain_pass_in_this_process_takes_what_was_planned(one_million):
    """The quick one: without ranks, thus without what they gather and hold beside."""
    tokens = 4 * TOKENS  # of fewer, the highest moment is among the gradients
    model = Qwen2ForCausalLM.from_pretrained(one_million)
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.vocab_size, (1, tokens), generator=random)
    places = torch.arange(LENGTH).repeat(tokens // LENGTH)[None]
    with packed_attention(model, [LENGTH] * (tokens // LENGTH)), LiveMemory([*model.parameters()]) as live:
        kept = torch.arange(tokens - 1)
        options = {"position_ids": places, "logits_to_keep": kept, "use_cache": False}
        found = Head.of(model).run(lambda: model(input_ids=ids, **options).logits, None, ids[0, 1:], 1.0)
        (found.logprobs.sum() + found.entropy.sum()).backward()
    gradients = sum(parameter.grad.nbytes for parameter in model.parameters())
    foretold = rb.plan(one_million, gpus="0x100GiB", lengths=LENGTH, token_budget=tokens)
    owners = ("activations", "logits")
    assert foretold.of(RANK, "gradients") == gradients
    assert sum(foretold.of(RANK, owner) for owner in owners) == pytest.approx(live.peak - gradients, rel=0.15)


@pytest.mark.slow
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


@pytest.mark.slow
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
