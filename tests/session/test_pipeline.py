"""Rollouts drawn while the batch before them is trained on: order, versions, places, and what is left where it ends."""

import re
import threading
import warnings

import numpy as np
import pytest

import rlbench as rb
from rlbench.errors import DataError, SessionError, Stopped
from rlbench.session.training.prompt_batches import batches_of
from rlbench.tiny import tasks
from tests.clock import until

OPTIONS = {"n": 4, "max_tokens": 6, "progress": False}
TO_THE_END = {"n": 2, "max_tokens": None, "ignore_eos": True, "progress": False}
CORRECTED = rb.rl.grpo(anchor="sampler")


def reward(rollout):
    return float(sum(rollout.token_ids) % 5)


def batches(count, size=2):
    asked = tasks.prompts(count * size, seed=11)
    return [asked[i * size : (i + 1) * size] for i in range(count)]


def stream():
    return rb.data.load([f"sort {i}{9 - i} :" for i in range(20)]).stream(seed=3)


def contents(rollouts):
    return [prompt.content for prompt in rollouts.prompts]


def train(session, rollouts, loss=CORRECTED):
    return session.train_step(rollouts.batch(advantage=rb.rl.group_normalized(eps=1.0)), loss)


def running(session):
    """Samples that the replicas draw now."""
    return sum(status["running"] for status in session.inference.control("status"))


def one_short_then_long(session, count=4):
    """Batches for `TO_THE_END`: of the first the prompts all but fill the model's length, so its completions are short;
    the others would take seconds."""
    room = session.inference.info["max_model_len"] - 8
    return [[[5] * room, [7] * room], *batches(count - 1)]


def held(session):
    """Hold the rollout that runs ahead where it is, so that it is still under way however long the body takes."""
    until(lambda: running(session) > 0)
    session.pause()


def verbs(session, since):
    return [(entry.verb, entry.outcome) for entry in session.core.recorder.entries()[since:]]


# -- prompts of steps


def test_batches_that_do_not_count_yet_are_drawn_once_more():
    prompts = batches_of(iter([["a"], ["b"], ["c"]]), None)
    assert [prompts.draw(), prompts.draw()] == [["a"], ["b"]]
    prompts.give()
    prompts.rewind()
    assert [prompts.draw(), prompts.draw(), prompts.draw()] == [["b"], ["c"], None]


def test_a_stream_stands_behind_what_was_given_and_goes_on_where_somebody_puts_it():
    data = stream()
    whole = data.copy()
    first, second, third = (whole.take(3) for _ in range(3))
    prompts = batches_of(data, 3)
    assert [prompts.draw(), prompts.draw()] == [first, second] and data.taken == 0
    prompts.give()
    assert data.taken == 3 and not prompts.moved
    prompts.rewind()
    assert prompts.draw() == second
    assert data.take(3) == second and prompts.moved
    prompts.rewind()
    assert prompts.draw() == third and not prompts.moved


def test_a_mixture_does_so_too_and_its_copy_goes_on_by_itself():
    mixture = rb.data.mix({"a": (["1", "2", "3"], 0.7), "b": (["4", "5"], 0.3)}, seed=2)
    expected = mixture.copy().take(9)
    prompts = batches_of(mixture, 3)
    drawn = [prompts.draw() for _ in range(3)]
    assert [p for batch in drawn for p in batch] == expected and mixture.taken == 0
    for _ in drawn:
        prompts.give()
    assert mixture.taken == 9 and not prompts.moved


@pytest.mark.parametrize(
    ("prompts", "size", "said"),
    [
        (stream(), None, "batch=None: how many prompts"),
        ([["a"]], 2, "batch=2 would have no effect"),
        (None, 2, "follows none"),
        ("a", None, "got str"),
        (7, None, "got int"),
    ],
)
def test_what_makes_no_batches_is_refused(prompts, size, said):
    with pytest.raises(DataError, match=said):
        batches_of(prompts, size)


@pytest.mark.parametrize("flat", [["a", "b"], [rb.Prompt("a")], [[{"role": "user", "content": "a"}]], [[1, 2]]])
def test_prompts_without_batches_around_them_are_refused(flat):
    with pytest.raises(DataError, match=r"takes batches of prompts"):
        batches_of(flat, None).draw()


# -- the loop


