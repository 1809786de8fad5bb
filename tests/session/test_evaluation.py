"""Evaluating: which completions count, and a stop that reaches the reward."""

import os
import signal
import threading
import time
from dataclasses import replace

import numpy as np
import pytest

import rlbench as rb
from rlbench.data import FINISH_REASONS
from rlbench.dispatch.chain import Chain
from rlbench.errors import DataError, Stopped
from rlbench.notebook.cards.kept_views import evaluation_card
from rlbench.session.training.evaluation import Evaluation, Scoring, evaluate_steps
from tests.data.values import rollouts
from tests.notebook.reading import both
from tests.rewards.values import nothing_left


class Drawn:
    """A step that has its rollouts already."""

    def __init__(self, value):
        self.value = value

    def submit_generate(self, *args, **kwargs):
        return self

    def stop(self):
        pass

    def result(self, timeout=None):
        return self.value


def evaluated(value, reward=None, env=None):
    """The verb over rollouts that are there."""
    return Chain("evaluate", evaluate_steps(Drawn(value), [], reward, 1, {}, False, env)).result()


def with_a_crash():
    """Six completions; the environment crashed in number 1, after a reward, and number 4 was cut by a stop."""
    value = rollouts()
    finish = value.finish.copy()
    finish[[1, 4]] = FINISH_REASONS.index("abort")
    error = {"where": "step", "kind": "ValueError", "message": "x", "turn": 1, "ended": True}
    infos = tuple({"turns": 2, "errors": [error]} if i == 1 else {"turns": 1} for i in range(6))
    rewards = np.array([1, 0.5, 1, np.nan, 0.5, 0])
    return replace(value, finish=finish, infos=infos, rewards=rewards, env_rewards=rewards)


def test_completions_that_the_environment_failed_or_a_stop_cut_do_not_count():
    found = evaluated(with_a_crash(), env=object())
    assert found.reward == pytest.approx(2 / 3)
    assert found.counted.tolist() == [True, False, True, False, False, True]
    assert repr(found) == (
        "Evaluation(reward 0.667 over 3 completions; left out: 1 ended by an error of the environment, 1 cut by a "
        "stop, 1 without a reward)"
    )
    assert found.rollouts.samples == 6
    by_function = evaluated(with_a_crash(), reward=lambda r: float(r.index), env=object())
    assert by_function.reward == pytest.approx((0 + 2 + 3 + 5) / 4)
    assert repr(evaluated(rollouts(), reward=lambda r: 1.0)) == "Evaluation(reward 1 over 6 completions)"


def test_the_card_counts_the_same_completions():
    text = both(evaluation_card(evaluated(with_a_crash(), env=object())))
    assert "66.7 % of 3 completions" in text and "0.667 ± 0.272" in text
    assert "left out 1 ended by an error of the environment, 1 cut by a stop, 1 without a reward" in text
    assert "left out" not in both(evaluation_card(Evaluation(0.5, rollouts().score([0, 1, 0, 1, 0, 1]))))


def test_where_nothing_counts_there_is_no_mean():
    value = with_a_crash()
    with pytest.raises(DataError, match="no completion counts: 6 cut by a stop"):
        evaluated(replace(value, infos=(), finish=np.full(6, FINISH_REASONS.index("abort"), np.int8)), env=object())


# -- stops


def slow(rollout):
    """Half a second each."""
    time.sleep(0.5)
    return float(rollout.index)


def isolated(rollout):
    if rollout.index:
        time.sleep(60)
    return 1.0


async def waiting(rollout):
    import asyncio

    await asyncio.sleep(60 if rollout.index else 0)
    return 1.0


@pytest.mark.parametrize("reward", [slow, rb.rewards.function(isolated, isolate=True, concurrency=2), waiting])
def test_a_stop_ends_the_scoring_and_keeps_what_has_a_reward(reward):
    with nothing_left():
        step = Scoring(rollouts(), reward)
        while not step._board.rewards:
            time.sleep(0.01)
        step.stop()
        with pytest.raises(Stopped, match="of 6 completions have a reward") as raised:
            step.result(timeout=10)
    assert raised.value.partial.samples == len(step._board.rewards) < 6
    assert np.isfinite(raised.value.partial.rewards).all()
    assert not [t for t in threading.enumerate() if t.name == "rlbench scoring"]


def test_a_plain_function_that_hangs_is_left_behind_and_changes_nothing_later():
    release = threading.Event()

    def hanging(rollout):
        if rollout.index == 2:
            release.wait(60)
        return 1.0

    chain = Chain("evaluate", evaluate_steps(Drawn(rollouts()), [], hanging, 1, {}, False))
    while not isinstance(chain._current, Scoring) or len(chain._current._board.rewards) < 2:
        time.sleep(0.01)
    threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    try:
        with pytest.raises(Stopped, match=r"cannot be cut: .*isolate=True") as raised:
            chain.blocking_result()
        assert chain.done and raised.value.partial.samples == 2
    finally:
        board = chain._current._board
        release.set()
    while [t for t in threading.enumerate() if t.name == "rlbench scoring"]:
        time.sleep(0.01)
    assert len(board.rewards) == 2


@pytest.mark.engine
def test_ctrl_c_while_the_reward_runs_gives_back_the_prompt_and_the_next_verb_works(session):
    seen = threading.Event()

    def reward(rollout):
        seen.set()
        time.sleep(0.3)
        return 1.0

    def press():
        seen.wait(60)
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=press).start()
    with pytest.raises(Stopped) as raised:
        session.evaluate([f"sort {i} 1 :" for i in range(30)], reward, max_tokens=2, progress=False)
    assert 0 < raised.value.partial.samples < 30
    assert session.evaluate(["sort 2 1 :"], lambda r: 1.0, max_tokens=2, progress=False).reward == 1.0


@pytest.mark.engine
def test_session_stop_reaches_the_reward_of_an_evaluation(session):
    seen = threading.Event()

    def reward(rollout):
        seen.set()
        time.sleep(0.3)
        return 1.0

    pending = session.evaluate([f"sort {i} 1 :" for i in range(30)], reward, max_tokens=2, progress=False, block=False)
    assert seen.wait(60)
    stopped = session.stop()  # the monitor may not have heard yet that the rollout is over
    assert stopped == ["evaluate"] or stopped[0].startswith("rollout")
    with pytest.raises(Stopped) as raised:
        pending.result(timeout=5)
    assert raised.value.partial is None or raised.value.partial.samples < 30
