"""A trainer's checkpoint is loaded whole or not at all, and gradients or rates that a user changes are noticed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from rlbench.checkpoint.rank_state import State
from rlbench.errors import CheckpointError, StateError, Stopped
from rlbench.strategies import get_fake_strategy
from rlbench.strategies.optim.optimizer_set import cosine_schedule
from rlbench.trainers import SPMDPPOTrainer
from rlbench.trainers.ppo.building import go_on_from
from tests.trainers.small_trainer import everything, first_weight, whole_trainer, with_critic

pytestmark = pytest.mark.slow


def damaged(trainer: SPMDPPOTrainer, folder: Path) -> None:
    index = next(folder.rglob("index.json"))
    held = json.loads(index.read_text())
    file = index.parent / next(held[name]["file"] for name in held if name.startswith("critic/parameter"))
    whole = bytearray(file.read_bytes())
    whole[len(whole) // 2] ^= 1
    file.write_bytes(whole)


def of_another_size(trainer: SPMDPPOTrainer, folder: Path) -> None:
    trainer.critic = torch.nn.Linear(3, 2)
    trainer.critic_optim = trainer.strategy.create_optimizer(trainer.critic, lr=1e-3)


def with_an_optimizer_of_another_class(trainer: SPMDPPOTrainer, folder: Path) -> None:
    trainer.critic_optim = torch.optim.SGD(trainer.critic.parameters(), lr=1e-3)


@pytest.mark.parametrize("spoil", [damaged, of_another_size, with_an_optimizer_of_another_class])
def test_a_critic_that_does_not_fit_leaves_the_actor_as_it_is(qwen: str, tmp_path: Path, spoil: Any) -> None:
    saved = with_critic(qwen)
    saved.fit(max_steps=1)
    saved.files.save(tmp_path)
    trainer = with_critic(qwen)
    trainer.make_experience()
    spoil(trainer, tmp_path)
    before = first_weight(trainer.actor)
    with pytest.raises(CheckpointError):
        trainer.files.load(tmp_path)
    assert torch.equal(before, first_weight(trainer.actor)) and not trainer.actor_optim.state
    assert not trainer.unsent and len(trainer.replay_buffer) == 16 and trainer.iterations == 0


def test_a_load_that_ends_between_actor_and_critic_is_sent_before_anything_is_drawn(
    qwen: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = with_critic(qwen)
    saved.fit(max_steps=1)
    saved.files.save(tmp_path)
    trainer = with_critic(qwen)
    load = State.load

    def for_the_actor_alone(state: State, *read: Any) -> None:
        if state.module is trainer.critic:
            raise Stopped("stopped")
        load(state, *read)

    with monkeypatch.context() as patch:
        patch.setattr(State, "load", for_the_actor_alone)
        with pytest.raises(Stopped):
            trainer.files.load(tmp_path)
    trainer.make_experience()
    assert torch.equal(trainer.strategy.update_engine_weights[-1], first_weight(saved.actor))


@pytest.mark.parametrize("cleared", ["both", "actor", "critic"])
def test_gradients_that_a_cell_cleared_are_no_part_of_a_step(qwen: str, cleared: str) -> None:
    """16 of 24 sequences wait, and are gone: the next 16 are no step of 24."""
    trainer = whole_trainer(qwen, train_batch_size=24)
    trainer.iterate()
    before = everything(trainer)
    for name in ("actor", "critic"):
        if cleared in (name, "both"):
            getattr(trainer, name).zero_grad()
    assert trainer.iterate()["train_steps"] == 0
    assert trainer.sequences_waiting == (16, 24) and all(map(torch.equal, everything(trainer), before))
    assert trainer.iterate()["train_steps"] == 1


def test_a_schedule_goes_on_in_proportion_from_a_rate_that_is_set() -> None:
    def made() -> tuple[Any, Any]:
        optimizer = get_fake_strategy().create_optimizer(torch.nn.Linear(2, 2), lr=1e-3)
        return optimizer, cosine_schedule(optimizer, 12, 0.1)

    def rates(optimizer: Any, schedule: Any) -> list[float]:
        found = []
        for _ in range(6):
            found.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            schedule.step()
        return found

    (optimizer, schedule), (other, untouched) = made(), made()
    at_rate_0 = torch.optim.lr_scheduler.LambdaLR(made()[0], lambda step: step / 12)
    with pytest.raises(StateError, match="schedule_steps"):
        go_on_from(at_rate_0, [5e-4])
    for one, its in ((optimizer, schedule), (other, untouched)):
        rates(one, its)
    factor = 0.5
    now = other.param_groups[0]["lr"] * factor
    go_on_from(schedule, [now] * len(optimizer.param_groups))
    for group in optimizer.param_groups:
        group["lr"] = now
    assert rates(optimizer, schedule) == pytest.approx([rate * factor for rate in rates(other, untouched)])
    with pytest.raises(StateError, match="StepLR, which would write its own rate over"):
        go_on_from(torch.optim.lr_scheduler.StepLR(optimizer, 3), [1e-4])
