"""Optimizers and schedules that have a name. Importable without torch, which the ranks have."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def adamw(
    module: Any, lr: float, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.0
) -> Any:
    """Make an AdamW (fused), without decay of biases and norms."""
    return module.strategy.create_optimizer(module, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)


def sgd(module: Any, lr: float, momentum: float = 0.0, nesterov: bool = False, weight_decay: float = 0.0) -> Any:
    """Make an SGD."""
    import torch

    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    return torch.optim.SGD(trained, lr=lr, momentum=momentum, nesterov=nesterov, weight_decay=weight_decay)


def muon(
    module: Any, lr: float, momentum: float = 0.95, weight_decay: float = 0.0, adamw_lr: float | None = None
) -> Any:
    """Make a Muon for the matrices of the layers, its updates scaled to AdamW's size (arXiv 2502.16982), and an AdamW
    for embeddings, head, norms and biases, at `adamw_lr` (None: the same rate)."""
    import torch

    ends = (getattr(module, f"get_{which}_embeddings")() for which in ("input", "output"))
    apart = {id(parameter) for end in ends if end is not None for parameter in end.parameters()}
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in trained if parameter.ndim == 2 and id(parameter) not in apart]
    held = {id(parameter) for parameter in matrices}
    rest = [parameter for parameter in trained if id(parameter) not in held]
    rate = lr if adamw_lr is None else adamw_lr
    both = {
        "muon": matrices
        and torch.optim.Muon(
            matrices, lr=lr, momentum=momentum, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"
        ),
        "adamw": rest and torch.optim.AdamW(rest, lr=rate, weight_decay=0.0, fused=True),
    }
    return {name: made for name, made in both.items() if made}


def adamw8bit(
    module: Any, lr: float, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.0
) -> Any:
    """Make a bitsandbytes' AdamW with moments in 8 bits, for parameters that are not split over ranks."""
    from rlbench.strategies.optim.adamw8bit import AdamW8bit

    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    return AdamW8bit(trained, lr=lr, betas=tuple(betas), eps=eps, weight_decay=weight_decay)


def by_step(optimizer: Any, factor: Callable[[int], float]) -> Any:
    """Multiply the rates by `factor(step)`."""
    import torch

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def transformers_schedule(optimizer: Any, name: str, steps: int, warmup: int = 0, **options: Any) -> Any:
    """Make a schedule of transformers over so many `steps`; the k-th of the first `warmup` has k/warmup of the rate.

    Counted from 1: transformers' own first step of a warm-up has rate 0 and trains nothing.
    """
    import torch
    from transformers import get_scheduler

    scheduler = get_scheduler(name, optimizer, warmup, steps, scheduler_specific_kwargs=options or None)
    if not warmup or not isinstance(scheduler, torch.optim.lr_scheduler.LambdaLR) or scheduler.lr_lambdas[0](0) > 0:
        return scheduler  # of a warm-up that begins above 0, `cosine_warmup_with_min_lr`, the steps are its own
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, [_counted_from_one(factor, warmup) for factor in scheduler.lr_lambdas]
    )


def _counted_from_one(factor: Callable[[int], float], warmup: int) -> Callable[[int], float]:
    return lambda step: (step + 1) / warmup if step < warmup else factor(step)


OPTIMIZERS: dict[str, Callable[..., Any]] = {"adamw": adamw, "adamw8bit": adamw8bit, "sgd": sgd, "muon": muon}
NAMES = ("linear", "cosine", "cosine_with_restarts", "cosine_with_min_lr", "polynomial", "constant_with_warmup")
SCHEDULES: dict[str, Callable[..., Any]] = {
    name: functools.partial(transformers_schedule, name=name) for name in (*NAMES, "inverse_sqrt")
}
