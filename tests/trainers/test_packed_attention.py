"""One flash kernel over a packed row on a GPU against the loop over its sequences, which runs everywhere."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rlbench.trainers.passes import attention
from rlbench.trainers.passes.attention import NAME, fits_one_kernel, packed_attention

LENGTHS = [5, 64, 64, 130, 1]


def attended(dtype: torch.dtype, window: int | None, after: list[int] | None, device: str = "cuda") -> list[Tensor]:
    """Output and gradients of attention over a row of `LENGTHS`, 4 heads on 2 of keys and values."""
    from transformers import AttentionInterface

    module: Any = nn.Module()
    module.config = SimpleNamespace(_attn_implementation="sdpa", _attn_implementation_internal="sdpa")
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, heads, sum(LENGTHS), 32) for heads in (4, 2, 2)]
    row = [torch.randn(shape, generator=generator).to(device, dtype).requires_grad_() for shape in shapes]
    with packed_attention(module, LENGTHS, after=after):
        out = AttentionInterface()[NAME](module, *row, None, sliding_window=window)[0]
        out.float().square().sum().backward()
    return [out, *(tensor.grad for tensor in row if tensor.grad is not None)]


def test_the_loop_is_taken_where_there_is_no_such_kernel() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        tensor = torch.zeros(1, 2, 4, 32, dtype=dtype)
        assert not fits_one_kernel(tensor, tensor)


@pytest.mark.gpu
@pytest.mark.parametrize("after", [None, [-1, -1, 1, 1, 0]], ids=["apart", "prompts-shared"])
@pytest.mark.parametrize("window", [None, 16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_one_kernel_gives_what_the_loop_gives(
    dtype: torch.dtype, window: int | None, after: list[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if torch.cuda.get_device_capability() < attention.FLASH_SINCE:
        pytest.skip("this GPU has no flash kernel")
    calls: list[int] = []
    kernel = attention._in_one_kernel
    monkeypatch.setattr(attention, "_in_one_kernel", lambda *args: calls.append(1) or kernel(*args))
    ours = attended(dtype, window, after)
    assert calls, "the kernel was not taken"
    monkeypatch.setattr(attention, "fits_one_kernel", lambda *_: False)
    loop = attended(dtype, window, after)
    exact = attended(torch.float32, window, after)
    for one, other, truth in zip(ours, loop, exact, strict=True):
        error = (other.float() - truth).abs().max()
        assert (one.float() - truth).abs().max() <= 2 * error + 1e-3
