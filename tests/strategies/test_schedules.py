"""Schedules of the rate: a warm-up counts its steps from 1, so that the first one trains."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rlbench.strategies.optim.named import NAMES, transformers_schedule
from rlbench.strategies.optim.optimizer_set import cosine_schedule

LR = 1e-3


def optimizer() -> torch.optim.Optimizer:
    """Make an optimizer of one weight."""
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=LR)


def rates(schedule: Any, steps: int) -> list[float]:
    """Return the rate of each of the next steps, as a share of the optimizer's own."""
    shares = []
    for _ in range(steps):
        shares.append(schedule.optimizer.param_groups[0]["lr"] / LR)
        schedule.optimizer.step()
        schedule.step()
    return shares


@pytest.mark.parametrize("name", [*NAMES, "inverse_sqrt"])
def test_the_kth_warm_up_step_has_its_share_of_the_rate(name: str) -> None:
    options = {"min_lr_rate": 0.1} if name == "cosine_with_min_lr" else {}
    shares = rates(transformers_schedule(optimizer(), name, 12, 4, **options), 12)
    assert shares[:4] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert shares[4] == pytest.approx(1.0)


@pytest.mark.parametrize("steps", [1, 10, 100])
def test_the_first_update_of_a_trainers_schedule_trains(steps: int) -> None:
    assert rates(cosine_schedule(optimizer(), steps, 0.03), 1)[0] >= min(1.0, 1 / (0.03 * steps + 1))


def test_a_schedule_that_is_resumed_goes_on_as_the_whole_one() -> None:
    whole = rates(cosine_schedule(optimizer(), 10, 0.4), 10)
    stopped = cosine_schedule(optimizer(), 10, 0.4)
    first = rates(stopped, 2)
    resumed = cosine_schedule(optimizer(), 10, 0.4)
    resumed.optimizer.load_state_dict(stopped.optimizer.state_dict())
    resumed.load_state_dict(stopped.state_dict())
    assert first + rates(resumed, 8) == pytest.approx(whole)


def test_a_schedule_without_a_warm_up_begins_at_the_rate() -> None:
    assert rates(transformers_schedule(optimizer(), "linear", 4), 4) == pytest.approx([1.0, 0.75, 0.5, 0.25])
