"""What a step leaves out without failing: parameters that nobody steps, and state that no snapshot can hold."""

from __future__ import annotations

from torch import nn

from rlbench.checkpoint.rank_state import optimizers_of
from rlbench.strategies.optim.optimizer_set import Stepped, parts_of


def unstepped(module: nn.Module, optimizer: Stepped) -> str | None:
    """Say which parameters have a gradient and are not `optimizer`'s; None where there are none. Call before a step."""
    stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    left = {
        id(parameter): name
        for name, parameter in module.named_parameters()
        if parameter.grad is not None and id(parameter) not in stepped
    }
    if not left:
        return None
    holders = [
        f"module.{name}"
        for name, other in optimizers_of(module).items()
        if any(id(parameter) in left for group in other.param_groups for parameter in group["params"])
    ]
    whose = f"those of {', '.join(holders)}" if holders else "no optimizer has them"
    first = next(iter(left.values()))
    return (
        f"{len(left)} parameters have a gradient that this step does not use ({whose}; first {first}). "
        'module.optimizer = {"first": …, "second": …} steps several optimizers together, and '
        "parameter.requires_grad_(False) freezes"
    )


def outside_state(module: nn.Module, optimizer: Stepped) -> str | None:
    """Say which stepped optimizer keeps nothing in its `.state` though it may hold state; None where none is such.

    Torch's own keep all they have there; so do the parts of one that is made of others.
    """
    names = {id(other): name for name, other in optimizers_of(module).items()}
    for part in parts_of(optimizer):
        name = names.get(id(part), "optimizer")
        composed = any(other.startswith(f"{name}.") for other in names.values())
        if not part.state and not composed and not type(part).__module__.startswith("torch."):
            return (
                f"{type(part).__name__} (module.{name}) has no entry in its .state after a step. If it keeps anything "
                "between steps elsewhere, undo, snapshots and checkpoints do not have it: keep it in "
                "self.state[parameter]"
            )
    return None
