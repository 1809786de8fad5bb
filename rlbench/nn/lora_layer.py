"""peft's linear layer with an adapter, by its formula alone where nothing else is asked of it.

Source: Hu et al. 2021, https://arxiv.org/abs/2106.09685
"""

from __future__ import annotations

from typing import Any

from peft.tuners.lora.layer import Linear
from torch import Tensor, nn
from torch.nn import functional


class PlainLoraLinear(Linear):  # type: ignore[misc]
    """Computes W x + alpha / rank · B A x as `peft.tuners.lora.Linear` does, to the bit, without the dozen of look-ups
    and module calls that peft's options need: at a few tokens they take longer than the products."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Compute `x` (…, in) to (…, out); by peft where one of its options is in use."""
        parts = None if args or kwargs or self._disable_adapters or self.merged_adapters else self._plain_parts()
        if parts is None or x.dtype != parts[0].dtype:
            return super().forward(x, *args, **kwargs)
        down, up, scale = parts
        result = self.base_layer(x)
        dtype = result.dtype
        result = result + functional.linear(functional.linear(x, down), up) * scale
        return result if result.dtype == dtype else result.to(dtype)

    def _plain_parts(self) -> tuple[Tensor, Tensor, float] | None:
        """Return A, B and factor of the only active adapter; None where it has dropout, hooks, a bias or a variant."""
        modules, active = self._modules, self.active_adapters
        if len(active) != 1 or active[0] in self.lora_variant:
            return None
        name = active[0]
        down, up, drop = (modules[kind]._modules.get(name) for kind in ("lora_A", "lora_B", "lora_dropout"))
        if type(down) is not nn.Linear or type(up) is not nn.Linear or type(drop) is not nn.Identity:
            return None
        if any(part._forward_hooks or part._forward_pre_hooks or part.bias is not None for part in (down, up)):
            return None
        return down.weight, up.weight, self.scaling[name]


def plain_layers(layers: list[Any]) -> None:
    """Have those that are peft's own linear layers compute so."""
    for layer in layers:
        if type(layer) is Linear:
            layer.__class__ = PlainLoraLinear
