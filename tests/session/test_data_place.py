"""The place in the data is part of a session's state: it goes back, and on, with the weights."""

import pytest

import rlbench as rb
from rlbench.errors import DataError, SessionError

pytestmark = pytest.mark.engine
TEXTS = [f"sort {i} {9 - i} :" for i in range(10)]


def stream(texts=TEXTS):
    return rb.data.load(texts).stream(seed=3)


def step(session, prompts):
    """One step on the next prompts; returns what was asked."""
    asked = prompts.take(2)
    scored = session.rollout(asked, n=2, max_tokens=4, progress=False).score(lambda r: float(sum(r.token_ids) % 3))
    session.train_step(scored.batch(advantage=rb.rl.group_normalized()))
    return [prompt.content for prompt in asked]


def test_going_back_asks_the_same_prompts_again(session):
    prompts = session.follow(stream())
    first = step(session, prompts)
    kept = session.snapshot("place")
    second = step(session, prompts)
    third = step(session, prompts)
    assert len({*first, *second, *third}) == 6
    session.restore(kept)
    assert prompts.taken == 2 and step(session, prompts) == second
    session.undo()  # of the step alone: its prompts were taken before it
    assert prompts.taken == 4 and step(session, prompts) == third
    session.restore(kept)
    session.drop(kept)
    session.core.followed.data = None


def test_another_kernel_and_a_checkpoint_go_on_where_the_data_was(cluster, tmp_path):
    whole = stream()
    expected = [[p.content for p in whole.take(2)] for _ in range(3)]
    with rb.Session("tiny", name="placed") as session:
        prompts = session.follow(stream())
        assert step(session, prompts) == expected[0]
        session.save(str(tmp_path))
        again = rb.attach("placed", take_over=True)
        assert step(again, again.follow(stream())) == expected[1]
        with pytest.raises(DataError, match="other prompts"):
            again.follow(stream(TEXTS[1:]))
        again.close()
    loaded = rb.Session.load(str(tmp_path))
    try:
        assert step(loaded, loaded.follow(stream())) == expected[1]
    finally:
        loaded.close()


def test_what_has_no_place_is_refused(session):
    with pytest.raises(SessionError, match=r"follow takes prompts\.stream\(\) or rb\.data\.mix\(…\)"):
        session.follow(rb.data.load(TEXTS))


def test_a_session_can_go_on_with_other_data(session):
    other = TEXTS[5:]
    try:
        session.follow(stream())
        step(session, session.core.followed.data)
        kept = session.snapshot("with the first data")
        with pytest.raises(DataError, match=r"session\.follow\(data, fresh=True\)"):
            session.follow(stream(other))
        second = session.follow(stream(other), fresh=True)
        assert second.taken == 0
        step(session, second)
        assert session.follow(stream(other)).taken == 2  # it is this one that is kept now
        with pytest.warns(UserWarning, match="stays where it is"):
            session.restore(kept)
        assert session.follow(stream(other)).taken == 2
        assert session.follow(None) is None
        assert session.follow(stream()).taken == 0
        with pytest.raises(SessionError, match="no effect"):
            session.follow(None, fresh=True)
    finally:
        session.follow(None)
        session.drop("with the first data")
