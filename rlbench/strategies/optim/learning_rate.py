"""Learning rates of an optimizer whose groups may have rates of their own."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from rlbench.errors import EngineError
from rlbench.strategies.optim.optimizer_set import Stepped

LEAST_RATE = 0.1  # of the peak, where the cosine ends


def scaled_rates(optimizer: Stepped, lr: float) -> list[float]:
    """Return a rate for each group: the first gets `lr`, and the others keep their ratio to it.

    Raises:
        EngineError: `lr` is no rate, or the first group's is 0 and another's is not, so that there is no ratio.
    """
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
    if rates is None:
        yield
        return
    usual = [group["lr"] for group in optimizer.param_groups]
    try:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        yield
    finally:
        for group, rate in zip(optimizer.param_groups, usual, strict=True):
            group["lr"] = rate


def cosine_schedule(optimizer: torch.optim.Optimizer, max_steps: int, warmup_ratio: float) -> Any:
    """Raise the rate to the optimizer's own over a share of the steps, then lower it to a tenth by a cosine."""
    from transformers import get_scheduler

    return get_scheduler(
        "cosine_with_min_lr",
        optimizer,
        num_warmup_steps=math.ceil(max_steps * warmup_ratio),
        num_training_steps=max_steps,
        scheduler_specific_kwargs={"min_lr_rate": LEAST_RATE},  # min_lr is set against the rate of the constructor
    )
