"""The training state of a model that DeepSpeed trains, whole and by name: what FSDP2's checkpoints hold, too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlbench.checkpoint.rank_state import OPTIMIZER, State
from rlbench.strategies.optim.gradients import full_shape, gathered, is_split
from rlbench.strategies.zero.engine import MASTER, Zero

STEP = "step"


@dataclass(frozen=True)
class ZeroState(State):
    """Float32 weights and optimizer state, gathered one parameter at a time; rank 0 holds them all, in host memory,
    while a checkpoint is written."""

    zero: Zero | None = None

    def stepped(self, which: str) -> list[list[Tensor]]:
        """Return the model's parameters by the optimizer's groups, in whose place DeepSpeed has put flat tensors."""
        return [list(group) for group in self._zero.groups]

    @property
    def _zero(self) -> Zero:
        assert self.zero is not None
        return self.zero

    def module_tensors(self) -> dict[str, Tensor]:
        """Return every parameter as it is whole, without its numbers, and every buffer, but those that the module
        leaves to its source."""
        of_optimizer = {id(p) for group in self._zero.groups for p in group}
        tensors: dict[str, Tensor] = {}
        for name, parameter in self._parameters():
            dtype = torch.float32 if id(parameter) in of_optimizer else parameter.dtype
            tensors[f"parameter/{name}"] = torch.empty(full_shape(parameter), dtype=dtype, device="meta")
        return tensors | self._buffers()

    def _parameters(self) -> list[tuple[str, nn.Parameter]]:
        left = getattr(self.module, "left_to_source", ())
        return [(name, parameter) for name, parameter in self.module.named_parameters() if name not in left]

    def _buffers(self) -> dict[str, Tensor]:
        left = getattr(self.module, "left_to_source", ())
        return {f"buffer/{name}": buffer for name, buffer in self.module.named_buffers() if name not in left}

    def tensors(self) -> dict[str, Tensor]:
        """Gather every tensor to rank 0; collective. The other ranks hold none."""
        zero, leads = self._zero, dist.get_rank() == 0
        of_optimizer = {id(p) for group in zero.groups for p in group}
        held = {MASTER: zero.flats()} | {key: zero.flats(key) for key in (zero.state_keys if self.optimizers else [])}
        tensors: dict[str, Tensor] = {}

        def keep(name: str, whole: Tensor) -> None:
            if leads:
                tensors[name] = whole.to("cpu", copy=True)

        for name, parameter in self._parameters():
            if id(parameter) not in of_optimizer:
                keep(f"parameter/{name}", gathered(parameter) if is_split(parameter) else parameter.detach())
                continue
            for key, flats in held.items():
                whole = zero.whole(parameter, flats)
                keep(f"parameter/{name}" if key == MASTER else self._place(name, key), whole)
            if zero.steps is not None and self.optimizers:
                keep(self._place(name, STEP), zero.steps)
        for name, tensor in (self._buffers() | self.loss_tensors()).items():
            keep(name, tensor)
        return tensors

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Put back what `tensors` and `values` gave, after a `check`."""
        zero = self._zero
        names: dict[int, str] = {id(p): name for name, p in self.module.named_parameters()}
        for buffer_name, buffer in self.module.named_buffers():
            if (saved := tensors.get(f"buffer/{buffer_name}")) is not None:
                buffer.copy_(saved)
        stepped: list[nn.Parameter] = [p for group in zero.groups for p in group]
        if self.optimizers:
            self._load_state(zero, stepped, names, tensors, values)
        masters, of_optimizer = zero.flats(), {id(p) for p in stepped}
        for parameter in self.module.parameters():
            saved = tensors.get(f"parameter/{names[id(parameter)]}")
            if saved is None:
                continue
            zero.show(parameter, saved)
            if id(parameter) in of_optimizer:
                zero.put(parameter, masters, saved.float())
        self.load_beside(tensors, values)

    def _load_state(
        self,
        zero: Zero,
        stepped: list[nn.Parameter],
        names: Mapping[int, str],
        tensors: Mapping[str, Tensor],
        values: Mapping[str, Any],
    ) -> None:
        ((which, optimizer),) = self.optimizers.items()
        saved_groups = self.saved_groups(which, values["optimizers"][which])
        for group, settings in zip(optimizer.param_groups, saved_groups, strict=True):
            group.update(settings)
        found = [name.rpartition("/")[2] for name in tensors if name.startswith(f"{OPTIMIZER}{which}/")]
        keys = [key for key in dict.fromkeys(found) if key != STEP]
        counts = [t for name, t in tensors.items() if name.startswith(OPTIMIZER) and name.endswith(f"/{STEP}")]
        zero.begin(keys, max(counts, key=float) if counts else None)
        for key in keys:
            flats = zero.flats(key)
            for parameter in stepped:
                if (saved := tensors.get(self._place(names[id(parameter)], key))) is not None:
                    zero.put(parameter, flats, saved)

    def _place(self, name: str, key: str) -> str:
        return f"{OPTIMIZER}{next(iter(self.optimizers))}/{name}/{key}"
