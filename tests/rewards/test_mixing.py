"""Rewards made of rewards: sums and choices, with their parts' numbers, failures and interrupts."""

import pickle

import numpy as np
import pytest

import rlbench as rb
from rlbench.data import Prompt
from rlbench.errors import DataError, Stopped
from rlbench.rewards import batched, exact, function, math, mixture, tags, weighted
from tests.data.values import rollouts
from tests.data.written import written
from tests.rewards.values import answers, interrupting, nothing_left, one


def plain(rollout):
    return {"reward": rollout.index, "length": len(rollout)}


async def later(rollout):
    return 10.0


def test_a_weighted_sum_adds_any_kinds_of_rewards_and_keeps_what_it_was_made_of():
    parts = {
        "plain": (plain, 0.5),
        "later": (later, 2),
        "many": (batched(lambda given: [1] * len(given)), -1),
        "apart": (function(lambda r: 3, isolate=True), 1),
    }
    scored = rollouts().score(weighted(parts))
    np.testing.assert_allclose(scored.rewards, [0.5 * i + 20 - 1 + 3 for i in range(6)])
    assert {k: v.tolist() for k, v in scored.components.items()} == {
        "plain": [0, 1, 2, 3, 4, 5],
        "plain/length": [1, 2, 3, 4, 5, 6],
        "later": [10] * 6,
        "many": [1] * 6,
        "apart": [3] * 6,
    }
    assert (scored.reward_seconds > 0).all()


def test_the_sum_of_a_format_and_an_answer():
    value = answers("<answer>7</answer>", "<answer>8</answer>", "7")
    scored = value.score(weighted({"format": (tags("answer"), 0.2), "answer": (math(inside="answer"), 0.8)}))
    np.testing.assert_allclose(scored.rewards, [1, 0.2, 0])
    assert scored.components["answer/math/parsed"].tolist() == [1, 1, 0]


def test_where_a_part_fails_the_completion_has_an_error_that_names_it():
    scored = rollouts().score(
        weighted({"a": (lambda r: 1 / (r.index - 2), 1), "b": (lambda r: r.index, 1)}), on_error="keep"
    )
    assert np.isnan(scored.rewards).tolist() == [i == 2 for i in range(6)]
    (error,) = scored.reward_errors
    assert error.index == 2 and error.error.startswith("'a': the reward raised ZeroDivisionError")
    assert "1 / (r.index - 2)" in error.line


def test_an_interrupt_keeps_the_completions_all_parts_of_which_are_known():
    parts = {"a": (plain, 1), "b": (function(interrupting(at=3), isolate=True, concurrency=1), 1)}
    with nothing_left(), pytest.raises(Stopped, match=r"[23] of 6") as stopped:
        rollouts().score(weighted(parts))
    partial = stopped.value.partial
    assert partial.rewards.tolist() == [1, 2, 3][: partial.samples]
    assert partial.components["a"].tolist() == [0, 1, 2][: partial.samples]


def mixed():
    prompts = [Prompt("a", "1", {"source": "x"}), Prompt("b", "1", {"source": "y"}), Prompt("c", "1", {"source": "z"})]
    return written(prompts, [["1", "2"], ["1"], ["2"]])


def test_a_mixture_scores_each_kind_of_prompt_by_its_own():
    scored = mixed().score(mixture({"x": exact(), "y": plain}, by="source", default=lambda r: -1))
    assert scored.rewards.tolist() == [1, 0, 2, -1]
    nan = np.nan
    wanted = {"x": [1, 0, nan, nan], "y": [nan, nan, 2, nan], "y/length": [nan, nan, 2, nan]}
    wanted |= {"default": [nan, nan, nan, -1]}
    assert list(scored.components) == list(wanted)
    for name, values in wanted.items():
        np.testing.assert_array_equal(scored.components[name], values)


def test_a_kind_nobody_scores_a_key_that_is_missing_and_one_that_cannot_be_looked_up_are_errors():
    scored = mixed().score(mixture({"x": exact(), "zz": exact()}, by="source"), on_error="keep")
    assert [e.index for e in scored.reward_errors] == [2, 3]
    assert "of 'z'; nearest: zz; wanted one of 'x', 'zz', or mixture(default=…)" in scored.reward_errors[1].error
    with pytest.raises(DataError, match="no 'sourc'; nearest: source"):
        mixed().score(mixture({"x": exact()}, by="sourc"))
    with pytest.raises(DataError, match="TypeError"):
        mixed().score(mixture({"x": exact()}, by=lambda r: []))


def test_the_kind_may_be_the_label_or_what_a_function_says():
    assert mixed().score(mixture({"1": lambda r: 5})).rewards.tolist() == [5] * 4
    by_text = mixture({True: lambda r: 1, False: lambda r: 2}, by=lambda r: r.text == "1")
    assert mixed().score(by_text).rewards.tolist() == [1, 2, 1, 2]


def test_an_interrupted_mixture_keeps_the_kinds_that_are_done():
    apart = function(interrupting(at=2), isolate=True, concurrency=1)
    with nothing_left(), pytest.raises(Stopped, match="2 of 4") as stopped:  # completion 2 is all of "y"
        mixed().score(mixture({"x": exact(), "y": apart, "z": exact()}, by="source"))
    assert stopped.value.partial.rewards.tolist() == [1, 0]


def test_they_nest():
    inner = weighted({"answer": (exact(), 1), "bonus": (lambda r: 0.5, 1)})
    scored = mixed().score(mixture({"x": inner}, by="source", default=inner))
    assert scored.rewards.tolist() == [1.5, 0.5, 1.5, 0.5]
    assert scored.components["x/answer"][:2].tolist() == [1, 0] and scored.components["default/bonus"][3] == 0.5


@pytest.mark.parametrize(
    "make",
    [
        lambda: weighted({}),
        lambda: weighted([exact()]),
        lambda: weighted({"a": exact()}),
        lambda: weighted({"a": (exact(), "1")}),
        lambda: weighted({"a": (exact(), float("nan"))}),
        lambda: weighted({"a": (1, 1)}),
        lambda: mixture({}),
        lambda: mixture({"a": 3}),
        lambda: mixture({"a": exact()}, default=3),
    ],
)
def test_what_can_be_no_mixture_is_refused_when_it_is_made(make):
    with pytest.raises(DataError):
        make()


def test_they_are_values_that_say_what_they_are():
    made = weighted({"format": (tags("answer"), 0.2), "mine": (plain, 1)})
    assert repr(made) == "weighted({'format': (tags('answer'), 0.2), 'mine': (plain, 1)})"
    kinds = mixture({"x": exact(), "y": made}, by="source", default=plain)
    assert repr(kinds) == f"mixture({{'x': exact(), 'y': {made!r}}}, by='source', default=plain)"
    packed = mixture({"x": exact()}, by="source", default=weighted({"a": (tags("b"), 1)}))
    assert pickle.loads(pickle.dumps(packed)) == packed
    assert weighted({"a": (exact(), 2)})(one("7")) == rb.rewards.Reward(2.0, {"a": 1.0})


def test_the_callers_parts_may_change_afterwards():
    parts = {1: (lambda rollout: 1.0, 2)}
    made = weighted(parts)
    parts["y"] = "no reward"
    assert list(made.parts) == ["1"] and made.parts["1"][1] == 2.0
