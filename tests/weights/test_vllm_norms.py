"""vLLM's kernel of RMS normalisation for a host: by the formula, and only where it computes as a trainer does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from vllm import ir
from vllm.platforms import current_platform

from rlbench.weights.vllm_norms import PROVIDER, use_kernels

NATIVE = ["native"]
if "of_a_test" not in ir.ops.rms_norm.impls:
    ir.ops.rms_norm.register_impl("of_a_test")(ir.ops.rms_norm.impls["native"].impl_fn)
EPSILON = 1e-6


@pytest.fixture(autouse=True)
def kernels() -> Iterator[None]:
    current_platform.import_kernels()
    ops: list[Any] = [ir.ops.rms_norm, ir.ops.fused_add_rms_norm]
    held = [op.get_priority() for op in ops]
    for op in ops:
        op.set_default(NATIVE)
    use_kernels()
    yield
    for op, priority in zip(ops, held, strict=True):
        op.set_default(priority)


def by_formula(x: Tensor, weight: Tensor) -> Tensor:
    x = x.double()
    return x / (x.pow(2).mean(-1, keepdim=True) + EPSILON).sqrt() * weight.double()


@pytest.mark.parametrize("shape", [(5, 8), (1, 40), (3, 7, 320), (0, 16)], ids=str)
def test_norms_and_sums_are_those_of_the_formula(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x, beside, weight = torch.randn(shape), torch.randn(shape), torch.randn(shape[-1])
    assert ir.ops.rms_norm.dispatch(x, weight, EPSILON).provider == PROVIDER
    assert ir.ops.fused_add_rms_norm.dispatch(x, beside, weight, EPSILON).provider == PROVIDER
    close = {"atol": 2e-6, "rtol": 2e-6, "check_dtype": False}
    torch.testing.assert_close(ir.ops.rms_norm(x, weight, EPSILON), by_formula(x, weight), **close)
    held = x.clone(), beside.clone()
    norm, total = ir.ops.fused_add_rms_norm(x, beside, weight, EPSILON)
    torch.testing.assert_close(total, x + beside)
    torch.testing.assert_close(norm, by_formula(x + beside, weight), **close)
    assert torch.equal(x, held[0]) and torch.equal(beside, held[1]), "asked for values, it left what it was given"
    norm, total = ir.ops.fused_add_rms_norm.maybe_inplace(x, beside, weight, EPSILON)
    torch.testing.assert_close(norm, by_formula(held[0] + held[1], weight), **close)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param((torch.randn(3, 16).bfloat16(), torch.ones(16).bfloat16()), id="rounds once"),
        pytest.param((torch.randn(3, 12), torch.ones(12)), id="rows that it reads on behind"),
        pytest.param((torch.randn(3, 32)[:, :16], torch.ones(16)), id="rows that lie apart"),
        pytest.param((torch.randn(3, 16), None), id="without a weight"),
        pytest.param((torch.randn(3, 16), torch.ones(16), EPSILON, 8), id="a variance of a part"),
    ],
)
def test_what_it_does_not_compute_so_is_left_to_torch(case: tuple[Any, ...]) -> None:
    x, weight, *rest = case
    assert ir.ops.rms_norm.dispatch(x, weight, *(rest or (EPSILON,))).provider == "native"
    assert ir.ops.fused_add_rms_norm.dispatch(x, x, weight, *(rest or (EPSILON,))).provider == "native"


def test_an_order_that_somebody_chose_stays() -> None:
    ir.ops.rms_norm.set_default(["of_a_test", "native"])
    use_kernels()
    assert ir.ops.rms_norm.get_priority() == ["of_a_test"]
