"""What a trainer holds beside the policy, put back in place: each part, and what does not fit is refused unchanged."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

from rlbench.checkpoint.rank_state import State
from rlbench.data import PromptSet
from rlbench.errors import CheckpointError, DataError
from rlbench.strategies import OptionError, get_fake_strategy
from rlbench.trainers import SPMDPPOTrainer
from rlbench.trainers.ppo.state import TrainerState
from tests.trainers.making import asked
from tests.trainers.small_trainer import OPTIONS, everything, whole_trainer

pytestmark = pytest.mark.slow


def actor_of(trainer: SPMDPPOTrainer) -> State:
    return State(trainer.actor, {"actor": trainer.actor_optim})


def policy_of(trainer: SPMDPPOTrainer) -> tuple[Any, Any]:
    """What a snapshot keeps of the policy itself."""
    state = actor_of(trainer)
    return {name: tensor.clone() for name, tensor in state.tensors().items()}, state.values()


def kept(trainer: SPMDPPOTrainer) -> tuple[Any, Any]:
    """As it is written to files."""
    state = TrainerState(trainer, "a")
    tensors = {name: tensor.clone() for name, tensor in state.tensors().items()}
    return tensors, pickle.loads(pickle.dumps(state.values()))


def go_back(trainer: SPMDPPOTrainer, policy: tuple[Any, Any], own: tuple[Any, Any]) -> None:
    TrainerState(trainer, "a").check(*own)
    TrainerState(trainer, "a").load(*own)
    actor_of(trainer).load(*policy)


def iteration(trainer: SPMDPPOTrainer) -> dict[str, float]:
    return {name: value for name, value in trainer.iterate().items() if not name.startswith(("perf/", "engine_"))}


def assert_goes_on_alike(trainer: SPMDPPOTrainer, count: int = 2) -> None:
    """From here `count` iterations, back, and the same ones again: bit for bit."""
    policy, own = policy_of(trainer), kept(trainer)
    first, after = [iteration(trainer) for _ in range(count)], everything(trainer)
    go_back(trainer, policy, own)
    assert [iteration(trainer) for _ in range(count)] == first
    assert all(map(torch.equal, everything(trainer), after))


def test_after_going_back_all_goes_on_bit_for_bit(qwen: str) -> None:
    trainer = whole_trainer(qwen)
    trainer.iterate()
    assert_goes_on_alike(trainer)


def test_before_the_first_step_there_is_no_optimizer_state_and_afterwards_neither(qwen: str) -> None:
    trainer = whole_trainer(qwen, train_batch_size=24)
    policy, own = policy_of(trainer), kept(trainer)
    trainer.iterate()
    trainer.iterate()  # a step of 24, and 8 that wait
    go_back(trainer, policy, own)
    assert trainer.sequences_waiting == (0, 24)
    assert all(p.grad is None for model in (trainer.actor, trainer.critic) for p in model.parameters())
    assert not trainer.critic_optim.state and trainer.critic_scheduler.last_epoch == 0
    assert trainer.kl_ctl.coef == 0.1 and trainer.optimizer_steps == trainer.iterations == 0


def test_what_waits_in_the_middle_of_a_step_and_of_the_experience_waits_again(qwen: str) -> None:
    trainer = whole_trainer(qwen, train_batch_size=24)
    trainer.iterate()  # 16 of 24 sequences
    assert trainer.sequences_waiting == (16, 24)
    assert_goes_on_alike(trainer)
    trainer = whole_trainer(qwen)
    trainer.make_experience()
    assert_goes_on_alike(trainer)


def test_a_part_that_does_not_fit_is_refused_and_nothing_is_changed(qwen: str) -> None:
    trainer = whole_trainer(qwen)
    trainer.iterate()
    tensors, values = kept(trainer)
    trainer.iterate()
    before, steps = everything(trainer), trainer.optimizer_steps
    state = TrainerState(trainer, "a")
    first = next(name for name in tensors if name.startswith("critic/parameter/"))
    for spoiled, match in (
        ({name: t for name, t in tensors.items() if name != first}, "another module"),
        (tensors | {first: tensors[first].double()}, "float64"),
    ):
        with pytest.raises(CheckpointError, match=match):
            state.check(spoiled, values)
    with pytest.raises(CheckpointError, match="average"):
        state.check(tensors, values | {"parts": {"actor": {}, "critic": {}}})
    trainer.prompts = PromptSet.of(asked(8)).stream(seed=1)
    with pytest.raises(DataError, match="restore: the state"):
        state.check(tensors, values)
    assert all(map(torch.equal, everything(trainer), before)) and trainer.optimizer_steps == steps


def test_a_trainer_that_stays_forgets_what_was_made_with_other_weights(qwen: str) -> None:
    trainer = whole_trainer(qwen, train_batch_size=24)
    trainer.iterate()
    trainer.make_experience()
    place = trainer.prompts.state()
    TrainerState(trainer, "a").stay()
    assert trainer.sequences_waiting == (0, 24) and not len(trainer.replay_buffer)
    assert all(p.grad is None for model in (trainer.actor, trainer.critic) for p in model.parameters())
    assert trainer.prompts.state() == place and trainer.iterations == 1


class Counting(SPMDPPOTrainer):
    """A class of the user's with a state of its own: the rewards that its last iterations had."""

    def make_experience(self, prompts: Any = None) -> dict[str, float]:
        found = super().make_experience(prompts)
        self.__dict__.setdefault("seen", []).append(found["reward"])
        return found

    def get_extra_state(self) -> Any:
        return {"seen": list(self.__dict__.get("seen", ()))}

    def set_extra_state(self, state: Any) -> None:
        self.seen = list(state["seen"])


def test_what_a_users_class_keeps_goes_back_too_where_it_says_what_that_is(qwen: str, tmp_path: Any) -> None:
    trainer = whole_trainer(qwen)
    trainer.__class__ = Counting
    trainer.iterate()
    policy, own, seen = policy_of(trainer), kept(trainer), list(trainer.seen)
    trainer.files.save(tmp_path)
    trainer.iterate()
    assert len(trainer.seen) == 2
    go_back(trainer, policy, own)
    assert trainer.seen == seen
    trainer.iterate()
    trainer.files.load(tmp_path)
    assert trainer.seen == seen and "extra" not in trainer.files.place()
    trainer.__class__ = SPMDPPOTrainer
    trainer.iterate()
    before = everything(trainer)
    with pytest.raises(CheckpointError, match="set_extra_state"):
        trainer.files.load(tmp_path)
    assert all(map(torch.equal, everything(trainer), before)), "nothing was loaded"


def test_a_class_that_says_what_it_keeps_and_cannot_take_it_back_is_refused_when_it_is_made() -> None:
    class OneWay(SPMDPPOTrainer):
        def get_extra_state(self) -> Any:
            return {"seen": 1}

    strategy = get_fake_strategy(OPTIONS)
    with pytest.raises(OptionError, match="OneWay defines get_extra_state and no set_extra_state"):
        OneWay(strategy, torch.nn.Linear(2, 2), tokenizer=None, kl_coef=0.0)
