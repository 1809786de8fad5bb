"""Which optimizer a step is taken with, and what it leaves out without failing."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from torch.optim import Optimizer

from rlbench.checkpoint.rank_state import optimizers_of
from rlbench.errors import EngineError
from rlbench.strategies.optim.optimizer_set import OptimizerSet, Stepped, parts_of


def policy_optimizer(module: nn.Module) -> Stepped:
    """Return `module.optimizer`, one or a dict of several; or the only one."""
    named = vars(module).get("optimizer")
    if isinstance(named, Optimizer):
        return named
    if isinstance(named, Mapping) and named:
        return OptimizerSet(named)
    optimizers = list(optimizers_of(module).values())
    if len(optimizers) != 1:
        raise EngineError(
            f"the module has {len(optimizers)} optimizers and none is called self.optimizer; create it "
            "in on_weights_materialized: self.optimizer = self.strategy.create_optimizer(self, lr=…), or a dict of "
            "several, which are stepped together."
        )
    return optimizers[0]


def one_optimizer(module: nn.Module) -> Optimizer:
    """Return `policy_optimizer(module)` for who steps one alone."""
    optimizer = policy_optimizer(module)
    if isinstance(optimizer, OptimizerSet):
        raise EngineError(
            f"module.optimizer is a set of {len(optimizer.parts)}, and a trainer (and use_mp_opt) steps one: hold "
            "one that is made of them, or step with session.train_step."
        )
    return optimizer


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
    return (
        f"{len(left)} parameters have a gradient that this step does not use ({whose}; first "
        f'{next(iter(left.values()))}). module.optimizer = {{"first": …, "second": …}} steps several optimizers '
        "together, and parameter.requires_grad_(False) freezes"
    )


def outside_state(module: nn.Module, optimizer: Stepped) -> str | None:
    """Say which stepped optimizer, not torch's own nor made of others, keeps nothing in its `.state`; None: none
    such."""
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
