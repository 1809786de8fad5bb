"""vLLM's kernel of RMS normalisation for a host, which it has and does not use: it takes eight operations of torch."""

from __future__ import annotations

import torch
from torch import Tensor
from vllm import ir

PROVIDER = "rlbench_host"
LANES = 8
"""Numbers that the kernel takes at a time: in rows of other lengths it reads on behind the end."""


def _takes(x: Tensor, weight: Tensor | None, variance_size: int | None, *beside: Tensor) -> bool:
    """Whether the kernel computes this, and as a trainer does: rows one behind the other, with a weight, in float32. In
    half precision it rounds once, and the trainer's model twice."""
    if weight is None or variance_size is not None or x.shape[-1] % LANES:
        return False
    return all(one.dtype == torch.float32 and one.is_contiguous() for one in (x, weight, *beside))


def _takes_norm(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> bool:
    return _takes(x, weight, variance_size)


def _takes_sum(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> bool:
    return _takes(x, weight, variance_size, x_residual)


@ir.ops.rms_norm.register_impl(PROVIDER, supports_args=_takes_norm)
def rms_norm(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> Tensor:
    """Compute w x / sqrt(mean(x²) + epsilon) over the last dimension."""
    output = torch.empty_like(x)
    torch.ops._C.rms_norm(output, x, weight, epsilon)
    return output


@ir.ops.fused_add_rms_norm.register_impl(PROVIDER, supports_args=_takes_sum, inplace=True)
def fused_add_rms_norm(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> tuple[Tensor, Tensor]:
    """Add `x` to `x_residual` and return the norm of the sum, and the sum, in their places."""
    torch.ops._C.fused_add_rms_norm(x, x_residual, weight, epsilon)
    return x, x_residual


def use_kernels() -> None:
    """Have vLLM in this process normalise by the kernels what they take, unless another order was chosen."""
    for op in (ir.ops.rms_norm, ir.ops.fused_add_rms_norm):
        if op.get_priority() == ["native"]:
            op.set_default([PROVIDER, "native"])
