"""A checkpoint brings training back on any number of ranks, and a failed save leaves what was there."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from rlbench.checkpoint import folder as folders
from rlbench.errors import CheckpointError
from tests.modules import qwen_on_meta, save_qwen
from tests.ranks import RankFailure, Ranks, ranks
from tests.trainers.policy_reference import batch, forward_backward
from tests.workers.noisy_qwen import NoisyQwen, step

pytestmark = pytest.mark.slow

SESSION = '{"step": 3, "history": [{"loss": 1.5}]}'


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def qwen(request: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_qwen(tmp_path_factory.mktemp("qwen"), tied=request.param)


def save(engine: Ranks, root: Path, **options: Any) -> Path:
    done = engine.call("save_checkpoint", str(root), "step-3", SESSION, *options.values())
    assert all(other == done[0] for other in done)
    return Path(done[0].path)


def whole(engine: Ranks) -> dict[str, Any]:
    """Full parameters and optimizer state, whatever the sharding."""

    def gather() -> Any:
        from torch.distributed.tensor import DTensor

        from rlbench.checkpoint.rank_state import State

        found = State.of(module).tensors()  # type: ignore[name-defined]
        return {n: (t.full_tensor() if isinstance(t, DTensor) else t).clone() for n, t in found.items()}

    return engine.run(gather)[0]


TOGETHER = {"tensor_parallel": 2}
WRITERS: dict[str, tuple[int, dict[str, Any]]] = {"1": (1, {}), "2": (2, {}), "2T": (2, TOGETHER), "4T": (4, TOGETHER)}
"""How many ranks write a checkpoint, and how they are arranged."""


@dataclass(frozen=True)
class Written:
    """A checkpoint after two steps, what it is of, and the step that its ranks took after it."""

    path: Path
    kept: dict[str, Any]
    checksums: list[Any]
    onward: tuple[Any, ...]


@pytest.fixture(scope="module")
def written(qwen: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Written]:
    """A checkpoint of each arrangement of ranks."""
    found = {}
    for name, (world_size, options) in WRITERS.items():
        with ranks(world_size, qwen_on_meta(qwen, NoisyQwen), **options) as engine:
            step(engine, 0)
            step(engine, 1)
            kept, path = whole(engine), save(engine, tmp_path_factory.mktemp(name))
            found[name] = Written(path, kept, engine.call("training_checksums"), step(engine, 2))
    return found


@pytest.mark.parametrize(
    ("reader", "sources"), [("2", ("2", "1", "4T")), ("1", ("2", "2T")), ("4T", ("4T", "2"))], ids=["2", "1", "4T"]
)
def test_weights_and_optimizer_come_back_bit_for_bit_on_any_number_of_ranks(
    qwen: str, written: dict[str, Written], reader: str, sources: tuple[str, ...]
) -> None:
    """One after the other into the same ranks: the first into such as have not trained."""
    world_size, options = WRITERS[reader]
    with ranks(world_size, qwen_on_meta(qwen, NoisyQwen), **options) as engine:
        for source in sources:
            saved, row = written[source], f"{source} to {reader}"
            done = engine.call("load_checkpoint", str(saved.path))
            found = whole(engine)
            assert set(found) == set(saved.kept), row
            assert all(torch.equal(found[n], saved.kept[n]) for n in saved.kept), row
            assert [d["random"] for d in done] == [WRITERS[source][0] == world_size] * world_size, row
            if source == reader:
                assert engine.call("training_checksums") == saved.checksums, row
                assert step(engine, 2) == saved.onward, row
            else:
                forward_backward(engine, batch(2))
                rate = engine.call("policy_optim_step", {})[0]["metrics"]["lr"]
                assert rate == saved.onward[2], f"{row}: the scheduler goes on"


@pytest.fixture(scope="module")
def engine(qwen: str) -> Iterator[Ranks]:
    """Two ranks that tests save, spoil and load."""
    with ranks(2, qwen_on_meta(qwen, NoisyQwen)) as made:
        yield made


def test_gradients_that_wait_do_not_survive_a_load(engine: Ranks, tmp_path: Path) -> None:
    path = save(engine, tmp_path)
    first = step(engine, 0)
    forward_backward(engine, batch(5))
    engine.call("load_checkpoint", str(path))
    assert step(engine, 0) == first


def test_damage_is_refused_and_training_goes_on(engine: Ranks, tmp_path: Path) -> None:
    path = save(engine, tmp_path)
    step(engine, 0)
    before = engine.call("training_checksums")
    shard = max(path.rglob("*.bin"), key=lambda p: p.stat().st_size)
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    found = engine.outcomes("load_checkpoint", [(str(path),)] * 2)
    assert isinstance(found[0].error, CheckpointError) and "content" in str(found[0].error)
    assert isinstance(found[1], RankFailure)
    assert engine.call("training_checksums") == before
    step(engine, 1)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)],
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip(f"a small tmpfs cannot be mounted here: {mounted.stderr.strip()}")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def test_a_disk_that_fills_up_leaves_the_earlier_checkpoint_and_a_usable_engine(
    engine: Ranks, small_disk: Path
) -> None:
    kept = save(engine, small_disk)
    step(engine, 0)
    with open(small_disk / "filler", "wb") as filler:
        filler.write(b"x" * (os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_frsize - 20_000))
    before = engine.call("training_checksums")
    found = engine.outcomes("save_checkpoint", [(str(small_disk), "step-4", SESSION)] * 2)
    assert all(isinstance(f, RankFailure) for f in found)
    assert any("could not be written" in str(f.error) and "B are free" in str(f.error) for f in found)
    assert folders.find(small_disk) == kept and folders.verify(kept)
    assert not list(small_disk.glob(".*.partial")), "nothing half-written keeps the room"
    os.unlink(small_disk / "filler")
    assert engine.call("training_checksums") == before
    step(engine, 1)
    engine.call("load_checkpoint", str(kept))


def test_another_model_is_refused_and_one_that_has_grown_is_not_saved_as_one_that_could_be_loaded(
    engine: Ranks, tmp_path: Path
) -> None:
    def grow() -> None:
        module.adapter = torch.nn.Linear(2, 2)  # type: ignore[name-defined]

    path = save(engine, tmp_path)
    before = sorted(tmp_path.iterdir())
    engine.run(lambda: module.register_buffer("more", torch.ones(2)))  # type: ignore[name-defined]
    with pytest.raises(CheckpointError, match="buffer/more"):
        engine.call("load_checkpoint", str(path))
    engine.run(lambda: delattr(module, "more"))  # type: ignore[name-defined]
    engine.run(grow)
    with pytest.raises(CheckpointError, match=r"adapter"):
        save(engine, tmp_path)
    engine.run(lambda: delattr(module, "adapter"))  # type: ignore[name-defined]
    assert sorted(tmp_path.iterdir()) == before