@pytest.mark.engine
def test_lag_0_is_the_loop_by_hand_bit_for_bit(session):
    start = session.snapshot()

    def by_hand():
        for asked in batches(3):
            rollouts = session.rollout(asked, **OPTIONS).score(reward)
            yield rollouts
            session.sync_weights()

    def in_turn():
        with session.pipeline(batches(3), lag=0, reward=reward, **OPTIONS) as steps:
            yield from steps
        assert steps.staleness == [0, 0, 0]

    seen = []
    for loop in (by_hand, in_turn):
        session.restore(start)
        before = len(session.core.recorder.entries())
        drawn = [(rollouts, train(session, rollouts)) for rollouts in loop()]
        told = [verb for verb in verbs(session, before) if verb[0] != "pipeline"]
        assert {*session.inference.weight_versions()} == {session.version}
        seen.append((drawn, told, session.train.call_all("state_checksum").result(), session.history.records[-3:]))
    session.restore(start)
    session.drop(start)
    (hand, *others), (piped, *same) = seen
    for (one, metrics), (other, again) in zip(hand, piped, strict=True):
        assert one.texts == other.texts and one.number == other.number
        for name in ("logprobs", "rewards"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
        assert all(metrics[name] == again[name] for name in ("loss", "grad_norm", "kl", "staleness", "reward_hash"))
    assert others[:2] == same[:2]
    assert [r["step"] for r in others[2]] == [r["step"] for r in same[2]]


@pytest.mark.engine
@pytest.mark.parametrize(("lag", "stale"), [(1, [0, 1, 1, 1, 1]), (2, [0, 1, 1, 2, 1])])
def test_the_weights_that_draw_a_batch_follow_from_its_place_alone(session, lag, stale):
    first, asked = session.version, batches(5)
    before = len(session.core.recorder.entries())
    with session.pipeline(asked, lag=lag, reward=reward, **OPTIONS) as steps:
        for i, rollouts in enumerate(steps):
            assert rollouts.weight_version == first + i - stale[i] and contents(rollouts) == asked[i]
            assert session.last is rollouts
            metrics = train(session, rollouts)
            assert (metrics.staleness, metrics.staleness_max) == (stale[i], stale[i])
            assert ("staleness" in repr(metrics)) == (stale[i] > 0)
    assert steps.staleness == stale and session.version == first + 5
    assert {*session.inference.weight_versions()} == {session.version} and steps.unfinished == []
    assert repr(steps) == f"Pipeline(lag {lag} · 5 given, staleness {np.mean(stale):g} (at most {lag}))"
    assert session.history[-1]["staleness"] == stale[-1]
    told = verbs(session, before)
    assert {outcome for _, outcome in told} == {"done"}
    syncs = 4 if lag == 1 else 3
    names = [verb for verb, _ in told]
    assert (names.count("rollout"), names.count("train_step"), names.count("sync_weights")) == (5, 5, syncs)


@pytest.mark.engine
def test_the_next_batch_is_drawn_and_scored_while_the_body_runs(session):
    scored = []

    def told(rollout):
        scored.append(rollout.source.content)
        return reward(rollout)

    asked = batches(2)
    with session.pipeline(asked, reward=told, **OPTIONS) as steps:
        next(steps)
        until(lambda: len(scored) == 16)
        until(lambda: "ready" in repr(steps))
        assert scored[8:] == [content for content in asked[1] for _ in range(4)]
    try:
        with session.pipeline(one_short_then_long(session), **TO_THE_END) as steps:
            rollouts = next(steps)
            held(session)
            train(session, rollouts.score(reward))
            assert re.search(r"ahead: rollout \d+ running", repr(steps)) and running(session) > 0, "no step waits"
    finally:
        session.resume()


# -- the end


def left(session, asked, way):
    """A pipeline whose first body is left while the next batch is drawn, and what the body was given."""
    steps, given = session.pipeline(asked, lag=2, reward=reward, **TO_THE_END), []
    try:
        with steps:
            for rollouts in steps:
                given.append(rollouts)
                held(session)
                if way == "break":
                    break
                if way == "stop":
                    session.stop()
                else:
                    raise way("in the body")
    finally:
        session.resume()
        LEFT.append((steps, given))


LEFT = []


@pytest.mark.engine
@pytest.mark.parametrize("way", ["break", "stop", ZeroDivisionError, KeyboardInterrupt])
def test_however_the_block_is_left_nothing_runs_on_and_nothing_drawn_is_lost(session, way):
    before, asked = len(session.core.recorder.entries()), one_short_then_long(session)
    if way == "break":
        left(session, asked, way)
    else:
        with pytest.raises(Stopped if way == "stop" else way):
            left(session, asked, way)
    steps, given = LEFT.pop()
    assert [contents(rollouts) for rollouts in given] == asked[:1] and not given[0].aborted.any()
    assert running(session) == 0
    assert not [thread for thread in threading.enumerate() if thread.name == "rlbench pipeline"]
    [cut] = steps.unfinished
    assert cut.aborted.any() and cut.rewards is None and contents(cut) == asked[1]
    told = [outcome for verb, outcome in verbs(session, before) if verb == "rollout"]
    assert told == ["done", "stopped"]
    assert session.rollout(["sort 21 :"], **OPTIONS).samples == 4
    with pytest.raises(SessionError, match="inside of its block"):
        next(steps)


@pytest.mark.engine
def test_an_error_of_a_reward_is_raised_at_its_batch_once(session):
    asked, failing, before = batches(3), threading.Event(), len(session.core.recorder.entries())

    def fails(rollout):
        if rollout.source.content in asked[1]:
            failing.set()
            raise ValueError("no such answer")
        return reward(rollout)

    with warnings.catch_warnings(), session.pipeline(asked, reward=fails, **OPTIONS) as steps:
        warnings.simplefilter("error", UserWarning)
        rollouts = next(steps)
        assert failing.wait(120), "it fails while the batch before it is trained on"
        train(session, rollouts)
        with pytest.raises(DataError, match="no such answer"):
            next(steps)
        assert next(steps, None) is None
    assert contents(steps.unfinished[0]) == asked[1] and steps.unfinished[0].rewards is None
    assert [outcome for verb, outcome in verbs(session, before) if verb == "rollout"] == ["done", "failed", "stopped"]


@pytest.mark.engine
def test_an_error_ahead_that_the_loop_never_reaches_is_told(session):
    def fails(rollout):
        raise ValueError("no such answer")

    with pytest.warns(UserWarning, match="nobody was given, failed: .*no such answer"):
        never_reached(session, fails)
    with session.pipeline(batches(1), made_up=3, **OPTIONS) as steps, pytest.raises(DataError, match="made_up"):
        next(steps)


def never_reached(session, fails):
    scored = iter([reward] * 8)
    with session.pipeline(batches(2), reward=lambda rollout: next(scored, fails)(rollout), **OPTIONS) as steps:
        next(steps)
        until(lambda: "ready" in repr(steps))


# -- going back, places


@pytest.mark.engine
def test_undo_in_the_body_drops_what_was_drawn_ahead_and_draws_it_anew(session):
    asked, taken = batches(4), []
    with session.pipeline(asked, reward=reward, **OPTIONS) as steps:
        for i, rollouts in enumerate(steps):
            taken.append((contents(rollouts), session.version - rollouts.weight_version))
            train(session, rollouts)
            if i == 1:
                step = session.step
                session.undo()
                assert session.step == step - 1
    assert taken == [(asked[0], 0), (asked[1], 1), (asked[2], 0), (asked[3], 1)]
    assert [contents(rollouts) for rollouts in steps.unfinished] == [asked[2]]
    assert [record["staleness"] for record in session.history.records[-3:]] == [0, 0, 1]


@pytest.mark.engine
def test_a_stream_counts_what_was_given_alone(session):
    data = session.follow(stream())
    whole = stream()
    expected = [[prompt.content for prompt in whole.take(2)] for _ in range(5)]
    try:
        with session.pipeline(batch=2, lag=2, reward=reward, **OPTIONS) as steps:
            assert contents(next(steps)) == expected[0]
            kept = session.snapshot("place")
            rollouts = next(steps)
            assert contents(rollouts) == expected[1] and data.taken == 4
            train(session, rollouts)
            assert session.core.link.state("cursor")["cursor"] == data.state()
            session.undo()
            assert contents(next(steps)) == expected[2]
            session.restore(kept)
            assert data.taken == 2 and contents(next(steps)) == expected[1]
            data.take(2)  # for something of the user's own
            assert contents(next(steps)) == expected[3]
        assert data.taken == 8
        with session.pipeline(data, batch=2, **OPTIONS) as steps:
            assert contents(next(steps)) == expected[4]
    finally:
        session.follow(None)
        session.drop("place")


# -- what older weights drew


@pytest.mark.engine
def test_a_loss_that_corrects_is_silent_and_one_that_does_not_is_told(session):
    corrected = [CORRECTED, rb.rl.grpo(mismatch=rb.rl.token_tis()), rb.rl.decoupled_ppo()]
    with session.pipeline(batches(5), reward=reward, **OPTIONS) as steps, warnings.catch_warnings():
        warnings.simplefilter("error")
        train(session, next(steps), "grpo")
        for loss in corrected:
            assert train(session, next(steps), loss).staleness == 1
        with pytest.warns(UserWarning, match="older weights"):
            train(session, next(steps), "grpo")
