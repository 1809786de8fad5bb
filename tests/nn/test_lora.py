"""Adapters in a module: what peft itself computes of the same numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora.layer import Linear
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from rlbench.data.base.routing import FAMILIES
from rlbench.errors import BuildError
from rlbench.nn import lora
from rlbench.nn.lora import Adapted, adapters_off, plain_name
from rlbench.nn.lora_layer import PlainLoraLinear
from rlbench.options import OptionError
from rlbench.trainers.models.lora import Lora
from tests.modules import qwen_on_meta
from tests.trainers.routed_models import mixture

IDS = torch.arange(12)[None]


def trained(model: Any) -> Any:
    """The model with adapters in memory that compute something."""
    torch.manual_seed(2)
    for layer in Adapted.of(model).layers.values():
        for held in (layer.lora_A[lora.NAME], layer.lora_B[lora.NAME]):
            held.weight = torch.nn.Parameter(0.2 * torch.randn(held.weight.shape))
    return model


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach()


def gpt2(tmp_path: Any) -> str:
    torch.manual_seed(0)
    GPT2LMHeadModel(GPT2Config(vocab_size=96, n_embd=32, n_layer=2, n_head=4)).save_pretrained(tmp_path)
    return str(tmp_path)


@pytest.fixture(params=["qwen", "gpt2"])  # of which one keeps its weights transposed
def adapted(request: pytest.FixtureRequest, qwen: str, tmp_path: Any) -> Any:
    """A model in memory with adapters that have been trained."""
    path = qwen if request.param == "qwen" else gpt2(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(path)
    lora.inject(model, 4, 12.0, ["all-linear"], 0.0)
    model.path = path
    return trained(model)


def test_merged_weights_compute_what_the_adapters_compute(adapted: Any) -> None:
    adapters = Adapted.of(adapted).adapter_names()
    state = {
        plain_name(name): Adapted.of(adapted).merged(name, p.detach(), whole)
        for name, p in adapted.named_parameters()
        if name not in adapters
    }
    plain = AutoModelForCausalLM.from_pretrained(adapted.path)
    before = plain(IDS).logits
    plain.load_state_dict(state, strict=False)
    assert set(state) == dict(plain.named_parameters()).keys()
    torch.testing.assert_close(plain(IDS).logits, adapted(IDS).logits, atol=1e-5, rtol=1e-5)
    assert (plain(IDS).logits - before).abs().max() > 0.1


@pytest.mark.parametrize("family", FAMILIES)
def test_of_a_mixture_the_linear_layers_alone_are_adapted(family: str, tmp_path: Any) -> None:
    mixture(family).save_pretrained(tmp_path)
    plain, model = (AutoModelForCausalLM.from_pretrained(tmp_path) for _ in range(2))
    lora.inject(model, 4, 12.0, ["all-linear"], 0.0)
    assert model.config.model_type == family and vars(model.config).keys() == vars(plain.config).keys()
    linear = {path for path, layer in plain.named_modules() if isinstance(layer, torch.nn.Linear)} - {"lm_head"}
    assert Adapted.of(model).layers.keys() == linear
    before, trained_model = plain(IDS).logits, trained(model)
    state = {
        plain_name(name): Adapted.of(model).merged(name, p.detach(), whole)
        for name, p in trained_model.named_parameters()
        if name not in Adapted.of(model).adapter_names()
    }
    plain.load_state_dict(state)
    torch.testing.assert_close(plain(IDS).logits, trained_model(IDS).logits, atol=1e-4, rtol=1e-4)
    assert (plain(IDS).logits - before).abs().max() > 0.01


def test_without_its_adapters_a_module_is_its_base(adapted: Any) -> None:
    after, base = adapted(IDS).logits, AutoModelForCausalLM.from_pretrained(adapted.path)(IDS).logits
    with torch.no_grad(), adapters_off(adapted):
        assert torch.equal(adapted(IDS).logits, base)
    assert torch.equal(adapted(IDS).logits, after)
    assert all(p.requires_grad for _, _, p in Adapted.of(adapted).parameters())  # peft's own switch freezes them


def test_adapters_are_those_peft_would_make(adapted: Any) -> None:
    config = LoraConfig(r=4, lora_alpha=12.0, target_modules="all-linear", task_type="CAUSAL_LM")
    theirs = get_peft_model(AutoModelForCausalLM.from_pretrained(adapted.path), config)
    expected = {name.removeprefix("base_model.model."): p for name, p in theirs.named_parameters() if p.requires_grad}
    assert Adapted.of(adapted).adapter_names() == expected.keys()
    assert {name for name, p in adapted.named_parameters() if p.requires_grad} == expected.keys()


def test_b_begins_at_zero_and_a_depends_on_seed_and_name_alone() -> None:
    a = lora.initial("layer.lora_A.default.weight", (4, 16), seed=1)
    assert torch.equal(a, lora.initial("layer.lora_A.default.weight", (4, 16), seed=1))
    assert not torch.equal(a, lora.initial("other.lora_A.default.weight", (4, 16), seed=1))
    assert not torch.equal(a, lora.initial("layer.lora_A.default.weight", (4, 16), seed=2))
    assert a.abs().max() <= 16**-0.5 and a.std() > 0.1  # uniform within 1 / sqrt(in), as peft draws it
    assert not lora.initial("layer.lora_B.default.weight", (16, 4), seed=1).any()


def test_dropout_acts_in_passes_with_a_gradient_alone(qwen: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(qwen).eval()
    lora.inject(model, 4, 12.0, ["all-linear"], 0.5)
    trained(model)
    assert not torch.equal(model(IDS).logits, model(IDS).logits)
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, model(IDS).logits)


def test_an_unknown_layer_is_named_with_the_nearest(qwen: str) -> None:
    with pytest.raises(BuildError, match=r"query_proj.*q_proj"):
        lora.inject(qwen_on_meta(qwen), 4, 8.0, ["query_proj"], 0.0)


def test_named_layers_alone_get_adapters(qwen: str) -> None:
    module = qwen_on_meta(qwen)
    lora.inject(module, 4, 8.0, ["q_proj", "layers.1.mlp.down_proj"], 0.0)
    ends = {path.rpartition(".")[2] for path in Adapted.of(module).layers}
    assert ends == {"q_proj", "down_proj"} and len(Adapted.of(module).layers) == 3


@pytest.mark.parametrize(
    "options", [{"rank": 0}, {"alpha": 0}, {"targets": []}, {"targets": "all-linear,q_proj"}, {"dropout": 1}, {"r": 8}]
)
def test_options_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=next(iter(options))):
        Lora(**options)


def test_alpha_is_twice_the_rank_unless_it_is_given() -> None:
    assert (Lora(rank=8).scale, Lora(rank=8, alpha=8).scale) == (16.0, 8.0)
    assert Lora(targets="q_proj, v_proj").targets == ("q_proj", "v_proj")


def steps(model: Any, ids: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Logits, and the gradients of the adapters."""
    model.zero_grad()
    logits = model(ids).logits
    logits.square().mean().backward()
    return logits.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]


