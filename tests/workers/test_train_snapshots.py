"""A rank that goes back to a snapshot is bitwise the rank it was, and goes on exactly as it did."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import rlbench.nn
from rlbench.errors import CheckpointError, StateError, Stopped
from tests.modules import TrainedQwen, qwen_on_meta, save_qwen
from tests.ranks import RankFailure, Ranks, ranks
from tests.trainers.test_policy_step import batch, forward_backward


class NoisyQwen(TrainedQwen):
    """Draws random numbers in its step, and has a scheduler and a frozen part."""

    def on_weights_materialized(self) -> None:
        self.model.embed_tokens.weight.requires_grad_(False)
        super().on_weights_materialized()
        self.lr_scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, gamma=0.5)

    def noise(self) -> float:
        import random

        import numpy as np

        return float(torch.rand(1)) + random.random() + float(np.random.rand())


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_qwen(tmp_path_factory.mktemp("qwen"), tied=False)


def step(engine: Ranks, seed: int) -> tuple[Any, ...]:
    """One training step; everything that could tell two runs apart."""
    metrics = forward_backward(engine, batch(seed))[0]["metrics"]
    done = engine.call("policy_optim_step", {})[0]["metrics"]
    return metrics["loss"], done["grad_norm"], done["lr"], engine.method("noise"), engine.call("training_checksums")


@pytest.mark.parametrize("world_size", [1, 2])
def test_after_a_restore_training_goes_on_bit_for_bit(qwen: str, tmp_path: Path, world_size: int) -> None:
    with ranks(world_size, qwen_on_meta(qwen, NoisyQwen)) as engine:
        step(engine, 0)
        before = engine.call("training_checksums")
        engine.call("write_snapshot", str(tmp_path / "a"))
        assert engine.call("training_checksums") == before, "writing changes nothing"
        onward = [step(engine, 1), step(engine, 2)]
        assert engine.call("training_checksums") != before
        forward_backward(engine, batch(9))  # gradients that wait must not leak into what follows
        assert engine.call("read_snapshot", str(tmp_path / "a")) == before
        assert [step(engine, 1), step(engine, 2)] == onward


def test_a_rebuilt_engine_takes_a_snapshot_up_optimizer_and_all(qwen: str, tmp_path: Path) -> None:
    with ranks(2, qwen_on_meta(qwen, NoisyQwen)) as engine:
        step(engine, 0)
        engine.call("write_snapshot", str(tmp_path / "a"), None, True)
        onward = step(engine, 1)
    with ranks(2, qwen_on_meta(qwen, NoisyQwen)) as engine:
        engine.call("read_snapshot", str(tmp_path / "a"))
        assert step(engine, 1) == onward


def test_a_snapshot_before_the_first_step_has_no_optimizer_state_and_a_restore_removes_it(
    qwen: str, tmp_path: Path
) -> None:
    with ranks(2, qwen_on_meta(qwen, NoisyQwen)) as engine:
        engine.call("write_snapshot", str(tmp_path / "a"))
        first = step(engine, 0)
        engine.call("read_snapshot", str(tmp_path / "a"))
        assert step(engine, 0) == first


def test_what_did_not_change_is_not_kept_twice(qwen: str, tmp_path: Path) -> None:
    with ranks(2, qwen_on_meta(qwen, NoisyQwen)) as engine:
        step(engine, 0)
        whole = engine.call("write_snapshot", str(tmp_path / "a"))
        again = engine.call("write_snapshot", str(tmp_path / "b"), str(tmp_path / "a"))
        assert [part["fresh"] for part in again] == [0, 0]
        assert [part["bytes"] for part in again] == [part["bytes"] for part in whole]
        step(engine, 1)
        changed = engine.call("write_snapshot", str(tmp_path / "c"), str(tmp_path / "b"))
        assert 0 < changed[0]["fresh"] < changed[0]["bytes"], "the frozen embedding is shared"
        engine.call("drop_snapshots", [str(tmp_path / "a"), str(tmp_path / "b"), str(tmp_path / "never")])
        assert os.listdir(tmp_path) == ["c"]
        engine.call("read_snapshot", str(tmp_path / "c"))


def test_a_stop_or_a_failure_on_one_rank_leaves_nothing_and_the_engine_usable(qwen: str, tmp_path: Path) -> None:
    with ranks(2, qwen_on_meta(qwen, NoisyQwen)) as engine:
        found = engine.outcomes("write_snapshot", [(str(tmp_path / "a"),)] * 2, stopping=(1,))
        assert all(isinstance(f, RankFailure) and isinstance(f.error, Stopped) for f in found)
        assert not os.listdir(tmp_path)
        (tmp_path / "a.partial").mkdir()
        (tmp_path / "a.partial" / "rank-1").mkdir()  # rank 1 cannot make its folder
        found = engine.outcomes("write_snapshot", [(str(tmp_path / "a"),)] * 2)
        assert isinstance(found[1].error, CheckpointError) and "could not be written" in str(found[1].error)
        assert "failed on rank 1" in str(found[0].error)
        assert not (tmp_path / "a").exists() and not (tmp_path / "a.partial" / "rank-0").exists()
        engine.call("write_snapshot", str(tmp_path / "b"))
        step(engine, 0)


def test_a_snapshot_is_for_its_owner_alone(qwen: str, tmp_path: Path) -> None:
    with ranks(1, qwen_on_meta(qwen, NoisyQwen)) as engine:
        engine.call("write_snapshot", str(tmp_path / "a"))
    modes = {p.is_dir(): oct(p.stat().st_mode & 0o777) for p in [tmp_path / "a", *(tmp_path / "a").rglob("*")]}
    assert modes == {True: "0o700", False: "0o600"}


def test_a_snapshot_that_is_gone_or_damaged_changes_nothing(qwen: str, tmp_path: Path) -> None:
    with ranks(2, qwen_on_meta(qwen, NoisyQwen)) as engine:
        engine.call("write_snapshot", str(tmp_path / "a"))
        step(engine, 0)
        before = engine.call("training_checksums")
        with pytest.raises(CheckpointError, match="no part for rank 0 of 2"):
            engine.call("read_snapshot", str(tmp_path / "missing"))
        largest = max((tmp_path / "a" / "rank-1").glob("*.bin"), key=lambda p: p.stat().st_size)
        os.truncate(largest, 8)
        found = engine.outcomes("read_snapshot", [(str(tmp_path / "a"),)] * 2)
        assert isinstance(found[1].error, CheckpointError) and "cut or was changed" in str(found[1].error)
        assert isinstance(found[0], RankFailure), "no rank goes back alone"
        assert engine.call("training_checksums") == before
        step(engine, 1)


def test_another_module_is_refused_before_anything_changes(qwen: str, tmp_path: Path) -> None:
    with ranks(1, qwen_on_meta(qwen, NoisyQwen)) as engine:
        engine.call("write_snapshot", str(tmp_path / "a"))

    class Other(rlbench.nn.Fsdp2TrainModule):
        def __init__(self) -> None:
            super().__init__()
            self.head = torch.nn.Linear(3, 4)

        def materialization_source(self) -> Any:
            return {"head.weight": torch.ones(4, 3), "head.bias": torch.zeros(4)}

    with rlbench.nn.device("meta"):
        other = Other()
    with ranks(1, other) as engine, pytest.raises(CheckpointError, match="another module"):
        engine.call("read_snapshot", str(tmp_path / "a"))


def test_released_weights_are_no_state_to_keep(qwen: str, tmp_path: Path) -> None:
    with ranks(1, qwen_on_meta(qwen, NoisyQwen)) as engine:
        engine.call("to_state", "meta", ["weights"])
        with pytest.raises(StateError, match="released"):
            engine.call("write_snapshot", str(tmp_path / "a"))
        engine.call("to_state", "cuda", ["weights"])
        engine.call("to_state", "cpu", None)
        engine.call("write_snapshot", str(tmp_path / "a"))
