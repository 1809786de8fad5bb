"""Evaluations of a session: bound to the weights they are of, in the history, and marked where those are gone."""

import pytest

import rlbench as rb
from rlbench.errors import DataError
from rlbench.session.record import evaluations
from rlbench.tiny import tasks

pytestmark = pytest.mark.engine
NAME = "eval/held/reward"


def step(session):
    scored = session.rollout(tasks.prompts(2), n=4, max_tokens=6, progress=False).score(lambda r: float(r.index % 2))
    metrics = session.train_step(scored.batch(advantage=rb.rl.group_normalized()))
    session.sync_weights()
    return metrics


def held(session, **options):
    sets = {"held": tasks.prompts(4, "eval"), "seen": tasks.prompts(2)}
    return session.evaluate(sets, tasks.reward, max_tokens=6, progress=False, **options)


def states(session):
    return [one["state"] for one in session.evaluations["held"][-3:]]


@pytest.fixture
def stepped(session, put_back):
    """Evaluated before and after a step."""
    before = held(session)
    metrics = step(session)
    return session, before, metrics, held(session)


def test_they_are_kept_with_their_version_and_stand_in_the_history(stepped):
    session, before, metrics, after = stepped
    assert session.history[-1][NAME] == after["held"].reward and session.history[-1]["step"] == metrics["step"]
    assert session.history[-1]["eval/seen/reward"] == after["seen"].reward
    assert session.evaluations.at(metrics["version"], "held") is after["held"]
    first = session.evaluations.at(before["held"].version, "held")
    assert first.compare(after["held"]).before is before["held"]
    assert states(session)[-2:] == ["earlier", "now"]
    with pytest.raises(DataError, match=r"several sets: at\(\d+, name\), of held, seen"):
        session.evaluations.at(metrics["version"])
    verb = session.history.verbs[-1]
    assert verb["verb"] == "evaluate" and verb["metrics"][NAME] == after["held"].reward
    assert set(verb["hashes"]) == {"reward"}


def test_the_oldest_are_let_go_where_they_take_too_much_memory_and_their_numbers_stay(session, put_back, monkeypatch):
    before = held(session)
    monkeypatch.setattr(evaluations, "KEPT_BYTES", 1)
    step(session)
    after = held(session)
    assert session.evaluations.at(after["seen"].version, "seen") is after["seen"], "the newest is always kept"
    with pytest.raises(DataError, match="not in this kernel any more"):
        session.evaluations.at(before["held"].version, "held")
    assert session.evaluations["held"][-2]["reward"] == before["held"].reward


def test_an_undone_step_takes_its_evaluations_out_of_the_history(stepped):
    session, before, *_ = stepped
    session.undo()
    assert states(session)[-2:] == ["now", "undone"], "the weights of before the step are back under another version"
    assert NAME not in (session.history[-1] if len(session.history) else {}) or (
        session.history[-1][NAME] == before["held"].reward
    )
    again = held(session)
    assert again["held"].rollouts.texts == before["held"].rollouts.texts
    assert states(session) == ["now", "undone", "now"]
    step(session)
    assert states(session) == ["earlier", "undone", "earlier"]


def test_an_evaluation_on_another_branch_is_not_undone(stepped):
    session = stepped[0]
    session.branch("idea")
    step(session)
    held(session)
    session.branch("main")
    assert states(session) == ["earlier", "now", "on idea"]
    session.branch("idea")
    assert states(session) == ["earlier", "earlier", "now"]
    session.branch("main")
    session.drop(session.branches["idea"])
    assert states(session) == ["earlier", "now", "undone"]


def test_replicas_that_are_behind_are_evaluated_as_the_weights_they_hold(stepped):
    session, _, metrics, _ = stepped
    version = metrics["version"]
    scored = session.rollout(tasks.prompts(2), n=4, max_tokens=6, progress=False).score(lambda r: float(r.index % 2))
    session.train_step(scored.batch(advantage=rb.rl.group_normalized()))
    found = held(session)
    assert found["held"].version == version and session.evaluations["held"][-1]["state"] == "earlier"
    assert NAME not in session.history[-1] and session.history[-2][NAME] == found["held"].reward
    assert session.evaluations["held"][-1]["step"] == metrics["step"]


def test_a_set_with_a_name_of_its_own_and_sampled_answers(session, put_back):
    prompts = rb.data.PromptSet.of(tasks.prompts(3, "eval"), "digits")
    beside = session.evaluate({"first": tasks.prompts(2), "digits": prompts}, tasks.reward, 4, max_tokens=6)
    alone = session.evaluate(prompts, tasks.reward, 4, max_tokens=6)
    assert alone.name == "digits" and alone.rollouts.texts == beside["digits"].rollouts.texts
    assert list(alone.metrics()) == ["eval/digits/reward", "eval/digits/pass@4", "eval/digits/maj@4"]
    assert session.evaluations[-1]["metrics"] == alone.metrics()


def test_a_checkpoint_keeps_them_with_the_completions_of_the_newest(stepped, tmp_path):
    session, before, *_ = stepped
    session.undo()
    undone = session.evaluations.records
    session.save(tmp_path)
    with rb.Session.load(tmp_path, inference={"max_model_len": 128, "kv_cache_bytes": 1 << 26}, undo=0) as other:
        own = other.evaluations
        assert [one["metrics"] for one in own] == [one["metrics"] for one in undone]
        assert states(other) == states(session) and own["held"][-1]["state"] == "undone"
        assert other.history.begin == session.history.begin
        back = own.at(before["held"].version, "held")
        assert back.table().equals(before["held"].table()) and back.metrics() == before["held"].metrics()
        assert back.interval == before["held"].interval
        again = held(other)
        assert again["held"].reward == before["held"].reward, "the very weights"
        assert back.compare(again["held"]).paired.difference == 0
