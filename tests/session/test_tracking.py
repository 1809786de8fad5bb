"""Trackers get what the history gets, and a tracker in trouble ends no step."""

import numpy as np
import pytest

import rlbench as rb
from rlbench.errors import SessionError
from rlbench.tiny import tasks
from tests.session.session_trainers import grpo

pytestmark = pytest.mark.engine


def step(session):
    scored = session.rollout("sort 3 1 2 :", n=4, max_tokens=6).score(lambda r: float(sum(r.token_ids) % 3))
    return session.train_step(scored.batch(advantage=rb.rl.group_normalized()))


def scalars(folder):
    """Of all event files below: name -> [(step, value)]."""
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = {}
    for file in sorted(folder.rglob("events*")):
        events = loader.EventAccumulator(str(file))
        events.Reload()
        for name in events.Tags()["scalars"]:
            found.setdefault(name, []).extend((e.step, e.value) for e in events.Scalars(name))
    return found


HOSTILE = "<img src=x>| `a`\nsort 2 1 :"


def own(name, **methods):
    """A tracker of a user's own that keeps nothing."""
    from accelerate.tracking import GeneralTracker

    given = {"name": name, "requires_logging_directory": False, "tracker": None, **methods}
    given |= {one: lambda self, *args, **kwargs: None for one in ("store_init_configuration", "log", "finish")}
    return type("Own", (GeneralTracker,), given)()


@pytest.fixture
def tracked(session):
    yield session
    session.untrack()


def test_tensorboard_gets_steps_evaluations_and_rollouts(tracked, tmp_path):
    pytest.importorskip("tensorboard")
    tracked.track("tensorboard", run="mine", folder=str(tmp_path))
    metrics = [step(tracked), step(tracked)]
    evaluation = tracked.evaluate(["sort 2 1 :"], lambda r: 1.0, max_tokens=4)
    assert tracked.untrack("tensorboard") == ["tensorboard"]
    step(tracked)
    found = scalars(tmp_path / "mine")
    for name in ("loss", "reward", "grad_norm", "seconds/total"):
        values = dict(metrics[1]) | {"seconds/total": metrics[1]["seconds"]["total"]}
        assert len(found[name]) == 2 and found[name][1][1] == pytest.approx(values[name], rel=1e-5)
    assert found["loss"][1][0] == found["loss"][0][0] + 1
    assert [value for _, value in found["step"]] == [m["step"] for m in metrics]
    assert found["eval/reward"] == [(found["loss"][1][0], evaluation.reward)]
    assert len(found["rollout/length"]) == 2


def texts(folder):
    """Of all event files below: name -> the texts of its steps, in order."""
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = {}
    for file in sorted(folder.rglob("events*")):
        events = loader.EventAccumulator(str(file))
        events.Reload()
        for name in events.Tags()["tensors"]:
            said = [e.tensor_proto.string_val[0].decode() for e in events.Tensors(name)]
            found.setdefault(name.removesuffix("/text_summary"), []).extend(said)
    return found


def test_tensorboard_gets_samples_of_every_second_steps_batch_and_of_evaluations(tracked, tmp_path):
    tracked.track("tensorboard", run="mine", folder=str(tmp_path), samples_every=2)
    rows = [step(tracked)["sequences"] for _ in range(3)]
    evaluation = tracked.evaluate({"one": [HOSTILE]}, lambda r: 0.5, max_tokens=4)["one"]
    tracked.untrack()
    found = texts(tmp_path / "mine")
    batches, (asked,) = found["samples"], found["eval/one/samples"]
    assert len(batches) == 2 and rows == [4] * 3 and all(one.count("\n") == 1 + 4 for one in batches)
    assert "sort 3 1 2 :" in batches[0] and "| prompt | completion | reward |" in batches[0]
    assert "&lt;img src=x>&#124;" in asked and "| 0.5 | " in asked and "<img" not in asked
    assert evaluation.rollouts.texts[0].split("\n")[0][:2].strip() in asked


