"""Going back: a restored session is bit for bit the one it was, and what follows is what followed then."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import rlbench as rb
from rlbench.dispatch.link import shm_prefix
from rlbench.errors import CheckpointError, LossError, SessionError
from rlbench.session.state import step_copies
from rlbench.tiny import tasks
from rlbench.workers.train.config import AroundStep

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


def labels(session):
    return [s.label for s in mine(session)]


def checksums(session):
    return session.train.call_all("training_checksums").result()


def spare_of(session):
    return session.core.link.state("spare")["spare"]


def in_memory(session):
    """Folders of snapshots, but those whose memory waits for the next copy."""
    spare = {os.path.basename(folder) for folder in spare_of(session)}
    start = f"{shm_prefix(session.name)}snapshot-"
    return [p for p in os.listdir("/dev/shm") if p.startswith(start) and p not in spare]


def files_of(folder):
    """The tensors' files of a snapshot of rank 0, each once: size by inode."""
    return {(at := file.stat()).st_ino: at.st_size for file in Path(folder).glob("rank-0/*.bin")}


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
    assert labels(session) == [undone.label], "what was undone is freed; what heal() goes back to stays"
    assert len(in_memory(session)) == 1


def test_only_as_many_steps_are_kept_as_asked_for(session, batch):
    for _ in range(3):
        session.train_step(batch)
    assert labels(session) == [f"before step {session.step}", f"after step {session.step}"]
    assert len(in_memory(session)) == 2


def test_a_step_asks_the_ranks_and_the_monitor_twice(session, batch, monkeypatch):
    calls, link = [], type(session.core.link)

    def counted(name):
        own = getattr(link, name)
        return lambda self, *args, **kwargs: calls.append(name) or own(self, *args, **kwargs)

    for name in ("_asked", "submit"):
        monkeypatch.setattr(link, name, counted(name))
    step, version = session.core.step, session.core.version
    calls.clear()
    metrics = session.train_step(batch)
    assert sorted(calls) == ["_asked", "_asked", "submit", "submit"]
    assert (metrics.step, metrics.version) == (step + 1, version + 1) == (session.core.step, session.core.version)
    assert session.history[-1]["seconds"]["copies"] > 0


def test_a_step_that_fails_leaves_no_copy(session, batch):
    def held():  # of this session alone: other processes' tests have theirs there too
        return sorted(name for name in os.listdir("/dev/shm") if name.startswith(shm_prefix(session.name)))

    session.train_step(batch)
    before = held()
    with pytest.raises(rb.errors.RLBenchError):
        session.optim_step()
    assert before and held() == before


def test_a_copy_is_written_over_the_memory_of_one_that_nobody_goes_back_to(session, batch):
    for _ in range(2):
        session.train_step(batch)
    gone, kept = spare_of(session), [snapshot.folder for snapshot in session.snapshots]
    free = {ino for folder in gone for ino in files_of(folder)} - {ino for folder in kept for ino in files_of(folder)}
    assert free and all(os.path.isdir(folder) for folder in gone)
    before = checksums(session)
    session.train_step(batch)
    written = files_of(session.snapshots[-1].folder)
    assert len(free & written.keys()) > 0.9 * len(free), "its tensors lie in those files"
    assert not any(os.path.exists(folder) for folder in gone)
    session.undo(sync=False)
    assert checksums(session) == before


