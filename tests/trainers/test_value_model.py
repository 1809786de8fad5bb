"""The critic's values are those of transformers' backbone and a head, each sequence alone, however laid out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    MixtralConfig,
    MixtralForCausalLM,
)

from rlbench.errors import BuildError, EngineError
from rlbench.strategies import FSDPV2Strategy
from rlbench.trainers.models.value_model import CriticModel, make_critic, valued, values_of
from tests.modules import VOCAB, batch_of, qwen_on_meta
from tests.ranks import Ranks, ranks
from tests.trainers.update_reference import (
    LENGTHS,
    assert_same,
    experience,
    fake,
    gradients,
    values_by_hand,
    weights_of,
)

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def engine(qwen: str) -> Any:
    with ranks(2, qwen_on_meta(qwen)) as made:
        yield made


def critic_of(path: str, **own: Any) -> Any:
    return fake().prepare_model(make_critic(path, **{"seed": 3, **own}), is_training=True)


@pytest.mark.parametrize("packed", [True, False])
def test_values_are_those_of_each_sequence_alone(qwen: str, packed: bool) -> None:
    critic, batch = critic_of(qwen), batch_of(LENGTHS)
    assert isinstance(critic, CriticModel)
    expected = torch.cat(values_by_hand(AutoModel.from_pretrained(qwen), critic.score.weight, experience()))
    found = values_of(critic, batch, CPU, packed)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert found.shape == (batch.tokens,) and found.dtype == torch.float32 and found.requires_grad
    assert float(expected.detach().std()) > 0.05  # they could differ


def test_the_value_before_a_token_does_not_know_the_token(qwen: str) -> None:
    critic, batch = critic_of(qwen), batch_of([(3, 6)])
    other = batch.replace(responses=batch.responses.with_values((batch.responses.values + 1) % VOCAB))
    for packed in (True, False):
        ours, theirs = values_of(critic, batch, CPU, packed), values_of(critic, other, CPU, packed)
        assert torch.equal(ours[0], theirs[0]) and not torch.isclose(ours[1:], theirs[1:]).any()


def test_an_untrained_head_is_drawn_small_and_by_its_seed_alone(qwen: str) -> None:
    torch.manual_seed(1)
    first = critic_of(qwen, seed=5).score.weight
    torch.manual_seed(2)
    assert torch.equal(first, critic_of(qwen, seed=5).score.weight)
    assert not torch.equal(first, critic_of(qwen, seed=6).score.weight)
    many = torch.cat([critic_of(qwen, seed=seed).score.weight.detach() for seed in range(10)])
    assert float(many.std()) == pytest.approx(1 / 33, rel=0.1) and abs(float(many.mean())) < 0.005
    torch.manual_seed(2)
    first_draw = torch.rand(1)
    torch.manual_seed(2)
    critic_of(qwen)
    assert torch.equal(torch.rand(1), first_draw)  # the program's own draws are as without a critic


def test_ranks_of_any_number_hold_the_same_critic_and_give_the_same_values(qwen: str, engine: Ranks) -> None:
    batch = batch_of(LENGTHS)

    def made() -> Any:
        strategy = FSDPV2Strategy(bf16=False)
        critic = strategy.prepare_model(make_critic(qwen, seed=3), is_training=True)
        found = {packed: values_of(critic, batch, CPU, packed).detach() for packed in (True, False)}
        return weights_of(critic), found, type(critic.score.weight).__name__

    alone = critic_of(qwen)
    for weights, found, kind in engine.run(made):
        assert kind == "DTensor"
        assert_same(weights, weights_of(alone), atol=0)
        for packed, values in found.items():
            torch.testing.assert_close(values, values_of(alone, batch, CPU, packed).detach(), rtol=0, atol=1e-5)


def test_a_critic_is_kept_and_comes_back_with_its_head(qwen: str, engine: Ranks, tmp_path: Path) -> None:
    batch = batch_of(LENGTHS)

    def kept() -> Any:
        strategy = FSDPV2Strategy(bf16=False)
        critic = strategy.prepare_model(make_critic(qwen, seed=3), is_training=True)
        optimizer = strategy.create_optimizer(critic, lr=1e-2)
        strategy.backward(values_of(critic, batch, CPU, True).square().sum(), critic, optimizer)
        strategy.step_now(optimizer, critic)
        strategy.save_ckpt(critic, str(tmp_path / "ckpt"), "one", optimizer=optimizer)
        strategy.save_model(critic, None, str(tmp_path / "folder"))
        again = strategy.prepare_model(make_critic(str(tmp_path / "folder"), seed=99), is_training=True)
        return values_of(critic, batch, CPU, True).detach(), values_of(again, batch, CPU, True).detach()

    trained, again = engine.run(kept)[0]
    torch.testing.assert_close(again, trained, rtol=0, atol=0)
    assert not torch.allclose(trained, values_of(critic_of(qwen), batch, CPU, True), atol=1e-3)
    back = fake()
    empty = make_critic(qwen, seed=50)
    back.load_ckpt(empty, str(tmp_path / "ckpt"), None)
    torch.testing.assert_close(values_of(empty, batch, CPU, True).detach(), trained, rtol=0, atol=1e-5)
    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path / "folder")
    ids = torch.tensor([[5, 6, 7, 8]])
    assert torch.allclose(plain(ids).logits[0, 0], empty(ids)[-1], atol=1e-5)


def test_a_checkpoint_with_a_head_of_another_name_is_understood(qwen: str, tmp_path: Path) -> None:
    head = torch.randn(1, 32)
    tensors = load_file(f"{qwen}/model.safetensors") | {"value_head.weight": head}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((Path(qwen) / "config.json").read_text())
    assert torch.equal(critic_of(str(tmp_path), value_head_prefix="value_head").score.weight, head)
    with pytest.raises(BuildError, match=r"unknown \['value_head.weight'\].*value_head_prefix"):
        critic_of(str(tmp_path))


def test_a_checkpoint_of_the_bare_backbone_makes_a_critic(qwen: str, tmp_path: Path) -> None:
    AutoModel.from_pretrained(qwen).save_pretrained(tmp_path)
    assert "model.norm.weight" not in load_file(tmp_path / "model.safetensors")
    batch = batch_of(LENGTHS)
    bare, whole = (values_of(critic_of(path), batch, CPU, True) for path in (str(tmp_path), qwen))
    assert torch.equal(bare, whole)


@pytest.mark.parametrize("kind", ["mixtral", "gpt2"])
def test_other_architectures_work_where_their_names_on_disk_differ_too(kind: str, tmp_path: Path) -> None:
    """Experts lie apart on disk and together in the module; GPT-2 calls its backbone `transformer`."""
    torch.manual_seed(0)
    shape = {"vocab_size": VOCAB, "hidden_size": 32, "num_attention_heads": 4}
    if kind == "mixtral":
        model: Any = MixtralForCausalLM(
            MixtralConfig(
                **shape,
                intermediate_size=48,
                num_hidden_layers=2,
                num_key_value_heads=2,
                num_local_experts=4,
            )
        )
    else:
        model = GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, n_embd=32, n_head=4, n_layer=2, n_positions=64))
    model.save_pretrained(tmp_path)
    critic = critic_of(str(tmp_path))
    critic.eval()
    backbone = AutoModel.from_pretrained(tmp_path)
    expected = torch.cat(values_by_hand(backbone.eval(), critic.score.weight, experience()))
    for packed in (False, True):
        found = values_of(critic, batch_of(LENGTHS), CPU, packed)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_what_has_no_scalar_head_over_a_causal_model_is_refused(qwen: str, tmp_path: Path) -> None:
    config = BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    BertModel(config).save_pretrained(tmp_path)
    with pytest.raises(BuildError, match="'bert' model, for which transformers has no scalar head"):
        make_critic(str(tmp_path))
    with pytest.raises(BuildError, match="no model at"):
        make_critic(str(tmp_path / "nowhere"))
    with pytest.raises(BuildError, match="float32, bfloat16, float16"):
        make_critic(qwen, dtype="float23")


def test_gradient_checkpointing_gives_the_same_gradient_packed_and_refuses_what_would_not(qwen: str) -> None:
    """The layers run again in the backward, when the packed attention must still be on."""
    batch = batch_of(LENGTHS)
    plain, saving = critic_of(qwen), critic_of(qwen, gradient_checkpointing=True)
    assert saving.is_gradient_checkpointing and saving.training
    for critic in (plain, saving):
        with valued(critic, batch, CPU, packed=True) as (values, _):
            values.square().sum().backward()
    assert_same(gradients(saving), gradients(plain), atol=1e-5)
    with pytest.raises(EngineError, match="inside `with valued"):
        values_of(saving, batch, CPU, packed=True)
    with torch.no_grad():
        assert torch.allclose(values_of(saving, batch, CPU, True), values_of(plain, batch, CPU, True), atol=1e-6)


def test_layers_that_look_across_sequences_are_found_out(qwen: str) -> None:
    critic = critic_of(qwen)
    critic.model.layers[1].register_forward_hook(lambda module, given, out: out + out.cumsum(1) * 0.1)
    with pytest.raises(EngineError, match="its layers look across sequences"):
        values_of(critic, batch_of(LENGTHS), CPU, packed=True)


def test_values_keep_their_digits_where_the_model_computes_in_half_precision(qwen: str) -> None:
    strategy = fake(bf16=True)
    critic = strategy.prepare_model(make_critic(qwen, seed=3), is_training=True)
    batch = batch_of(LENGTHS)
    for packed in (True, False):
        values = values_of(critic, batch, CPU, packed).detach()
        exact = values_of(critic_of(qwen), batch, CPU, packed).detach()
        assert values.dtype == torch.float32
        assert not torch.equal(values, values.bfloat16().float())  # more digits than bfloat16 has
        assert float((values - exact).abs().max()) < 0.05
    assert critic.in_half