def test_a_layer_computes_what_pefts_own_does_to_the_bit(adapted: Any) -> None:
    layers = list(Adapted.of(adapted).layers.values())
    assert {type(layer) for layer in layers} == {PlainLoraLinear}
    logits, gradients = steps(adapted, IDS)
    for layer in layers:
        layer.__class__ = Linear
    expected, wanted = steps(adapted, IDS)
    assert torch.equal(logits, expected) and len(gradients) == len(wanted) > 0
    assert all(map(torch.equal, gradients, wanted))


@pytest.mark.parametrize("change", ["off", "two", "hook", "half", "dropout", "merged"])
def test_what_pefts_options_ask_of_a_layer_is_done_by_peft(change: str, qwen: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(qwen)
    lora.inject(model, 4, 12.0, ["all-linear"], 0.5 if change == "dropout" else 0.0)
    layer = next(iter(Adapted.of(trained(model)).layers.values()))
    x, seen = torch.randn(3, layer.in_features), []
    if change == "off":
        layer._disable_adapters = True
    if change == "two":
        layer.update_layer("more", 2, 2.0, LoraConfig(r=2, init_lora_weights=False))
        layer.set_adapter([lora.NAME, "more"])
    if change == "hook":
        layer.lora_A[lora.NAME].register_forward_hook(lambda *_: seen.append(1))
    if change == "half":
        layer.lora_A.to(torch.bfloat16), layer.lora_B.to(torch.bfloat16)
    if change == "merged":
        layer.merge()
    torch.manual_seed(5)
    found = layer(x)
    layer.__class__ = Linear
    torch.manual_seed(5)
    assert torch.equal(found, layer(x)) and len(seen) == (2 if change == "hook" else 0)