def test_a_tracker_of_your_own_with_tables_gets_them_and_none_where_it_says_so(tracked):
    tables = []
    for name, every in (("default", None), ("none", 0)):
        tracked.track(
            own(name, log_table=lambda self, *given, step: tables.append((self.name, *given, step))),
            samples_every=every,
        )
    metrics = step(tracked)
    ((name, table, columns, rows, at),) = tables
    assert (name, table) == ("default", "samples") and at >= 1
    assert columns == ["prompt", "completion", "reward", "advantage", "tokens", "version"]
    assert np.mean([row[2] for row in rows]) == pytest.approx(metrics["reward"])
    for every, said in ((3, "has no tables"), (-1, "wanted a number of steps")):
        with pytest.raises(SessionError, match=said):
            tracked.track(own("plain"), samples_every=every)


@pytest.mark.usefixtures("put_back")
def test_trainers_on_the_ranks_send_samples_of_what_they_trained_on(tracked):
    tables = []
    keeps = own("default", log_table=lambda self, *given, step: tables.append((*given, step)))
    tracked.track(keeps, samples_every=2)
    rows = [{"prompt": p, "completion": tasks.answer(p)} for p in tasks.prompts(12)]
    tracked.trainer("sft", data=rows, train_batch_size=4).fit(3)
    (first, _, texts, at), second = tables
    assert first == "samples" and len(texts) == 4 and second[3] == at + 2
    assert all(any(row["completion"] in text[1] for row in rows) for text in texts)
    tables.clear()
    trainer = grpo(tracked)
    trainer.fit(2)
    ((_, columns, sampled, _),) = tables
    assert len(sampled) == 16 and {"reward", "advantage"} <= set(columns) and all(row[5] >= 0 for row in sampled)


def test_a_tracker_of_your_own_sees_the_options_and_each_step_and_may_fail(tracked):
    from accelerate.tracking import GeneralTracker

    class Mine(GeneralTracker):
        name, requires_logging_directory = "mine", False

        def __init__(self):
            super().__init__()
            self.options, self.seen, self.ended = {}, [], False

        @property
        def tracker(self):
            return self.seen

        def store_init_configuration(self, values):
            self.options = values

        def log(self, values, step=None, **kwargs):
            self.seen.append((step, values))
            if "loss" in values:
                raise ConnectionError("the service is away")

        def finish(self):
            self.ended = True

    mine = Mine()
    tracked.track(mine)
    with pytest.warns(UserWarning, match="tracker mine could not log train_step: ConnectionError: the service is away"):
        metrics = step(tracked)
    assert metrics["skipped"] is None and mine.options["train/lr"] == 1e-5 and mine.options["model"] == "tiny"
    assert [("loss" in values) for _, values in mine.seen] == [False, True]
    with pytest.raises(SessionError, match="tracked by mine already"):
        tracked.track(mine)
    tracked.untrack()
    assert mine.ended


def test_a_tracker_that_cannot_go_on_or_end_keeps_neither_a_step_nor_a_session(cluster):
    with rb.Session("tiny", name="troubled") as first:
        first.core.link.set(trackers=[{"tracker": "tensorboard", "run": "r", "folder": "f", "options": {"no_such": 1}}])
        again = rb.attach("troubled", take_over=True)
        with pytest.warns(UserWarning, match="tracker tensorboard could not go on in this kernel: TypeError"):
            assert step(again)["skipped"] is None

        class Stuck:
            def finish(self):
                raise ConnectionError("the service is away")

        again.core.trackers._running = {"stuck": Stuck()}
        with pytest.warns(UserWarning, match="tracker stuck could not end: ConnectionError"):
            again.close()
        assert "troubled" not in [one["name"] for one in rb.sessions()]


def test_mistakes_are_told_before_anything_is_started(session):
    with pytest.raises(SessionError, match="no tracker 'tensorbord'; nearest: tensorboard; there are aim"):
        session.track("tensorbord")
    with pytest.raises(SessionError, match="needs its package: pip install comet-ml"):
        session.track("comet_ml")
    with pytest.raises(SessionError, match=r"GeneralTracker.*got object"):
        session.track(object())
    with pytest.raises(SessionError, match="not tracked by 'mine'"):
        session.untrack("mine")


def test_a_kernel_that_attaches_goes_on_with_the_tracker(cluster, tmp_path):
    pytest.importorskip("tensorboard")
    with rb.Session("tiny", name="tracked") as first:
        first.track("tensorboard", folder=str(tmp_path))
        step(first)
        again = rb.attach("tracked", take_over=True)
        step(again)
        again.close()
    assert [at for at, _ in sorted(scalars(tmp_path / "tracked")["loss"])] == [1, 2]
