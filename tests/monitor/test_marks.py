"""What ran when is marked from begins and ends alone, and a step's time is divided without a rest."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlbench.monitor import marks as module
from rlbench.monitor.marks import Marks, StepClock, kind_of, ran_out
from rlbench.monitor.running import Running, RunningCall


@pytest.fixture
def clock(monkeypatch):
    """A clock that tests move: Unix and monotonic time are the same."""

    class Clock:
        now = 1000.0

        def time(self):
            return self.now

        monotonic = time

    made = Clock()
    monkeypatch.setattr(module, "time", made)
    return made


def told(running, since=0.0):
    return [(m["what"], m["label"], m["engine"], m["seconds"]) for m in running.marks.since(since)]


@pytest.mark.parametrize(
    ("what", "kind"),
    [
        ("rollout 8", "rollout"),
        ("train_step", "train"),
        ("forward_backward", "train"),
        ("optim_step", "train"),
        ("weight sync", "sync"),
        ("actor.cpu()", "offload"),
        ("inference.meta()", "offload"),
        ("actor.cuda()", "onload"),
        ("snapshot", "snapshot"),
        ("restore", "snapshot"),
        ("undo", "snapshot"),
        ("save", "save"),
        ("export", "save"),
        ("evaluate", "other"),
        ("rehearsal", "other"),
    ],
)
def test_a_mark_has_the_kind_of_what_it_marks(what, kind):
    assert kind_of(what) == kind


def test_a_call_is_marked_from_its_begin_to_its_end(clock):
    running = Running()
    running.begin("a", RunningCall("rollout 1", "inference", 1))
    clock.now += 2.5
    assert told(running) == [("rollout", "rollout 1", "inference", None)]
    running.end("a", 1)
    clock.now += 10
    assert told(running) == [("rollout", "rollout 1", "inference", 2.5)]
    assert running.marks.since(0.0)[0]["time"] == 1000.0


def test_since_gives_what_ended_later_and_what_runs_by_its_begin(clock):
    running = Running()
    for i in range(3):
        running.begin_verb(f"{i}", RunningCall(["weight sync", "save", "train_step"][i], "", 1))
        clock.now += 1
    running.end_verb("0")
    clock.now += 1
    running.end_verb("1")
    assert [m[0] for m in told(running, since=1003.0)] == ["save", "train"]
    assert [m[0] for m in told(running, since=1004.0)] == ["train"]
    assert [m[0] for m in told(running)] == ["sync", "save", "train"]


def test_a_call_that_its_verb_says_already_has_no_mark_of_its_own(clock):
    running = Running()
    running.begin_verb("v", RunningCall("train_step", "", 1))
    running.begin("a", RunningCall("train_step", "actor", 1))
    running.begin("b", RunningCall("rollout 2", "inference", 1))
    running.begin("c", RunningCall("train_step", "other", 2))  # a control verb's
    assert [(m[1], m[2]) for m in told(running)] == [
        ("train_step", ""),
        ("rollout 2", "inference"),
        ("train_step", "other"),
    ]


def test_a_verb_that_its_call_overtook_covers_it(clock):
    running = Running()
    running.begin("r", RunningCall("rollout 2", "inference", 1))
    clock.now += 1
    running.begin("a", RunningCall("train_step", "actor", 1))
    clock.now += 0.5
    running.begin_verb("v", RunningCall("train_step", "", 1))
    running.end("a", 1)
    clock.now += 1.5
    running.end_verb("v")
    assert told(running) == [("rollout", "rollout 2", "inference", None), ("train", "train_step", "", 2.0)]
    running.end_verb("w")
    running.begin_verb("w", RunningCall("save", "", 1))
    assert told(running)[-1] == ("save", "save", "", 0.0) and not running.verbs


def test_a_call_whose_end_came_first_is_marked_without_a_duration():
    running = Running()
    running.end("a", 1)
    running.begin("a", RunningCall("actor.cpu()", "actor", 1))
    assert told(running) == [("offload", "actor.cpu()", "actor", 0.0)]
    assert not running.calls


def test_an_end_of_an_earlier_epoch_ends_nothing():
    running = Running()
    running.begin("a", RunningCall("rollout 1", "inference", 2))
    running.end("a", 1)
    assert told(running) == [("rollout", "rollout 1", "inference", None)]


def test_verbs_of_a_driver_that_is_gone_do_not_run_on(clock):
    running = Running()
    running.begin_verb("a", RunningCall("train_step", "", 1))
    running.begin_verb("b", RunningCall("save", "", 2))
    clock.now += 3
    running.forget_verbs([1])
    assert told(running) == [("train", "train_step", "", 3.0), ("save", "save", "", None)]
    running.forget_verbs()
    assert [m[3] for m in told(running)] == [3.0, 3.0] and not running.verbs


@pytest.mark.parametrize(
    ("kind", "message", "ran"),
    [
        ("OutOfMemoryError", "CUDA out of memory", True),
        ("MemoryError", "", True),
        ("ValueError", "memory", False),
        ("RuntimeError", "DefaultCPUAllocator: can't allocate memory: you tried to allocate", True),
    ],
)
def test_a_failure_for_want_of_memory_is_marked(kind, message, ran):
    assert ran_out(kind, message) == ran
    running = Running()
    running.begin("a", RunningCall("train_step", "actor", 1))
    running.end("a", 1, {"kind": kind, "message": message})
    assert [m[0] for m in told(running)] == ["train", *(["oom"] if ran else [])]


def test_a_death_is_marked_once():
    marks, before = Marks(), {"engines": {"actor": {"broken": None}}}
    died = {"do": "engine", "name": "actor", "fields": {"broken": "rank 0 died"}}
    marks.note(died, before)
    marks.note(died, {"engines": {"actor": {"broken": "rank 0 died"}}})
    marks.note({"do": "engine", "name": "actor", "fields": None}, before)
    assert [(m["what"], m["label"], m["engine"]) for m in marks.since(0.0)] == [("died", "rank 0 died", "actor")]


def test_only_so_many_marks_are_kept():
    marks = Marks()
    for i in range(3 * module.KEPT):
        marks.begin(f"{i}", "rollout")
        marks.end(f"{i}")
    assert len(marks.since(0.0)) == module.KEPT


# -- what a step's time went to


def step(marks, number, rate=100.0):
    marks.note({"do": "set", "key": "step", "value": number}, {"engines": {}})
    marks.note({"do": "record", "record": {"step": number, "tokens_per_s": rate}}, {"engines": {}})


def test_a_step_is_divided_by_what_ran(clock):
    marks = Marks()
    for what, seconds in (("rollout 1", 2), (None, 1), ("train_step", 3), ("weight sync", 0.5), ("actor.cpu()", 0.25)):
        if what is None:
            clock.now += seconds
            continue
        marks.begin(what, what)
        clock.now += seconds
        if what == "train_step":
            step(marks, 1)
        marks.end(what)
    (first,) = marks.steps.splits
    assert first == {
        "step": 1,
        "seconds": 6.0,
        "rollout": 2.0,
        "train": 3.0,
        "sync": 0.0,
        "other": 0.0,
        "idle": 1.0,
        "score": None,
        "tokens_per_s": 100.0,
    }
    marks.begin("again", "train_step")
    step(marks, 2)
    marks.end("again")
    second = marks.steps.splits[1]
    assert (second["sync"], second["other"], second["rollout"]) == (0.5, 0.25, 0.0)


def test_where_several_things_run_each_second_counts_once(clock):
    marks = Marks()
    marks.begin("r", "rollout 1")
    clock.now += 1
    marks.begin("t", "train_step")
    clock.now += 2
    step(marks, 1)
    marks.end("t")
    clock.now += 4
    marks.begin("u", "train_step")
    marks.end("r")
    clock.now += 8
    step(marks, 2)
    marks.end("u")
    assert [(s["rollout"], s["train"], s["idle"]) for s in marks.steps.splits] == [(1, 2, 0), (4, 8, 0)]


def test_training_that_took_no_step_is_part_of_the_step_it_leads_to(clock):
    marks = Marks()
    for what in ("forward_backward", "forward_backward", "optim_step"):
        marks.begin("v", what)
        clock.now += 1
        if what == "optim_step":
            marks.note({"do": "set", "key": "step", "value": 7}, {"engines": {}})
        marks.end("v")
    assert [(s["step"], s["train"], s["tokens_per_s"]) for s in marks.steps.splits] == [(7, 3.0, None)]


def test_a_step_that_is_set_by_going_back_is_none():
    marks = Marks()
    marks.note({"do": "set", "key": "step", "value": 3}, {"engines": {}})
    marks.begin("v", "forward_backward")
    marks.end("v")
    assert not marks.steps.splits


EVENTS = st.lists(st.tuples(st.sampled_from(["rollout", "train_step", "weight sync", "save"]), st.floats(0, 9)))


@given(EVENTS)
def test_the_parts_add_up_to_the_time_there_was(events):
    now = itertools.count(5)
    clock, open_, total = StepClock(), set(), 0.0
    with pytest.MonkeyPatch.context() as patched:
        ticks = {"now": float(next(now))}
        patched.setattr(module.time, "monotonic", lambda: ticks["now"])
        begin = ticks["now"]
        clock.turn(set())
        for what, seconds in events:
            ticks["now"] += seconds
            clock.turn({kind_of(name) for name in open_})
            open_ ^= {what}
        total = ticks["now"] - begin
        clock.step = 1
        clock.close()
    (split,) = clock.splits
    assert sum(split[p] for p in ("rollout", "train", "sync", "other", "idle")) == pytest.approx(split["seconds"])
    assert split["seconds"] == pytest.approx(total)
