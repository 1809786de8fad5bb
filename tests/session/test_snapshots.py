"""Going back: a restored session is bit for bit the one it was, and what follows is what followed then."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

import rlbench as rb
from rlbench.dispatch.link import shm_prefix
from rlbench.errors import CheckpointError, LossError, SessionError
from rlbench.tiny import tasks

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def batch(session):
    session.sync_weights()
    rollouts = session.rollout(tasks.prompts(8, seed=3), n=4, max_tokens=12)
    # whatever the shared session has learnt by now, there is a gradient
    return rollouts.score([i % 2 for i in range(rollouts.samples)]).batch(advantage=rb.rl.group_normalized())


@pytest.fixture(autouse=True)
def only_mine(session):
    yield
    kept = [s.id for s in mine(session)]
    if kept:
        session.drop(*kept)


def mine(session):
    """Without the one that puts the session back after this file."""
    return [s for s in session.snapshots if not s.label.startswith("before tests/")]


def checksums(session):
    return session.train.call_all("training_checksums").result()


def in_memory(session):
    return [p for p in os.listdir("/dev/shm") if p.startswith(f"{shm_prefix(session.name)}snapshot-")]


def one_step(session, batch, lr=1e-4):
    metrics = session.train_step(batch, lr=lr)
    return metrics.loss, metrics.grad_norm, metrics.tokens["logprobs"].tobytes(), checksums(session)


@pytest.mark.parametrize("disk", [False, True], ids=["memory", "disk"])
def test_a_restored_session_goes_on_as_it_did_then(session, batch, disk):
    session.train_step(batch)
    before, step, number = checksums(session), session.step, len(session.history)
    snapshot = session.snapshot(disk=disk)
    assert (snapshot.step, snapshot.disk) == (step, disk) and snapshot.bytes > 1 << 20
    onward = one_step(session, batch)
    drawn = session.rollout(tasks.prompts(2, seed=4), n=2, max_tokens=8)
    restored = session.restore(snapshot)
    assert restored == snapshot and checksums(session) == before
    assert session.step == step and len(session.history) == number
    assert session.version == session.inference.weight_versions()[0], "the replicas followed"
    assert one_step(session, batch) == onward
    session.restore(snapshot)
    again = session.rollout(tasks.prompts(2, seed=4), n=2, max_tokens=8)
    assert again.number == drawn.number, "the rollout number is where it was"


def test_undo_takes_the_last_step_back_and_the_replicas_with_it(session, batch):
    session.sync_weights()
    greedy = session.rollout(tasks.prompts(16, seed=8), temperature=0.0, max_tokens=12, progress=False)
    before, step, high = checksums(session), session.step, session.version
    session.train_step(batch, lr=2e-2)  # a step that ruins it
    session.sync_weights()
    assert checksums(session) != before
    undone = session.undo()
    assert undone.step == step == session.step and checksums(session) == before
    assert session.version > high + 1, "a version no other weights had"
    again = session.rollout(tasks.prompts(16, seed=8), temperature=0.0, max_tokens=12, progress=False)
    assert again.texts == greedy.texts
    with pytest.raises(SessionError, match="no step to undo"):
        session.undo()
    assert not in_memory(session), "what was undone is freed"


def test_only_as_many_steps_are_kept_as_asked_for(session, batch):
    for _ in range(3):
        session.train_step(batch)
    assert [s.label for s in mine(session)] == [f"before step {session.step}"]
    assert len(in_memory(session)) == 1


def test_a_step_that_is_refused_leaves_nothing_to_undo(session, batch):
    session.train_step(batch)
    kept = mine(session)
    with pytest.raises(LossError):
        session.train_step(batch, loss=lambda i: (i.logprobs * float("nan"), {}))
    assert mine(session) == kept

    def steep(inputs):  # finite in value, not in slope; tame in the trial on two sequences
        change = inputs.logprobs - inputs.logprobs.detach()
        return (change.sqrt() if inputs.mask.sum() > 40 else change), {}

    assert session.train_step(batch, loss=steep).skipped
    assert mine(session) == kept


def test_a_step_that_cannot_be_kept_is_taken_all_the_same_and_says_so(session, batch):

    def full():
        from rlbench.workers import train_snapshots

        def refuse(*args, **kwargs):
            raise train_snapshots.CheckpointError("no space left on device")

        train_snapshots._kept, train_snapshots.write_tensors = train_snapshots.write_tensors, refuse

    def again():
        from rlbench.workers import train_snapshots

        train_snapshots.write_tensors = train_snapshots._kept

    session.train.run(full)
    try:
        with pytest.warns(UserWarning, match="this step cannot be undone: .*no space left"):
            metrics = session.train_step(batch)
        assert metrics.grad_norm > 0
    finally:
        session.train.run(again)
    assert not mine(session)
    session.train_step(batch)
    assert session.undo()


def test_a_second_snapshot_of_the_same_state_takes_no_memory(session):
    first, second = session.snapshot("first"), session.snapshot("second")
    assert first.fresh > 0 and second.fresh == 0 and second.bytes == first.bytes
    session.drop("first")
    assert session.restore("second").label == "second"


def test_branches_are_left_and_found_again(session, batch):
    session.train_step(batch)
    assert session.branches == {"main": None}
    session.branch("warm")
    main_sum, main_steps = checksums(session), len(session.history)
    session.train_step(batch, lr=1e-3)
    warm_sum = checksums(session)
    session.branch("main")
    assert checksums(session) == main_sum and len(session.history) == main_steps
    assert set(session.branches) == {"main", "warm"} and session.branches["main"] is None
    session.branch("warm")
    assert checksums(session) == warm_sum and len(session.history) == main_steps + 1
    session.branch("main")
    with pytest.raises(SessionError, match="on branch 'main' already"):
        session.branch("main")


def test_a_branch_goes_with_the_snapshot_it_was_left_at(session):
    session.branch("aside")
    left = session.branches["main"]
    session.drop(left)
    assert session.branches == {"aside": None} | {n: s for n, s in session.branches.items() if n == "warm"}
    session.branch("main")  # begins here, and the file after this one finds the session on it
    assert session.branches["main"] is None


def test_what_is_not_there_is_named(session):
    session.snapshot("mine")
    with pytest.raises(SessionError, match=r"no snapshot 'mien'; nearest: mine; there are .*mine"):
        session.restore("mien")
    with pytest.raises(SessionError, match="there is a snapshot 'mine' already"):
        session.snapshot("mine")
    assert f"{len(session.snapshots)} snapshots" in repr(session.snapshots) and "host memory" in repr(
        mine(session)[0]
    )


def test_a_damaged_snapshot_is_refused_and_the_session_stays_as_it_is(session, batch):
    snapshot = session.snapshot()
    session.train_step(batch)
    before, version = checksums(session), session.version
    largest = max(Path(snapshot.folder).glob("rank-1/*.bin"), key=lambda p: p.stat().st_size)
    os.truncate(largest, 100)
    with pytest.raises(CheckpointError, match="cut or was changed"):
        session.restore(snapshot)
    assert checksums(session) == before and session.version == version
    assert np.isfinite(session.train_step(batch).loss)


def test_a_new_driver_finds_the_snapshots_and_closing_removes_them_from_memory_and_disk(cluster, tiny_path):
    brief = rb.Session("tiny", name="brief", inference={"executor": "hf"}, undo=0)
    kept = [brief.snapshot("a"), brief.snapshot("b", disk=True)]
    attached = rb.attach("brief")
    assert list(attached.snapshots) == kept and all(Path(s.folder).is_dir() for s in kept)
    attached.close()
    assert not any(Path(s.folder).exists() for s in kept)


@pytest.mark.parametrize("undo", [-1, 1.5, "all"])
def test_a_depth_that_is_no_number_of_steps_is_refused(undo):
    with pytest.raises(SessionError, match="undo="):
        rb.Session("tiny", undo=undo)
