"""A checkpoint folder appears whole or not at all, is checked byte for byte, and only its like is ever removed."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from rlbench.checkpoint import folder as folders
from rlbench.errors import CheckpointError


def write(root: Path, name: str, content: bytes = b"weights", time: float = 0.0) -> Path:
    aside, final = folders.begin(root, name)
    (aside / "state").mkdir()
    (aside / "state" / "a.bin").write_bytes(content)
    folders.publish(aside, final, {"step": 1, "time": time})
    return final


def test_what_is_published_is_whole_and_the_newest_is_found(tmp_path: Path) -> None:
    first, second = write(tmp_path, "step-1", time=1), write(tmp_path, "step-2", time=2)
    assert folders.verify(first)["step"] == 1 and (tmp_path / folders.LATEST).read_text() == "step-2"
    assert folders.checkpoints_in(tmp_path) == [first, second]
    assert folders.find(tmp_path) == second and folders.find(first) == first


def test_a_name_that_is_taken_gets_a_number(tmp_path: Path) -> None:
    assert [write(tmp_path, "step-1").name for _ in range(3)] == ["step-1", "step-1-2", "step-1-3"]


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda p: os.truncate(p, 3), r"a\.bin has 3 bytes, was written with 7"),
        (lambda p: p.write_bytes(b"Weights"), "does not have the content it was written with"),
        (lambda p: p.unlink(), "is missing"),
    ],
)
def test_damage_is_named_with_the_one_before(tmp_path: Path, harm, said: str) -> None:
    write(tmp_path, "step-1", time=1)
    harm(write(tmp_path, "step-2", time=2) / "state" / "a.bin")
    with pytest.raises(CheckpointError, match=f"{said}.*Nothing was loaded; the one before it is .*step-1"):
        folders.verify(tmp_path / "step-2")


def test_rotation_removes_the_oldest_of_ours_alone(tmp_path: Path) -> None:
    (tmp_path / "my-notes").mkdir()
    (tmp_path / "step-0").mkdir()  # looks like ours by name, has no manifest
    made = [write(tmp_path, f"step-{i}", time=i) for i in range(1, 5)]
    assert folders.rotate(tmp_path, max_num=2, max_gb=None) == made[:2]
    assert {p.name for p in tmp_path.iterdir()} == {"my-notes", "step-0", "step-3", "step-4", folders.LATEST}


def test_rotation_by_size_keeps_the_newest_whatever_it_weighs(tmp_path: Path) -> None:
    made = [write(tmp_path, f"step-{i}", b"x" * 4000, time=i) for i in range(1, 4)]
    size = sum(p.stat().st_size for p in made[0].rglob("*") if p.is_file())
    assert folders.rotate(tmp_path, None, max_gb=2.5 * size / folders.GB) == made[:1]
    assert folders.rotate(tmp_path, None, max_gb=0.0) == made[1:2]
    assert folders.checkpoints_in(tmp_path) == made[2:]


def test_what_a_crash_left_is_removed_by_the_next_and_was_never_taken_for_whole(tmp_path: Path) -> None:
    write(tmp_path, "step-1")
    aside, _ = folders.begin(tmp_path, "step-2")
    (aside / "half").write_bytes(b"x")
    assert folders.find(tmp_path).name == "step-1"
    write(tmp_path, "step-3", time=3)
    assert sorted(p.name for p in tmp_path.iterdir()) == [folders.LATEST, "step-1", "step-3"]


def test_what_another_writer_has_begun_or_a_user_calls_partial_is_left_alone(tmp_path: Path) -> None:
    host = socket.gethostname()
    theirs = [f".step-9.{host}-1.partial", ".step-9.elsewhere-1.partial", ".mine.partial"]
    gone = f".step-8.{host}-{2**22 + 1}.partial"  # no process has such a number
    for name in [*theirs, gone]:
        (tmp_path / name).mkdir()
    write(tmp_path, "step-1")
    assert {p.name for p in tmp_path.iterdir()} == {*theirs, "step-1", folders.LATEST}


CALLS = ["os.rename", "os.fsync", "json.dumps", "hashlib.file_digest"]


@pytest.mark.parametrize("count", range(1, 7))
@pytest.mark.parametrize("call", CALLS)
def test_a_process_killed_at_any_stage_leaves_the_earlier_one_and_no_half_one(
    tmp_path: Path, call: str, count: int
) -> None:
    """The n-th call of each kind that writing makes never returns."""
    write(tmp_path, "step-1", b"old", time=1)
    module, name = call.split(".")
    killed = subprocess.run(
        [
            sys.executable,
            "-c",
            f"""
import os, signal, sys, {module}
from pathlib import Path
sys.path.insert(0, {str(Path.cwd())!r})
from tests.checkpoint.test_folder import write
calls, real = [], {call}
def dying(*a, **k):
    calls.append(1)
    if len(calls) == {count}:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(*a, **k)
{module}.{name} = dying
write(Path({str(tmp_path)!r}), "step-2", b"new", time=2)
""",
        ],
        check=False,
    )
    assert killed.returncode in (-9, 0)
    whole = folders.checkpoints_in(tmp_path)
    assert whole[0].name == "step-1" and folders.verify(whole[0])
    assert [p.name for p in whole] in (["step-1"], ["step-1", "step-2"])
    assert all(folders.verify(p) for p in whole)
    named = {p.name for p in tmp_path.iterdir() if not p.name.startswith(".")}
    assert named <= {"step-1", "step-2", folders.LATEST} and ("step-2" in named) == (len(whole) == 2)
    assert write(tmp_path, "step-3", time=3) == folders.find(tmp_path)


def test_no_room_and_no_right_are_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="choose another path"):
        folders.begin(tmp_path / "file" / "below", "step-1")
    with pytest.raises(CheckpointError, match=r"session\.save"):
        folders.find(tmp_path)
