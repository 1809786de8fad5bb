"""Evaluating: which completions count, and a stop that reaches the reward."""

import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

import rlbench as rb
from rlbench.data import FINISH_REASONS, Prompt
from rlbench.data.prompts.sampling import request_seeds
from rlbench.dispatch.chain import Chain
from rlbench.errors import DataError, Stopped
from rlbench.notebook.cards.result_views import evaluation_card
from rlbench.session.training.evaluating import Scoring, evaluate
from rlbench.session.training.evaluation import Evaluation
from tests.clock import LIMIT_S, interrupt_once, main_thread_runs, until
from tests.data.values import rollouts
from tests.data.written import written
from tests.notebook.reading import both
from tests.rewards.values import nothing_left


class Drawn:
    """A step that has its rollouts already."""

    def __init__(self, value):
        self.value = value

    def adapter_number(self, name):
        return None

    def submit_generate(self, prompts, *args, seeds, **kwargs):
        self.asked, self.drawn_by = prompts, seeds
        return self

    def seeds(self, sampling, number, prompts, samples):
        return request_seeds(7, number, prompts, samples)

    def stop(self):
        pass

    def result(self):
        return self.value


def evaluating(value, reward=None, env=None, prompts=None, inference=None):
    """The verb under way, over rollouts that are there."""
    nowhere = SimpleNamespace(note=lambda found, adapter: None)
    inference = inference or Drawn(value)
    core = SimpleNamespace(inference=inference, evaluations=nowhere)
    return Chain("evaluate", evaluate(core, list(value.prompts) if prompts is None else prompts, reward, env=env))


def evaluated(value, reward=None, env=None, **given):
    """What it returns."""
    return evaluating(value, reward, env, **given).result()


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
    assert "66.7 % of 3 completions" in text and "reward 0.667 · 95 % over prompts:" in text
    assert "left out 1 ended by an error of the environment, 1 cut by a stop, 1 without a reward" in text
    assert "left out" not in both(evaluation_card(Evaluation(0.5, rollouts().score([0, 1, 0, 1, 0, 1]))))


def test_where_nothing_counts_there_is_no_mean():
    value = with_a_crash()
    with pytest.raises(DataError, match="no completion counts: 6 cut by a stop"):
        evaluated(replace(value, infos=(), finish=np.full(6, FINISH_REASONS.index("abort"), np.int8)), env=object())


def of_prompts(*rewards):
    """An evaluation of as many prompts, two completions each."""
    value = written([Prompt(f"p{i}", "") for i in range(len(rewards))], [[f"a{i}", "b"] for i in range(len(rewards))])
    return evaluated(value, reward=lambda r: rewards[r.group][r.index % 2])


def test_an_evaluation_says_how_sure_it_is_and_what_more_tries_or_votes_would_give():
    found = of_prompts((1, 0), (0, 0), (1, 1))
    low, high = found.interval
    assert low < found.reward == 0.5 < high and found.version == found.rollouts.weight_version
    assert [item.rewards.tolist() for item in found.items] == [[1, 0], [0, 0], [1, 1]]
    assert found.pass_at(1) == 0.5 and found.pass_at(2) == pytest.approx(2 / 3)
    assert found.majority_at(2) == 0.5, "two different answers share the vote"
    assert found.majority_at(2, answer=lambda rollout: "same", at=0.5) == pytest.approx(2 / 3)
    with pytest.raises(DataError, match="n=3"):
        found.pass_at(3)
    assert len(evaluated(with_a_crash(), env=object()).items[0].rewards) < 3, "only those that count"


def test_two_evaluations_of_the_same_prompts_are_compared_prompt_by_prompt():
    before, after = of_prompts((1, 0), (0, 0), (1, 1), (0, 0)), of_prompts((1, 1), (1, 0), (1, 0), (0, 0))
    found = before.compare(after)
    assert (found.gained, found.lost) == ((0, 1), (2,)) and found.paired.difference == 0.125
    assert found.paired.p_value == 1 and "2 prompts better, 1 worse" in repr(found)
    assert [r.prompt for r in found.rollouts().flat] == ["p0", "p0", "p1", "p1", "p2", "p2"]
    assert [r.reward for r in found.rollouts(found.gained, after=False).flat] == [1, 0, 0, 0]
    with pytest.raises(DataError, match="same prompts"):
        before.compare(of_prompts((1, 0)))


# -- several sets


def of_two_sets(reward, **given):
    """Four prompts with two completions each, evaluated as a set of one and a set of three."""
    asked = [Prompt(f"p{i}", str(i)) for i in range(4)]
    value = written(asked, [[f"{i}", "no"] for i in range(4)])
    return evaluated(value, reward, prompts={"one": asked[:1], "rest": asked[1:]}, **given)


def right(rollout):
    return float(rollout.text == rollout.label)


def test_sets_are_scored_apart_and_named_as_their_metrics_are():
    found = of_two_sets(right)
    assert list(found) == ["one", "rest"] and [len(one.items) for one in found.values()] == [1, 3]
    assert [p.content for p in found["rest"].rollouts.prompts] == ["p1", "p2", "p3"]
    assert found["rest"].rollouts.texts == ("1", "no", "2", "no", "3", "no")
    assert found.metrics() == {
        f"eval/{name}/{metric}": value
        for name in ("one", "rest")
        for metric, value in (("reward", 0.5), ("pass@2", 1.0), ("maj@2", 0.5))
    }
    assert repr(found).splitlines()[1] == "  Evaluation('one': reward 0.5 over 2 completions)"
    with pytest.raises(KeyError, match="no set 'ones' was evaluated; nearest: one"):
        found["ones"]