def test_the_memory_of_a_large_copy_is_kept_only_where_as_much_is_free_several_times(session, batch, monkeypatch):
    monkeypatch.setattr(step_copies, "SPARE_BYTES", 0)
    session.train_step(batch)
    copy = session.snapshots[-1].bytes
    for room, kept in [(step_copies.SPARE_SHARE * copy + 4096, True), (step_copies.SPARE_SHARE * copy // 2, False)]:
        monkeypatch.setattr(step_copies, "room_in_memory", lambda room=room: room)
        for _ in range(2):
            session.train_step(batch)
        assert bool(spare_of(session)) == kept and len(in_memory(session)) == 2


def test_several_steps_are_taken_back_one_by_one_and_no_more_than_asked_for(session, batch, monkeypatch):
    monkeypatch.setattr(session.core, "undo_depth", 2)
    sums = [checksums(session)]
    for _ in range(3):
        session.train_step(batch)
        sums.append(checksums(session))
    assert len(in_memory(session)) == 3
    for then in (sums[2], sums[1]):
        session.undo(sync=False)
        assert checksums(session) == then and labels(session)[-1] == f"before step {session.step + 1}"
    with pytest.raises(SessionError, match="no step to undo"):
        session.undo()
    assert len(in_memory(session)) == 1


def test_a_step_copies_the_state_once_and_reads_nothing_that_cannot_have_changed(session, batch):
    def count():
        from rlbench.checkpoint import tensor_files

        tensor_files.seen, read, write = [], tensor_files.bytes_of, tensor_files.write_tensors

        def reading(tensor):
            tensor_files.seen[-1] += 1
            return read(tensor)

        def writing(*args, **kwargs):
            tensor_files.seen.append(0)
            return write(*args, **kwargs)

        from rlbench.workers.train import snapshots as train_snapshots

        tensor_files.bytes_of, train_snapshots.write_tensors = reading, writing
        train_snapshots._put_back = lambda: (
            setattr(tensor_files, "bytes_of", read),
            setattr(train_snapshots, "write_tensors", write),
        )

    def seen():
        from rlbench.checkpoint import tensor_files
        from rlbench.workers.train import snapshots as train_snapshots

        train_snapshots._put_back()
        return tensor_files.seen, len(list(module.buffers()))

    session.train_step(batch)
    session.train.run(count)  # whatever it did to the weights: the next step looks at them
    session.train_step(batch)
    session.sync_weights()
    session.logprobs(batch)
    session.forward_backward(batch)
    session.optim_step()
    (before, after, again, last), buffers = session.train.run(seen)[1]
    assert before == after == last > buffers == again, "a forward may write to a buffer"
    kept = {s.label: s.fresh for s in mine(session)}
    assert kept[f"before step {session.step}"] == 0 < kept[f"after step {session.step}"]


def halve():
    for parameter in module.parameters():
        parameter.data.to_local().numpy()[...] *= 0.5  # as torch's own counters of changes do not see it


def draw():
    import torch

    torch.rand(3)


CHANGES = {
    "weights": lambda session, batch: session.train.run(halve),
    "random state": lambda session, batch: session.train.run(draw),
    "moments": lambda session, batch: session.train.run(lambda: module.optimizer.state.clear()),
    "cell": lambda session, batch: session.train.run_cell("module.optimizer.param_groups[0]['eps'] *= 2"),
    "lr": lambda session, batch: session.set_lr(session.lr * 1.5),
    "restore": lambda session, batch: session.restore(session.snapshot("elsewhere"), sync=False),
    "undo": lambda session, batch: session.undo(sync=False),
    "offload": lambda session, batch: (session.offload("train"), session.onload("train")),
    "nothing": lambda session, batch: None,
}


@pytest.mark.parametrize("changed", CHANGES)
def test_undo_goes_back_to_before_the_step_whatever_was_done_since_the_one_before(session, batch, changed):
    session.train_step(batch)
    CHANGES[changed](session, batch)
    before = checksums(session)
    session.train_step(batch)
    assert checksums(session) != before
    session.undo(sync=False)  # the ranks alone are looked at
    assert checksums(session) == before


def test_a_step_that_is_refused_leaves_nothing_to_undo(session, batch):
    session.train_step(batch)
    kept, step = session.snapshots.undo_to, session.step
    with pytest.raises(LossError):
        session.train_step(batch, loss=lambda i: (i.logprobs * float("nan"), {}))
    assert session.snapshots.undo_to == kept and labels(session)[-1] == f"after step {step}"

    def steep(inputs):  # finite in value, not in slope; tame in the trial on two sequences
        change = inputs.logprobs - inputs.logprobs.detach()
        return (change.sqrt() if inputs.mask.sum() > 40 else change), {}

    before = checksums(session)
    assert session.train_step(batch, loss=steep).skipped
    assert session.snapshots.undo_to == kept
    assert checksums(session) == before and labels(session)[-1] == f"after step {step + 1}", "heal() does not skip it"


def test_a_step_that_cannot_be_kept_is_taken_all_the_same_and_says_so(session, batch):
    session.train_step(batch)

    def full():
        from rlbench.workers.train import snapshots as train_snapshots

        def refuse(*args, **kwargs):
            raise train_snapshots.CheckpointError("no space left on device")

        train_snapshots._kept, train_snapshots.write_tensors = train_snapshots.write_tensors, refuse

    def again():
        from rlbench.workers.train import snapshots as train_snapshots

        train_snapshots.write_tensors = train_snapshots._kept

    session.train.run(full)
    try:
        with pytest.warns(UserWarning, match="no space left") as said:
            metrics = session.train_step(batch)
        assert metrics.grad_norm > 0
        assert ["cannot be undone" in str(one.message) for one in said] == [True, False]
        assert f"step {session.step} is done but not kept" in str(said[1].message)
    finally:
        session.train.run(again)
    with pytest.raises(SessionError, match="no step to undo"):
        session.undo()  # not to before the step that could be kept
    session.train_step(batch)
    assert session.undo().step == session.step


def test_spare_memory_is_given_back_before_a_copy_is_given_up(session, batch):
    for _ in range(3):
        session.train_step(batch)
    assert spare_of(session)

    def cramped():
        from rlbench.workers.train import snapshots as train_snapshots

        write = train_snapshots._kept = train_snapshots.write_tensors

        def refuse(*args, spare=(), **kwargs):
            if any(folder.parent.is_dir() for folder in spare):
                raise train_snapshots.CheckpointError("no space left on device")
            return write(*args, **kwargs)

        train_snapshots.write_tensors = refuse

    def again():
        from rlbench.workers.train import snapshots as train_snapshots

        train_snapshots.write_tensors = train_snapshots._kept

    session.train.run(cramped)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            session.train_step(batch)
    finally:
        session.train.run(again)
    assert session.undo().step == session.step


def test_a_warning_that_is_an_error_comes_after_the_step_is_on_record(session, batch, monkeypatch):
    before = session.step, len(session.history)
    kept = step_copies.Kept.recorded_steps

    def warned(self, done):
        return kept(self, done | {"before": {"failed": "no room"}})

    monkeypatch.setattr(step_copies.Kept, "recorded_steps", warned)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="no room"):
            session.train_step(batch)
    assert (session.step, len(session.history)) == (before[0] + 1, before[1] + 1)


@pytest.mark.parametrize("failed", [(), ("before",), ("after",), ("before", "after")])
def test_something_is_left_to_heal_from_whatever_could_not_be_kept(failed):
    core = SimpleNamespace(undo_depth=2)
    around = AroundStep("/s-0000000b", "/s-0000000a", None, [])
    there = {
        id_: {"automatic": id_ != "mine", "folder": id_, "bytes": 1} for id_ in ("mine", "first", "second", "last")
    }
    kept = step_copies.Kept(core, around, False, 3, ["first", "second"], there, room=0)
    done = {name: {"failed": "no room"} if name in failed else {"bytes": 1, "fresh": 1} for name in ("before", "after")}
    gone = {event["id"] for event in kept.after_events(done | {"stepped": True}) if event.get("fields", 0) is None}
    without_before = {"first", "second"} if "after" in failed else {"first", "second", "last"}
    assert gone == (without_before if "before" in failed else {"first", "last"})


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
    assert f"{len(session.snapshots)} snapshots" in repr(session.snapshots) and "host memory" in repr(mine(session)[0])


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
    brief = rb.Session("tiny", name="brief", undo=0)
    kept = [brief.snapshot("a"), brief.snapshot("b", disk=True)]
    attached = rb.attach("brief")
    assert list(attached.snapshots) == kept and all(Path(s.folder).is_dir() for s in kept)
    attached.close()
    assert not any(Path(s.folder).exists() for s in kept)


@pytest.mark.parametrize("undo", [-1, 1.5, "all"])
def test_a_depth_that_is_no_number_of_steps_is_refused(undo):
    with pytest.raises(SessionError, match="undo="):
        rb.Session("tiny", undo=undo)
