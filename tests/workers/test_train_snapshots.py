"""A rank that goes back to a snapshot is bitwise the rank it was, and goes on exactly as it did."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import rlbench.nn
from rlbench.errors import CheckpointError, StateError, Stopped
from tests.modules import qwen_on_meta, save_qwen
from tests.ranks import RankFailure, ranks
from tests.trainers.policy_reference import batch, forward_backward
from tests.workers.noisy_qwen import NoisyQwen, step


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_qwen(tmp_path_factory.mktemp("qwen"), tied=False)


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
        found = engine.call("read_snapshot", str(tmp_path / "a"))
        assert [own["checksums"] for own in found] == before
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
        with pytest.raises(CheckpointError, match="not there for rank 0 of 2"):
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


def refuse_to_go_back(at: int) -> None:
    """On one rank the scheduler refuses what it once gave, which is found after the weights went back."""
    if rank == at:  # type: ignore[name-defined]

        def load_state_dict(state: Any) -> None:
            raise RuntimeError("not today")

        module.lr_scheduler.load_state_dict = load_state_dict  # type: ignore[name-defined]


def test_a_rank_that_fails_in_the_middle_of_going_back_is_said_to_hold_another_state(qwen: str, tmp_path: Path) -> None:
    """Its peers go back; it must not stay beside them as if it had done nothing."""
    with ranks(2, qwen_on_meta(qwen, NoisyQwen)) as engine:
        engine.call("write_snapshot", str(tmp_path / "a"))
        kept = engine.call("training_checksums")
        step(engine, 0)
        engine.run(refuse_to_go_back, 1)
        whole, torn = engine.outcomes("read_snapshot", [(str(tmp_path / "a"),)] * 2)
        assert not isinstance(whole, RankFailure) and whole["checksums"] == kept[0]
        assert isinstance(torn, RankFailure) and torn.error.ends_rank
        assert "on rank 1 (RuntimeError: not today)" in str(torn.error) and "usable" not in str(torn.error)


def test_the_only_rank_says_that_it_is_torn_and_a_restore_mends_it(qwen: str, tmp_path: Path) -> None:
    with ranks(1, qwen_on_meta(qwen, NoisyQwen)) as engine:
        engine.call("write_snapshot", str(tmp_path / "a"))
        kept = engine.call("training_checksums")
        step(engine, 0)
        engine.run(refuse_to_go_back, 0)
        with pytest.raises(CheckpointError, match=r"not today\): the policy is torn.*Restore this snapshot"):
            engine.call("read_snapshot", str(tmp_path / "a"))

        def heed() -> None:
            del module.lr_scheduler.load_state_dict  # type: ignore[name-defined]

        engine.run(heed)
        assert engine.call("read_snapshot", str(tmp_path / "a"))[0]["checksums"] == kept[0]


def test_a_trainer_that_cannot_go_back_leaves_the_policy_whole(qwen: str, tmp_path: Path) -> None:
    def restore(folder: str) -> dict[str, str]:
        from unittest.mock import MagicMock

        from rlbench.checkpoint import rank_state
        from rlbench.workers.train.setup import TrainingSetup
        from rlbench.workers.train.snapshots import Snapshots

        class Stubborn:
            id, optimizer_steps = "t", 0

            def load(self, *read: Any) -> None:
                torch.rand(1)
                raise RuntimeError("not today")

            def tensors(self) -> dict[str, Any]:
                return {}

            def values(self) -> dict[str, Any]:
                return {}

            def check(self, *read: Any) -> None:
                pass

        me, trainer = module, Stubborn()  # type: ignore[name-defined]
        parts, holder = MagicMock(module=me, strategy=strategy), MagicMock()  # type: ignore[name-defined]
        holder.trainer_state.return_value = trainer
        setup = TrainingSetup(MagicMock(module=me, strategy=strategy), holder)  # type: ignore[name-defined]
        snapshots = Snapshots(parts, holder, MagicMock(), setup, lambda: False)
        snapshots.write_snapshot(folder)
        with torch.no_grad():
            next(me.parameters()).zero_()
        with pytest.raises(CheckpointError, match="went back whole, the session's trainer is torn"):
            snapshots.read_snapshot(folder)
        return rank_state.checksums(me)

    with ranks(1, qwen_on_meta(qwen, NoisyQwen)) as engine:
        before = engine.call("training_checksums")[0]["weights"]
        assert engine.run(restore, str(tmp_path / "a"))[0]["weights"] == before


@pytest.mark.parametrize("part", [".", "rank-1", "rank-1/trainer-x"])
def test_what_others_may_have_written_is_not_read(qwen: str, tmp_path: Path, part: str) -> None:
    """Its values are unpickled, and the names in shared memory are no secret."""
    with ranks(2, qwen_on_meta(qwen, NoisyQwen)) as engine:
        engine.call("write_snapshot", str(tmp_path / "a"))
        (tmp_path / "a" / "rank-1" / "trainer-x").mkdir(mode=0o700)
        step(engine, 0)
        before = engine.call("training_checksums")
        (tmp_path / "a" / part).chmod(0o722)
        found = engine.outcomes("read_snapshot", [(str(tmp_path / "a"),)] * 2)
        assert isinstance(found[1].error, CheckpointError) and "drwx-w--w-" in str(found[1].error)
        assert str(tmp_path / "a" / part) in str(found[1].error) and isinstance(found[0], RankFailure)
        assert engine.call("training_checksums") == before
        (tmp_path / "a" / part).chmod(0o700)
        (tmp_path / "a").rename(tmp_path / "elsewhere")
        (tmp_path / "a").symlink_to(tmp_path / "elsewhere")
        with pytest.raises(CheckpointError, match=r"a is not read.*lrwx"):
            engine.call("read_snapshot", str(tmp_path / "a"))


def test_a_snapshot_shares_no_file_that_others_may_have_written(qwen: str, tmp_path: Path) -> None:
    """One who knows the name of a dropped snapshot could make it anew, and would own what later ones link to."""
    with ranks(1, qwen_on_meta(qwen, NoisyQwen)) as engine:
        whole = engine.call("write_snapshot", str(tmp_path / "a"))[0]["bytes"]
        assert engine.call("write_snapshot", str(tmp_path / "b"), str(tmp_path / "a"))[0]["fresh"] < whole
        (tmp_path / "a" / "rank-0" / "0.bin").chmod(0o602)
        assert engine.call("write_snapshot", str(tmp_path / "c"), str(tmp_path / "a"))[0]["fresh"] == whole
        engine.call("read_snapshot", str(tmp_path / "c"))
        with pytest.raises(CheckpointError, match=r"0.bin is not read"):
            engine.call("read_snapshot", str(tmp_path / "b"))  # the same file, by its other link


def test_what_is_no_snapshot_of_the_session_any_more_is_swept(qwen: str, tmp_path: Path) -> None:
    """Of ids alone, whole or partial: what else lies beside them stays."""
    names = ["s-0123abcd", "s-0123abce", "s-0123abcf.partial", "other-0123abcd", "s-anchors", "s-0123abcf.old"]
    for name in names:
        (tmp_path / name).mkdir()
    starts = [f"{tmp_path}/s-", f"{tmp_path}/none/"]
    with ranks(2, qwen_on_meta(qwen, NoisyQwen)) as engine:
        engine.call("sweep_snapshots", starts, [str(tmp_path / "s-0123abcd")])
    assert sorted(os.listdir(tmp_path)) == ["other-0123abcd", "s-0123abcd", "s-0123abcf.old", "s-anchors"]


def test_the_verbs_that_leave_the_state_alone_are_verbs() -> None:
    from rlbench.workers.train.rank import TrainRank
    from rlbench.workers.train.snapshots import LEAVES_THE_STATE, SENDS_WEIGHTS

    assert set() == (LEAVES_THE_STATE | SENDS_WEIGHTS) - set(dir(TrainRank)) - TrainRank.VERBS.keys()
