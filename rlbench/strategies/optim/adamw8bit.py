"""bitsandbytes' AdamW, which holds its moments in 8 bits, over parameters that FSDP2 holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import bitsandbytes
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from rlbench.checkpoint.tensor_files import local_part
from rlbench.errors import EngineError
from rlbench.strategies.optim.gradients import is_split


class AdamW8bit(bitsandbytes.optim.AdamW8bit):  # type: ignore[misc]
    """Moments of tensors of 4096 values on are held in 8 bits, with one scale for each 256 values of the whole tensor:
    for parameters that are not split."""

    def __init__(self, params: Sequence[Tensor], **options: Any) -> None:
        if split := sum(is_split(p) or (isinstance(p, DTensor) and p.device_mesh.size() > 1) for p in params):
            raise EngineError(
                f"adamw8bit has one scale for each 256 values of a whole tensor, and {split} parameters are split over "
                'ranks: rb.Train(shards=1), or "adamw" with fsdp_cpu_offload=True'
            )
        super().__init__(params, **options)

    @torch.no_grad()
    def update_step(self, group: dict[str, Any], p: Tensor, gindex: int, pindex: int) -> None:
        """Step the plain tensor that a parameter is made of: kernels of bitsandbytes take no other."""
        assert p.grad is not None
        plain, state = torch.nn.Parameter(local_part(p.detach())), self.state[p]
        plain.grad = local_part(p.grad)
        self.state[plain] = {key: local_part(v) if isinstance(v, Tensor) else v for key, v in state.items()}
        super().update_step(group, plain, gindex, pindex)
        state["step"] = self.state.pop(plain)["step"]
