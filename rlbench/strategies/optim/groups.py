"""Which parameters an optimizer steps together, and an optimizer that follows its parameters when they are sharded."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from rlbench.errors import EngineError
from rlbench.strategies.optim.gradients import local

NO_DECAY_NAMES = ("bias", "layer_norm.weight", "layernorm.weight", "norm.weight", "ln_f.weight")


def decays(name: str, parameter: Tensor) -> bool:
    """Whether weight decay applies: not to biases and norms, by name or because they have one dimension."""
    return parameter.dim() > 1 and not any(part in name.lower() for part in NO_DECAY_NAMES)


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """The trainable parameters in groups of equal dtype, shard count and weight decay.

    A fused step and the reduction of a gradient norm both need one dtype and one mesh.

    Raises:
        EngineError: nothing is trainable.
    """
    groups: defaultdict[tuple[Any, ...], list[nn.Parameter]] = defaultdict(list)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            shards = parameter.device_mesh.size() if isinstance(parameter, DTensor) else 1
            decay = weight_decay if decays(name, parameter) else 0.0
            groups[parameter.dtype, shards, decay].append(parameter)
    if not groups:
        raise EngineError(f"{type(model).__name__} has no trainable parameter; set requires_grad on some first.")
    return [{"params": params, "weight_decay": decay} for (_, _, decay), params in groups.items()]


def names_by_id(model: nn.Module) -> dict[int, str]:
    """The name of each parameter, by identity."""
    return {id(parameter): name for name, parameter in model.named_parameters()}


@torch.no_grad()
def follow(optimizer: torch.optim.Optimizer, before: Mapping[int, str], model: nn.Module) -> None:
    """Make an optimizer step the parameters that took the place of those it was made over; its state comes along.

    Args:
        before: `names_by_id(model)` before it was sharded.

    Raises:
        EngineError: the optimizer holds a parameter that is not the model's.
    """
    after = dict(model.named_parameters())
    for group in optimizer.param_groups:
        strange = [p for p in group["params"] if id(p) not in before]
        if strange:
            raise EngineError(
                f"the optimizer of the pair steps a parameter of shape {tuple(strange[0].shape)} that "
                f"{type(model).__name__} does not have; make it over this model's parameters, or prepare the model "
                "first and call create_optimizer(model)."
            )
        for place, old in enumerate(group["params"]):
            new = after[before[id(old)]]
            if old in optimizer.state and new is not old:
                optimizer.state[new] = {k: _like(v, old, new) for k, v in optimizer.state.pop(old).items()}
            group["params"][place] = new


def _like(value: Any, old: Tensor, new: Tensor) -> Any:
    """A state tensor of the old parameter, sharded as the new one is, and as precise."""
    if not isinstance(value, Tensor) or value.shape != old.shape:
        return value
    if new.dtype == torch.float32:
        value = value.float()
    if not isinstance(new, DTensor):
        return value
    made = distribute_tensor(value, new.device_mesh, new.placements, src_data_rank=None)
    return made if local(made).device == local(new).device else made.to(local(new).device)
