"""Linear layers whose frozen weight is held in 4 or 8 bits, and made whole for each product: the base of adapters.

"nf4" is QLoRA's (Dettmers et al. 2023, https://arxiv.org/abs/2305.14314), "int8" the blockwise map of Dettmers et al.
2022 (https://arxiv.org/abs/2110.02861); both in blocks of 64 with a float32 scale each, by bitsandbytes, which has
kernels for CPUs and GPUs. The numbers lie in buffers: FSDP shards parameters alone, so each rank holds all of them.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from rlbench.errors import BuildError

BLOCK = 64
KINDS = ("nf4", "int8")


class QuantisedLinear(nn.Module):
    """A linear layer in the place of `layer`, whose weight `fill` gives; `dtype`: of the weight when it is whole."""

    packed: Tensor
    scales: Tensor

    def __init__(self, layer: nn.Linear, kind: str) -> None:
        super().__init__()
        self.kind, self.dtype = kind, layer.weight.dtype
        self.out_features, self.in_features = layer.out_features, layer.in_features
        count, device = self.out_features * self.in_features, layer.weight.device
        packed = torch.empty(count // (2 if kind == "nf4" else 1), dtype=torch.uint8, device=device)
        # no part of a state dict: what a checkpoint holds is the weight itself
        self.register_buffer("packed", packed, False)
        self.register_buffer("scales", torch.empty(count // BLOCK, device=device), False)
        self.bias = layer.bias

    @property
    def shape(self) -> tuple[int, int]:
        """Of the weight."""
        return self.out_features, self.in_features

    @torch.no_grad()
    def fill(self, weight: Tensor) -> None:
        """Take a weight (out, in) of any floating dtype."""
        functional = _bitsandbytes()
        weight = weight.to(self.packed.device, torch.float32).contiguous()
        if self.kind == "nf4":
            packed, state = functional.quantize_4bit(weight, blocksize=BLOCK, quant_type="nf4")
        else:
            packed, state = functional.quantize_blockwise(weight, blocksize=BLOCK)
        self.packed.copy_(packed.flatten())
        self.scales.copy_(state.absmax)

    @torch.no_grad()
    def whole(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the weight (out, in) that the layer computes with, in `dtype` (None: the layer's own)."""
        shape, dtype = torch.Size(self.shape), dtype or self.dtype
        if self.packed.is_meta:
            return torch.empty(shape, dtype=dtype, device="meta")
        functional = _bitsandbytes()
        code = _code(self.kind, self.packed.device)
        made: Any = {"absmax": self.scales, "code": code, "blocksize": BLOCK, "dtype": dtype, "shape": shape}
        if self.kind == "nf4":
            state = functional.QuantState(**made, quant_type="nf4")
            return functional.dequantize_4bit(self.packed[:, None], state).reshape(shape)  # type: ignore[no-any-return]
        state = functional.QuantState(**made)
        return functional.dequantize_blockwise(self.packed.reshape(shape), state).to(dtype)  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        """As of `nn.Linear`; the backward makes the weight whole again instead of holding it."""
        product: Tensor = _Product.apply(x, self)
        return product if self.bias is None else product + self.bias.to(product.dtype)

    def extra_repr(self) -> str:
        """What torch prints of it."""
        return f"in_features={self.in_features}, out_features={self.out_features}, {self.kind}"


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: QuantisedLinear) -> Tensor:
        ctx.layer = layer
        return linear(x, layer.whole(x.dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        return gradient @ ctx.layer.whole(gradient.dtype), None


def quantise(module: nn.Module, kind: str) -> None:
    """Replace the linear layers of a module on meta, but adapters and the output layer, by quantised ones."""
    _bitsandbytes()
    find = getattr(module, "get_output_embeddings", None)
    output = find() if callable(find) else None
    plain = [
        (path, layer)
        for path, layer in module.named_modules()
        if type(layer) is nn.Linear and layer is not output
        if ".lora_" not in path and layer.weight.numel() % BLOCK == 0
    ]
    if not plain:
        raise BuildError(f"lora base={kind!r}: {type(module).__name__} has no linear layer that could be quantised.")
    for path, layer in plain:
        owner, _, name = path.rpartition(".")
        setattr(module.get_submodule(owner), name, QuantisedLinear(layer, kind))


def quantised_layers(module: nn.Module) -> dict[str, QuantisedLinear]:
    """Return the quantised layers by path."""
    return {path: layer for path, layer in module.named_modules() if isinstance(layer, QuantisedLinear)}


_codes: dict[tuple[str, torch.device], Tensor] = {}


def _code(kind: str, device: torch.device) -> Tensor:
    """Return the numbers that the stored ones stand for."""
    if (kind, device) not in _codes:
        functional = _bitsandbytes()
        made = functional.get_4bit_type("nf4", device=device) if kind == "nf4" else functional.create_dynamic_map()
        _codes[kind, device] = made.to(device)
    return _codes[kind, device]


def _bitsandbytes() -> Any:
    try:
        logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # of kernels it could download, and we do not use
        import bitsandbytes.functional
    except ImportError as error:
        raise BuildError(
            f"a base in 4 or 8 bits needs bitsandbytes, which cannot be imported ({error}): pip install bitsandbytes, "
            "or leave base= out"
        ) from error
    return bitsandbytes.functional
