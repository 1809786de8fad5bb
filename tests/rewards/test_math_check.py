"""Mathematics: equal is equal however it is written; hostile expressions cost their own completion alone."""

import os
import pickle
import signal

import numpy as np
import pytest

import rlbench as rb
from rlbench.data import Prompt
from rlbench.errors import DataError
from rlbench.rewards import math
from rlbench.rewards.lanes import Lane
from rlbench.rewards.math_check import last_boxed
from tests.data.written import written
from tests.rewards.math_pairs import EQUAL, UNEQUAL
from tests.rewards.values import answers, nothing_left, one

pytestmark = pytest.mark.slow
SOON_S = 0.5
"""Of CPU time, all of which what never ends takes: a hundred times what comparing two numbers does."""
CASES = [
    ("1/2", r"so \boxed{0.5}", 1),
    ("1/2", r"so \boxed{\frac{2}{4}}", 1),
    ("1/2", r"so \boxed{0.51}", 0),
    ("0.5", "the answer is $1/2$", 1),
    ("72", "The answer is 72", 1),
    ("72", "The answer is 73.", 0),
    ("so \\boxed{4} each\n#### 72", r"\boxed{72}", 1),
    ("1,000", r"\boxed{1000}", 1),
    (r"$x^2+2x+1$", r"\boxed{(x+1)^2}", 1),
    (r"\sqrt{8}", r"\boxed{2\sqrt{2}}", 1),
    (7, r"\boxed{7}", 1),
    (7, r"\boxed{3} no, \boxed{7}", 1),
    (7, r"\boxed{7} no, \boxed{3}", 0),
    (7, "no idea", 0),
    (7, "", 0),
]


def test_answers_are_compared_as_mathematics():
    prompts = [Prompt(f"q{i}", label) for i, (label, _, _) in enumerate(CASES)]
    value = written(prompts, [[text] for _, text, _ in CASES])
    with nothing_left():
        scored = value.score(math())
    assert dict(zip(value.texts, scored.rewards.tolist(), strict=True)) == {text: want for _, text, want in CASES}
    assert scored.components["math/parsed"].tolist() == [1.0] * 13 + [0.0] * 2
    assert scored.components["math/timeout"].sum() == 0


def test_a_table_of_what_is_equal_and_what_only_looks_or_rounds_alike():
    pairs = [*EQUAL, *UNEQUAL]
    assert len(pairs) >= 150
    value = written([Prompt(f"q{i}", label) for i, (label, _) in enumerate(pairs)], [[text] for _, text in pairs])
    scored = value.score(math(timeout_s=30, processes=1))
    wanted = [1.0] * len(EQUAL) + [0.0] * len(UNEQUAL)
    wrong = [(pair, r) for pair, r, w in zip(pairs, scored.rewards.tolist(), wanted, strict=True) if r != w]
    assert not wrong


def test_votes_go_by_the_answer_right_ones_alike_however_written():
    label = "We have \\boxed{9}, then $\\frac{1}{2}$, so \\boxed{\\frac{1}{2}}."
    texts = [r"\boxed{0.5}", r"it is \boxed{\frac12}", r"\boxed{ 1{,}000 }", "about 1,000 or 2,000", "no idea"]
    scored = written([Prompt("q", label)], [texts]).score(math(processes=1))
    assert scored.rewards.tolist() == [1, 1, 0, 0, 0]
    said = [math().answer(rollout) for rollout in scored.flat]
    assert said[0] == said[1] == r"\frac{1}{2}" and said[3:] == ["2000", None]


def test_expressions_that_would_take_for_ever_are_wrong_in_bounded_time():
    hostile = [r"$10^{10^{10^{10}}}$", r"\boxed{9^{9^{9^{9^{9}}}}}", r"\boxed{(1000000)!!!}", "\\boxed{" * 2000]
    value = answers(r"\boxed{7}", *hostile, r"\boxed{7.0}")
    with nothing_left():
        scored = value.score(math(timeout_s=SOON_S, memory_gib=1))
    assert scored.rewards.tolist() == [1, 0, 0, 0, 0, 1]
    assert scored.components["math/timeout"][1] == 1 and scored.components["math/timeout"][[0, 5]].tolist() == [0, 0]


