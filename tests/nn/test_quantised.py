"""Weights in 4 and 8 bits: what bitsandbytes makes of them, and products with what they stand for."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import bitsandbytes.functional
import pytest
import torch
from torch import nn
from torch.nn.functional import linear
from transformers import AutoModelForCausalLM

import rlbench as rb
from rlbench.errors import BuildError
from rlbench.nn import lora
from rlbench.nn.quantised import KINDS, QuantisedLinear, quantise, quantised_layers
from rlbench.options import OptionError
from rlbench.session.building import check_models
from rlbench.session.options import SessionOptions
from tests.modules import qwen_on_meta


def layer(kind: str, dtype: torch.dtype = torch.float32) -> tuple[nn.Linear, QuantisedLinear]:
    torch.manual_seed(0)
    plain = nn.Linear(64, 96, dtype=dtype)
    quantised = QuantisedLinear(plain, kind)
    quantised.fill(plain.weight)
    return plain, quantised


@pytest.mark.parametrize(("kind", "error"), [("nf4", 0.12), ("int8", 0.02)])
def test_what_is_held_stands_for_nearly_the_weight_in_a_quarter_or_half_of_its_bytes(kind: str, error: float) -> None:
    plain, quantised = layer(kind, torch.bfloat16)
    whole = quantised.whole()
    assert whole.dtype == torch.bfloat16 and whole.shape == plain.weight.shape
    assert float((whole - plain.weight).float().std() / plain.weight.float().std()) < error
    held = sum(buffer.nbytes for buffer in quantised.buffers())
    assert held * 8 / whole.numel() == {"nf4": 4.5, "int8": 8.5}[kind]  # bits a weight, scales included


def test_four_bits_are_those_of_bitsandbytes_own_pair_of_functions() -> None:
    plain, quantised = layer("nf4")
    packed, state = bitsandbytes.functional.quantize_4bit(plain.weight.detach(), blocksize=64, quant_type="nf4")
    assert torch.equal(quantised.whole(), bitsandbytes.functional.dequantize_4bit(packed, state))


@pytest.mark.parametrize("kind", KINDS)
def test_a_product_and_its_gradient_are_those_of_the_whole_weight(kind: str) -> None:
    plain, quantised = layer(kind)
    x = torch.randn(5, 64, requires_grad=True)
    (own,) = torch.autograd.grad(quantised(x).square().sum(), x)
    (expected,) = torch.autograd.grad(linear(x, quantised.whole(), plain.bias).square().sum(), x)
    torch.testing.assert_close(own, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_a_gpu_holds_and_computes_what_a_host_does(kind: str) -> None:
    plain, quantised = layer(kind)
    there = QuantisedLinear(nn.Linear(64, 96), kind).to("cuda")
    there.bias = nn.Parameter(plain.bias.detach().cuda())
    there.fill(plain.weight)
    ours, theirs = quantised.whole(), there.whole().cpu()
    apart = ~torch.isclose(theirs, ours, atol=1e-6, rtol=1e-5)
    assert int(apart.sum()) <= (0 if kind == "nf4" else 4)  # where the host's int8 takes the second nearest value
    assert bool(((theirs - plain.weight).abs() <= (ours - plain.weight).abs())[apart].all())
    x = torch.randn(5, 64)
    results = []
    for one, device in ((quantised, "cpu"), (there, "cuda")):
        given = x.to(device).requires_grad_()
        out = one(given)
        results.append((out.cpu(), torch.autograd.grad(out.square().sum(), given)[0].cpu()))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(theirs, ours, atol=1e-2, rtol=1e-2)  # a GPU may multiply in TF32


def test_every_linear_layer_but_adapters_and_output_is_quantised(qwen: str) -> None:
    module = qwen_on_meta(qwen)
    lora.inject(module, 4, 8.0, ["q_proj"], 0.0)
    quantise(module, "nf4")
    assert len(quantised_layers(module)) == 14  # seven of two layers
    left = {path for path, part in module.named_modules() if type(part) is nn.Linear and ".lora_" not in path}
    assert left == {"lm_head"}


def test_without_bitsandbytes_the_error_says_what_to_install(qwen: str, monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    monkeypatch.delitem(sys.modules, "bitsandbytes.functional")
    with pytest.raises(BuildError, match="pip install bitsandbytes"):
        quantise(qwen_on_meta(qwen), "nf4")


def test_a_checkpoint_that_is_quantised_already_is_refused(qwen: str, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(qwen)
    model.config.quantization_config = {"quant_method": "awq", "bits": 4}
    model.config.save_pretrained(tmp_path)
    with pytest.raises(BuildError, match=r"awq.*base='nf4'"):
        check_models(str(tmp_path))


@pytest.mark.parametrize("train", [rb.Train(), rb.Train(lora=rb.Lora(base="nf4"))])
def test_replicas_do_not_hold_adapters_of_a_policy_without_or_on_a_quantised_base(train: rb.Train) -> None:
    with pytest.raises(OptionError, match="adapters=2"):
        SessionOptions("tiny", "folder", train=train, inference=rb.Inference(adapters=2))
