"""Several optimizers over one model that are stepped as one (a dict of them as `module.optimizer`), and their rates."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch

from rlbench.errors import EngineError
from rlbench.strategies.optim.mp_optimizer import is_mp_optimizer
from rlbench.strategies.optim.named import transformers_schedule

LEAST_RATE = 0.1  # of the peak, where the cosine ends


class OptimizerSet:
    """The optimizers of one policy, as Muon for its matrices and AdamW for the rest.

    Their groups in a row are this one's, so that a gradient norm is taken over all of them. Each keeps its own state,
    which snapshots and checkpoints hold under its name.
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
    """Return the optimizers that a step with `optimizer` steps."""
    return list(optimizer.parts.values()) if isinstance(optimizer, OptimizerSet) else [optimizer]


def scaled_rates(optimizer: Stepped, lr: float) -> list[float]:
    """Return a rate for each group: the first gets `lr`, and the others keep their ratio to it."""
    if isinstance(lr, bool) or not isinstance(lr, int | float) or not 0 <= lr < float("inf"):
        raise EngineError(f"lr={lr!r}: a learning rate is a number from 0 on.")
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    if len(set(rates)) == 1:
        return [float(lr)] * len(rates)
    if rates[0] == 0.0:
        raise EngineError(
            f"lr={lr:g}: the first of the optimizer's {len(rates)} groups has rate 0 and others do not, so there is "
            "no ratio to keep; set group['lr'] of each on the ranks."
        )
    return [rate * (lr / rates[0]) for rate in rates]


@contextmanager
def at_rates(optimizer: Stepped, rates: Sequence[float] | None) -> Iterator[None]:
    """Give the groups these rates for a while; None: leave them as they are."""
    groups = optimizer.param_groups if rates is not None else []
    usual = [group["lr"] for group in groups]
    try:
        for group, rate in zip(groups, rates or [], strict=True):
            group["lr"] = rate
        yield
    finally:
        for group, rate in zip(groups, usual, strict=True):
            group["lr"] = rate


def cosine_schedule(optimizer: torch.optim.Optimizer, max_steps: int, warmup_ratio: float) -> Any:
    """Raise the rate to the optimizer's own over a share of the steps, then lower it to a tenth by a cosine."""
    warmup = math.ceil(max_steps * warmup_ratio)
    # min_lr is set against the rate of the constructor
    return transformers_schedule(optimizer, "cosine_with_min_lr", max_steps, warmup, min_lr_rate=LEAST_RATE)