def test_a_prompt_without_a_label_or_with_one_that_is_no_mathematics_is_an_error_of_its_own():
    value = written([Prompt("q", None), Prompt("q", " "), Prompt("q", "7")], [["7"], ["7"], ["7"]])
    scored = value.score(math(processes=1), on_error="keep")
    np.testing.assert_array_equal(scored.rewards, [np.nan, np.nan, 1])
    first, second = scored.reward_errors
    assert "has no label" in first.error and "holds no mathematics" in second.error


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (r"\boxed{1} and \boxed {2}", r"\boxed {2}"),
        (r"\boxed{\frac{1}{2}} then \boxed{3", r"\boxed{\frac{1}{2}}"),
        (r"\boxed{\boxed{4}}", r"\boxed{\boxed{4}}"),
        (r"\boxed{\{1, 2\}} }", r"\boxed{\{1, 2\}}"),
        ("}}} {7}", None),
        (r"\boxed{" * 50_000, None),
    ],
)
def test_the_last_whole_box_is_the_answer(text, wanted):
    assert last_boxed(text) == wanted


def test_an_answer_may_be_asked_for_inside_of_tags():
    value = answers("<answer>7</answer>", "7", "7 <answer>8</answer>")
    assert value.score(math(inside="answer", processes=1)).rewards.tolist() == [1, 0, 0]


def test_many_completions_start_few_processes(monkeypatch):
    started = []

    class Counted(Lane):
        def __init__(self, *args):
            started.append(1)
            super().__init__(*args)

    monkeypatch.setattr("rlbench.rewards.lanes.Lane", Counted)
    value = answers(*[rf"\boxed{{{i}}}" for i in range(200)])
    scored = value.score(math(processes=2))
    assert scored.rewards.sum() == 1 and scored.rewards[7] == 1 and len(started) == 2


def test_interrupted_the_processes_are_gone_and_what_was_compared_is_kept():
    def label(rollout):
        return "7"

    class Pressing(rb.rewards.Board):
        def put(self, index, outcome, seconds):
            super().put(index, outcome, seconds)
            if len(self.rewards) == 3:
                os.kill(os.getpid(), signal.SIGINT)

    board = Pressing()
    with nothing_left(), pytest.raises(KeyboardInterrupt):
        math(label, processes=1).score_all(list(answers(*["7"] * 8).flat), board)
    assert 3 <= len(board.rewards) < 8


def test_it_is_a_value():
    assert repr(math()) == "math()" and repr(math("solution", timeout_s=1)) == "math(label='solution', timeout_s=1)"
    assert pickle.loads(pickle.dumps(math(inside="a"))) == math(inside="a")
    assert math()(one("7")) == rb.rewards.Reward(1.0, {"math/parsed": 1.0, "math/timeout": 0.0})
    with pytest.raises(DataError):
        math(timeout_s=0)


# -- what is not the answer's fault


ENDLESS = r"$10^{10^{10^{10}}}$"


def test_a_label_that_cannot_be_computed_is_an_error_and_no_zero():
    value = written([Prompt("q", ENDLESS), Prompt("q", "7")], [["7", "8"], ["7", ENDLESS]])
    scored = value.score(math(timeout_s=SOON_S, processes=1), on_error="keep")
    np.testing.assert_array_equal(scored.rewards, [np.nan, np.nan, 1, 0])
    assert scored.components["math/timeout"][3] == 1
    for error in scored.reward_errors:
        assert "the label" in error.error and "CPU time by itself" in error.error


def slow_to_run(monkeypatch, code):
    """What the processes run begins with `code`, which math-verify knows nothing of."""
    import cloudpickle

    from rlbench.rewards import math_check

    class Slow(math_check.Comparison):
        def __call__(self, pair):
            exec(code)
            return super().__call__(pair)

    cloudpickle.register_pickle_by_value(__import__(__name__, fromlist=["x"]))
    monkeypatch.setattr(math_check, "Comparison", Slow)


def test_time_in_which_the_process_got_no_core_makes_no_right_answer_wrong(monkeypatch):
    slow_to_run(monkeypatch, "import time; time.sleep(1.5)")
    assert answers("7", "8").score(math(timeout_s=1, processes=1)).rewards.tolist() == [1, 0]
    monkeypatch.setattr("rlbench.rewards.math_check.WALL", 1)
    scored = answers("7").score(math(timeout_s=1), on_error="keep")
    assert np.isnan(scored.rewards).all() and "the machine is busy" in scored.reward_errors[0].error


def test_a_process_that_dies_is_an_error_and_no_zero(monkeypatch):
    slow_to_run(monkeypatch, "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    scored = answers("7").score(math(), on_error="keep")
    assert np.isnan(scored.rewards).all() and "SIGKILL" in scored.reward_errors[0].error
