"""What a rehearsal counts for the optimizer's first step is what the step then takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from rlbench.strategies.memory.owners import optimizer_tensors
from rlbench.strategies.optim.mp_optimizer import FSDPadaptOptimizer
from rlbench.workers.train.probes import missing_state, taken_by_step

CPU, GPU = torch.device("cpu"), torch.device("cuda")
Make = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "adamw": torch.optim.AdamW,
    "amsgrad": lambda p: torch.optim.AdamW(p, amsgrad=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "centered": lambda p: torch.optim.RMSprop(p, centered=True),
    "adagrad": torch.optim.Adagrad,
}


def layers(dtype: torch.dtype) -> nn.Module:
    """With a part that is frozen: it has no state."""
    made = nn.Sequential(nn.Linear(7, 33), nn.Linear(33, 5)).to(dtype)
    made[0].requires_grad_(False)
    return made


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 7, dtype=next(model.parameters()).dtype)).sum().backward()
    optimizer.step()


def held(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of its state; counters are left out."""
    return sum(tensor.nbytes for tensor in optimizer_tensors([optimizer]) if tensor.dim())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("masters", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_is_missing_before_the_first_step_is_what_it_takes(name: str, masters: bool, dtype: torch.dtype) -> None:
    model = layers(dtype)
    made = OPTIMIZERS[name](model[1].parameters())
    optimizer = FSDPadaptOptimizer(made) if masters else made
    before, missing = held(optimizer), missing_state(optimizer, CPU)
    stepped(model, optimizer)
    assert held(optimizer) - before == missing
    assert missing_state(optimizer, CPU) == 0
    assert missing or (name in ("sgd", "adagrad") and not masters)


def test_the_gradients_of_the_copies_come_in_the_place_of_those_in_half_precision() -> None:
    model = layers(torch.bfloat16)
    optimizer = FSDPadaptOptimizer(torch.optim.AdamW(model.parameters()))
    seen: list[int] = []
    whole = optimizer.inner.step

    def step() -> None:
        copies = [p.grad for group in optimizer.inner.param_groups for p in group["params"]]
        left = [p.grad for p in model.parameters() if p.grad is not None]
        seen.append(sum(grad.nbytes for grad in (*copies, *left)))
        whole()

    optimizer.inner.step = step  # type: ignore[method-assign]
    stepped(model, optimizer)
    gradients = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    assert seen == [gradients + taken_by_step(optimizer, CPU)] and taken_by_step(optimizer, CPU) == gradients
    assert taken_by_step(torch.optim.AdamW(model.parameters()), CPU) == 0


@pytest.mark.parametrize("masters", [False, True])
def test_state_in_host_memory_takes_nothing_of_a_gpu(masters: bool) -> None:
    """`fsdp_cpu_offload`: it is made beside the parameters, and counted against the GPU's limit before."""
    made = torch.optim.AdamW(layers(torch.bfloat16).parameters())
    optimizer = FSDPadaptOptimizer(made) if masters else made
    assert missing_state(optimizer, GPU) == taken_by_step(optimizer, GPU) == 0 < missing_state(optimizer, CPU)
