"""Trackers get what the history gets, and a tracker in trouble ends no step."""

import pytest

import rlbench as rb
from rlbench.errors import SessionError

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
    assert found["evaluation/reward"] == [(found["loss"][1][0], evaluation.reward)]
    assert len(found["rollout/length"]) == 2


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
        assert (
            "tensorboard" in repr(again.core.trackers) and again.core.trackers._running is None
        )  # looking starts nothing
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
    with pytest.raises(SessionError, match=r"an accelerate\.tracking\.GeneralTracker of your own, got object"):
        session.track(object())
    with pytest.raises(SessionError, match="not tracked by 'mine'"):
        session.untrack("mine")


def test_a_kernel_that_attaches_goes_on_with_the_tracker(cluster, tmp_path):
    pytest.importorskip("tensorboard")
    with rb.Session("tiny", name="tracked") as first:
        first.track("tensorboard", folder=str(tmp_path))
        step(first)
        again = rb.attach("tracked", take_over=True)
        assert "tensorboard" in repr(again.core.trackers)
        step(again)
        again.close()
    assert [at for at, _ in sorted(scalars(tmp_path / "tracked")["loss"])] == [1, 2]
