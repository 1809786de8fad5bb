"""Several optimizers over one model that are stepped as one: a dict of them as `module.optimizer`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import torch

from rlbench.errors import EngineError
from rlbench.strategies.optim.mp_optimizer import is_mp_optimizer


class OptimizerSet:
    """The optimizers of one policy, as Muon for its matrices and AdamW for the rest.

    Their groups in a row are this one's, so that a gradient norm is taken over all of them. Each keeps its own state,
    which snapshots and checkpoints hold under its name.

    Raises:
        EngineError: a value is no optimizer, two step the same parameter, or one has its own backward (`use_mp_opt`).
    """

    def __init__(self, parts: Mapping[str, Any]) -> None:
        for name, part in parts.items():
            if not isinstance(part, torch.optim.Optimizer):
                raise EngineError(f"module.optimizer[{name!r}] is {type(part).__name__}, wanted a torch optimizer.")
            if is_mp_optimizer(part):
                raise EngineError(
                    f"module.optimizer[{name!r}] scales the loss of its backward (use_mp_opt), which one of several "
                    "cannot: build with use_mp_opt=False, or hold one optimizer."
                )
        self.parts: dict[str, torch.optim.Optimizer] = dict(parts)
        parameters = [id(parameter) for group in self.param_groups for parameter in group["params"]]
        if len(parameters) != len(set(parameters)):
            raise EngineError("two optimizers of module.optimizer step the same parameter: give each its own.")

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all parts; changing one changes its part's."""
        return [group for part in self.parts.values() for group in part.param_groups]

    def step(self) -> None:
        """Step every part."""
        for part in self.parts.values():
            part.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of every part's parameters."""
        for part in self.parts.values():
            part.zero_grad(set_to_none=set_to_none)


Stepped: TypeAlias = "torch.optim.Optimizer | OptimizerSet"
"""What a step is taken with."""


def parts_of(optimizer: Stepped) -> list[torch.optim.Optimizer]:
    """The optimizers that a step with `optimizer` steps."""
    return list(optimizer.parts.values()) if isinstance(optimizer, OptimizerSet) else [optimizer]
