"""Which verbs a script of a record needs: what was taken back is left out, and nothing else."""

import pytest

from rlbench.errors import SessionError
from rlbench.session.recording import Entry
from rlbench.session.script_course import course, needed_lines


def verb(name, code="", **fields):
    return Entry(name, code=code or f"{name}()", **fields)


def step(snapshot, code="train_step(batch_1)", **fields):
    return verb("train_step", code, snapshot=snapshot, **fields)


def rollout(n):
    return verb("rollout", variable=f"rollouts_{n}", number=n)


def chosen(*entries):
    return sorted(course(entries))


def test_an_undone_step_is_left_out_with_its_undo():
    assert chosen(rollout(1), step("a"), verb("undo", snapshot="a"), step("b")) == [0, 3]


def test_steps_undone_one_after_the_other():
    entries = [rollout(1), step("a"), step("b"), verb("undo", snapshot="b"), verb("undo", snapshot="a"), step("c")]
    assert chosen(*entries) == [0, 5]


def test_a_snapshot_of_a_course_that_was_left_brings_that_course_back():
    entries = [
        step("a"),
        verb("snapshot", snapshot="s", variable="snapshot_1"),
        verb("undo", snapshot="a"),
        verb("restore", "restore(snapshot_1)", snapshot="s"),
        step("b"),
    ]
    assert chosen(*entries) == [0, 1, 4]


def test_going_back_drops_the_backwards_that_waited():
    back = verb("forward_backward")
    one, two = verb("optim_step", snapshot="a"), verb("optim_step", snapshot="b")
    entries = [back, one, verb("undo", snapshot="a"), back, two]
    assert chosen(*entries) == [3, 4]
    kept = [step("z"), back, verb("zero_grad"), back, verb("optim_step", snapshot="a"), verb("undo", snapshot="a")]
    assert chosen(*kept) == [0, 1, 2]


def test_a_step_that_kept_nothing_cannot_be_gone_back_to():
    assert chosen(step("a"), step(None), verb("undo", snapshot="a")) == []
    assert chosen(step(None), verb("undo", snapshot="unknown")) == [0, 1]


@pytest.mark.parametrize(
    "left",
    [verb("train.run", "train.run(f)"), verb("train.method", "train.method(f)"), verb("offload"), verb("follow")],
    ids=lambda entry: entry.verb,
)
def test_what_going_back_does_not_take_back_keeps_everything(left):
    assert chosen(step("a"), left, verb("undo", snapshot="a")) == [0, 1, 2]
    left.outcome = "failed"
    assert chosen(step("a"), left, verb("undo", snapshot="a")) == []


def test_replicas_that_did_not_follow_keep_everything():
    entries = [step("a"), verb("sync_weights"), verb("undo", "undo(sync=False)", snapshot="a"), rollout(1)]
    assert chosen(*entries) == [0, 1, 2, 3]


def test_rollouts_of_a_course_that_was_left_are_kept_where_something_uses_them():
    made = ["batch_1 = rollouts_1.score(f).batch(advantage=a)"]
    entries = [verb("snapshot", snapshot="s"), rollout(1), step("a", before=made), verb("restore", snapshot="s")]
    assert chosen(*entries) == [0]
    assert chosen(*entries, step("b")) == [0, 1, 2, 3, 4]  # batch_1 again


def test_a_batch_is_made_where_its_first_user_was_left_out_and_not_where_nobody_needs_it():
    entries = [
        rollout(1),
        step("a", before=["scored_1 = rollouts_1.score(f)", "batch_1 = scored_1.batch(g)"]),
        verb("undo", snapshot="a"),
        step("b"),
    ]
    kept = course(entries)
    assert sorted(kept) == [0, 3] and needed_lines(entries, kept)[1] == entries[1].before
    other = [*entries[:3], step("b", "train_step(batch_2)", before=["batch_2 = rollouts_1.batch(h)"])]
    assert needed_lines(other, course(other))[1] == []


def test_a_death_that_a_snapshot_mended_is_a_going_back_and_another_is_refused():
    healed = verb("heal", snapshot="b")
    assert chosen(step("a"), step("b"), healed, step("c")) == [0, 3]
    with pytest.raises(SessionError, match="a script cannot lose a worker"):
        course([step("a"), healed], everything=True)
    with pytest.raises(SessionError, match="went on without a snapshot"):
        course([step("a"), verb("heal", lost="heal() went on without a snapshot")])
    assert chosen(step("a"), verb("heal"), step("b")) == [0, 1, 2]  # a replica alone: nothing went back


def test_a_heal_to_after_the_last_step_takes_back_what_was_on_the_ranks_and_keeps_what_was_drawn():
    died = step("b", outcome="failed")
    healed = verb("heal", snapshot="after a")
    entries = [step("a", after="after a"), verb("set_lr"), rollout(1), verb("forward_backward"), healed, step("c")]
    assert chosen(*entries) == [0, 2, 5]
    assert chosen(step("a", after="after a"), rollout(1), died, verb("heal", snapshot="b"), step("c")) == [0, 1, 4]
    unkept = [step("a", after="after a"), rollout(1), step("b"), healed, step("c")]
    assert chosen(*unkept) == [0, 4], "a step that was taken back takes back what was drawn for it"


def test_branches_keep_everything():
    assert chosen(step("a"), verb("branch", snapshot="s"), step("b")) == [0, 1, 2]
