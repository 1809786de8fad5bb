"""Losses that keep tensors on the ranks: changed once per optimizer step, equal everywhere, back with a snapshot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlbench.errors import LossError
from tests.modules import RAGGED, batch_of, qwen_on_meta
from tests.ranks import Ranks, ranks
from tests.trainers.policy_reference import forward_backward


class MovingBaseline:
    """Advantages less their moving mean."""

    def __init__(self, keep: float = 0.9) -> None:
        self.keep, self.state = keep, {"baseline": torch.zeros(()), "steps": torch.zeros((), dtype=torch.int64)}

    def __call__(self, x: Any) -> Any:
        return -(x.advantages - self.state["baseline"]) * x.logprobs, {"advantage": x.advantages}

    def update(self, metrics: dict[str, float]) -> None:
        moved = self.keep * self.state["baseline"] + (1 - self.keep) * metrics["advantage"]
        self.state = {"baseline": moved, "steps": self.state["steps"] + 1}


def step(engine: Ranks, seeds: list[int], loss: Any, **options: Any) -> list[dict[str, Any]]:
    found = [forward_backward(engine, batch_of(RAGGED, seed), loss, **options)[0]["metrics"] for seed in seeds]
    engine.call("policy_optim_step", {})
    return found


def states(engine: Ranks) -> list[Any]:
    return engine.call("loss_states")


def mean_advantage(seeds: list[int]) -> float:
    joined = [batch_of(RAGGED, seed) for seed in seeds]
    return float(np.concatenate([one.advantages[one.mask] for one in joined]).mean())


@pytest.mark.parametrize(("world_size", "options"), [(1, {}), (1, {"token_budget": 30}), (2, {"token_budget": 30})])
def test_it_changes_once_per_step_by_the_whole_steps_metrics(
    qwen: str, world_size: int, options: dict[str, Any]
) -> None:
    with ranks(world_size, qwen_on_meta(qwen)) as engine:
        begin = forward_backward(engine, batch_of(RAGGED), plain)[0]["metrics"]["loss"]
        engine.call("policy_zero_grad")
        first = step(engine, [0], MovingBaseline(), **options)[0]
        assert first["loss"] == pytest.approx(begin)
        step(engine, [1, 2], MovingBaseline(), **options)  # two calls, one step
        expected = 0.9 * 0.1 * mean_advantage([0]) + 0.1 * mean_advantage([1, 2])
        for held in states(engine):
            assert float(held["MovingBaseline"]["baseline"]) == pytest.approx(expected, rel=1e-5)
            assert int(held["MovingBaseline"]["steps"]) == 2
        seen = forward_backward(engine, batch_of(RAGGED, 3), MovingBaseline())[0]["metrics"]["loss"]
        engine.call("policy_zero_grad")
        shifted = batch_of(RAGGED, 3)
        shifted = shifted.replace(advantages=shifted.advantages - np.float32(expected))
        assert seen == pytest.approx(forward_backward(engine, shifted, plain)[0]["metrics"]["loss"], rel=1e-4)
        engine.call("policy_zero_grad")  # a step that never came changes nothing
        assert int(states(engine)[0]["MovingBaseline"]["steps"]) == 2


def plain(x: Any) -> Any:
    return -x.advantages * x.logprobs, {}


def test_it_goes_back_with_a_snapshot_and_into_a_checkpoint_for_any_number_of_ranks(qwen: str, tmp_path: Path) -> None:
    with ranks(2, qwen_on_meta(qwen)) as engine:
        engine.call("write_snapshot", str(tmp_path / "before"))
        step(engine, [0], MovingBaseline())
        one = states(engine)[0]
        engine.call("write_snapshot", str(tmp_path / "one"))
        step(engine, [1], MovingBaseline())
        assert int(states(engine)[1]["MovingBaseline"]["steps"]) == 2
        engine.call("read_snapshot", str(tmp_path / "one"))
        assert all(
            torch.equal(held["MovingBaseline"]["baseline"], one["MovingBaseline"]["baseline"])
            for held in states(engine)
        )
        engine.call("read_snapshot", str(tmp_path / "before"))
        assert states(engine) == [{}, {}]
        engine.call("read_snapshot", str(tmp_path / "one"))
        engine.call("save_checkpoint", str(tmp_path / "saved"), "one", "{}")
    with ranks(1, qwen_on_meta(qwen)) as engine:
        engine.call("load_checkpoint", str(tmp_path / "saved" / "one"))
        assert torch.equal(states(engine)[0]["MovingBaseline"]["baseline"], one["MovingBaseline"]["baseline"])
        step(engine, [1], MovingBaseline())
        assert int(states(engine)[0]["MovingBaseline"]["steps"]) == 2


class WritesInCalls(MovingBaseline):
    def __call__(self, x: Any) -> Any:
        if self.keep < 0.5:
            self.state["steps"] += 1
        return super().__call__(x)


class NotFinite(MovingBaseline):
    def update(self, metrics: dict[str, float]) -> None:
        self.state["baseline"] = torch.tensor(float("nan"))


class Drawn(MovingBaseline):
    def update(self, metrics: dict[str, float]) -> None:
        import os

        self.state["baseline"] = torch.tensor(float(os.getpid()))


class Wider(MovingBaseline):
    state_name = "MovingBaseline"

    def __init__(self) -> None:
        super().__init__()
        self.state["more"] = torch.ones(3)


def test_what_is_no_state_of_all_ranks_is_refused_and_no_step_is_taken(qwen: str) -> None:
    with ranks(2, qwen_on_meta(qwen)) as engine:
        step(engine, [0], MovingBaseline())
        before = engine.call("state_checksum")
        with pytest.raises(LossError, match=r"use update\(metrics\)"):
            forward_backward(engine, batch_of(RAGGED), WritesInCalls(0.1))
        for loss, said in ((NotFinite(), "not finite"), (Drawn(), "another state on each rank")):
            with pytest.raises(LossError, match=said):
                step(engine, [0], loss)
        with pytest.raises(LossError, match="a state_name of its own"):
            forward_backward(engine, batch_of(RAGGED), Wider())
        assert engine.call("state_checksum") == before and list(states(engine)[0]) == ["MovingBaseline"]
        step(engine, [0], MovingBaseline())
        assert int(states(engine)[0]["MovingBaseline"]["steps"]) == 2