def test_each_set_may_have_a_reward_of_its_own():
    found = of_two_sets({"rest": right, "one": lambda rollout: 0.25})
    assert [one.reward for one in found.values()] == [0.25, 0.5]


def test_a_set_draws_the_same_alone_and_beside_others():
    asked = [Prompt(f"p{i}") for i in range(4)]
    value = written(asked, [["a"]] * 4)
    beside, alone = Drawn(value), Drawn(value[2:])
    evaluated(value, lambda r: 1.0, prompts={"a": asked[:2], "b": asked[2:]}, inference=beside)
    evaluated(value[2:], lambda r: 1.0, prompts=asked[2:], inference=alone)
    assert beside.drawn_by[2:].tolist() == alone.drawn_by.tolist()


@pytest.mark.parametrize(
    ("prompts", "reward", "said"),
    [
        ({}, right, "no set of prompts"),
        ({"a": ["x"], "": ["y"]}, right, "wanted a text"),
        ({"a": ["x"], 3: ["y"]}, right, "is named 3"),
        ({"a": []}, right, "is empty"),
        ({"a": ["x"], "b": ["y"]}, {"a": right}, "no reward for the set 'b'"),
        ({"a": ["x"]}, {"a": right, "aa": right}, "no prompts for the set 'aa'; nearest: a"),
        (["x"], {"a": right}, "need prompts by the same names"),
        ({"a": ["x"]}, None, "needs a reward function"),
        ("no_such_file.jsonl", right, "no_such_file"),
    ],
)
def test_what_cannot_be_evaluated_is_told_before_anything_is_drawn(prompts, reward, said):
    inference = Drawn(rollouts())
    with pytest.raises(DataError, match=said):
        evaluated(rollouts(), reward, prompts=prompts, inference=inference)
    assert not hasattr(inference, "asked")


def test_a_row_of_one_prompt_is_no_set():
    value = written([Prompt("p0", "1")], [["1"]])
    assert evaluated(value, right, prompts={"prompt": "p0", "label": "1"}).reward == 1.0


def test_sets_are_compared_one_by_one():
    before, after = of_two_sets(right), of_two_sets(lambda r: 1.0)
    compared = before.compare(after)
    assert {name: one.gained for name, one in compared.items()} == {"one": (0,), "rest": (0, 1, 2)}
    with pytest.raises(DataError, match="no set in common"):
        before.compare({"other": after["one"]})


def test_a_table_has_a_row_per_prompt():
    table = of_two_sets(right)["rest"].table()
    assert table.columns.tolist() == ["prompt", "label", "reward", "right", "completions", "answer"]
    assert table.loc[1].tolist() == ["p2", "2", 0.5, 1, 2, "2"]


@pytest.mark.slow
def test_a_file_of_gsm8ks_form_is_evaluated_as_mathematics_and_votes_by_the_answer(tmp_path):
    file = tmp_path / "gsm8k_test.jsonl"
    file.write_text(
        '{"question": "1+1?", "answer": "It is one and one. #### 2"}\n{"question": "2+3?", "answer": "#### 5"}\n'
    )
    answers = [["so \\boxed{2}", "2.0 then", "\\boxed{3}"], ["\\boxed{6}", "it is 6", "\\boxed{5}"]]
    value = written([Prompt("1+1?", "#### 2"), Prompt("2+3?", "#### 5")], answers)
    found = evaluated(value, rb.rewards.math(), prompts=str(file))
    assert found.name == "gsm8k_test" and found.reward == pytest.approx(0.5)
    assert found.pass_at(3) == 1.0 and found.majority_at(3) == 0.5
    assert found.majority_at(3, answer=lambda rollout: rollout.text) < 0.5 + 1e-9
    assert found.table()["answer"].tolist() == ["2", "6"]


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
        until(lambda: step._board.rewards)
        step.stop()
        with pytest.raises(Stopped, match="of 6 completions have a reward") as raised:
            step.result()
    assert raised.value.partial.samples == len(step._board.rewards) < 6
    assert np.isfinite(raised.value.partial.rewards).all()
    assert not [t for t in threading.enumerate() if t.name == "rlbench scoring"]


def test_a_plain_function_that_hangs_is_left_behind_and_changes_nothing_later():
    release = threading.Event()

    def hanging(rollout):
        if rollout.index == 2:
            release.wait(120)
        return 1.0

    chain = evaluating(rollouts(), hanging)
    until(lambda: isinstance(chain._current, Scoring) and len(chain._current._board.rewards) == 2)
    interrupt_once(lambda: main_thread_runs("blocking_result"))
    try:
        with pytest.raises(Stopped, match=r"cannot be cut: .*isolate=True") as raised:
            chain.blocking_result()
        assert chain.done and raised.value.partial.samples == 2
    finally:
        board = chain._current._board
        release.set()
    until(lambda: not [t for t in threading.enumerate() if t.name == "rlbench scoring"])
    assert len(board.rewards) == 2


@pytest.mark.engine
def test_ctrl_c_while_the_reward_runs_gives_back_the_prompt_and_the_next_verb_works(session):
    seen = []

    def reward(rollout):
        seen.append(rollout.index)
        time.sleep(0.3)  # thirty of them outlast the interrupt
        return 1.0

    interrupt_once(lambda: len(seen) >= 2)
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
    assert seen.wait(LIMIT_S)
    stopped = session.stop()  # the monitor may not have heard yet that the rollout is over
    assert stopped == ["evaluate"] or stopped[0].startswith("rollout")
    with pytest.raises(Stopped) as raised:
        pending.result(timeout=LIMIT_S)
    assert raised.value.partial is None or raised.value.partial.samples < 30
