"""A parked session with a trainer of texts, a teacher and the state of a loss comes back with all three."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import rlbench as rb
from rlbench.tiny import tasks
from tests.session.session_trainers import checksum
from tests.session.test_reward_model import comparisons
from tests.session.test_reward_trainer import curve
from tests.session.test_teacher import answers, other  # noqa: F401  a fixture

pytestmark = pytest.mark.engine


class Counting:
    """SFT whose weight is the number of steps it has seen."""

    needs_reference = False

    def __init__(self) -> None:
        self.state = {"steps": torch.zeros(())}

    def __call__(self, inputs: Any) -> Any:
        return -inputs.logprobs * (1 + self.state["steps"]), {"seen": float(self.state["steps"])}

    def update(self, metrics: Any) -> None:
        self.state = {"steps": self.state["steps"] + 1}


def test_a_trainer_of_texts_a_teacher_and_the_state_of_a_loss(cluster: Any, other: str) -> None:  # noqa: F811
    own: Any = rb.Session("tiny", name="parked-texts", train={"lr": 1e-4}, inference={"max_model_len": 256}, undo=1)
    rows = [{"prompt": p, "completion": tasks.answer(p)} for p in tasks.prompts(24)]
    trainer = own.trainer("sft", data=rows, loss=Counting(), train_batch_size=8)
    batch = own.teacher(other).score(answers(own), top_k=4)
    assert [one["seen"] for one in trainer.fit(2)] == [0.0, 1.0]
    own.train_step(batch, loss=Counting())
    here = own.snapshot()
    expected, weights = trainer.step(), own.train.run(checksum)
    assert expected["seen"] == 3.0
    own.restore(here)
    own.park()
    again: Any = rb.attach("parked-texts")
    with again:
        found = again.last_trainer
        assert found.where().iterations == 2 and again.options.teachers.keys() == {"teacher"}
        same = again.teacher(other).score(answers(again), top_k=4)
        for name, values in batch.columns.items():
            np.testing.assert_array_equal(same.columns[name], values)
        after = found.step()
        assert {name: after[name] for name in ("loss", "seen", "grad_norm", "step")} == {
            name: expected[name] for name in ("loss", "seen", "grad_norm", "step")
        }
        assert again.train.run(checksum) == weights


def test_a_trainer_of_a_reward_model(cluster: Any, tiny_path: Path) -> None:
    own = rb.RewardModel("tiny", name="parked-judge", train=rb.Train(lr=1e-3), undo=1)
    trainer = own.trainer(data=comparisons(48, seed=1), train_batch_size=16)
    trainer.step()
    here = own.snapshot()
    expected = curve(trainer.fit(2))
    own.restore(here)
    own.park()
    again: Any = rb.attach("parked-judge")
    with again:
        assert isinstance(again, rb.RewardModel) and again.last_trainer.session is again
        assert again.last_trainer.where().iterations == 1 and curve(again.last_trainer.fit(2)) == expected
