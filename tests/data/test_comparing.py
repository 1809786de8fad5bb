"""The reward lab: agreement against independent references, disagreements first, failures and interrupts."""

import os
import pickle

import numpy as np
import pandas
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rlbench as rb
from rlbench.errors import DataError, Stopped
from tests.clock import HandClock
from tests.data.values import rollouts
from tests.data.written import written


def scored_by(old, new, groups=3):
    """A comparison of two rewards given as numbers, `groups` prompts with equally many completions."""
    each = len(old) // groups
    value = written([f"q{i}" for i in range(groups)], [[f"a{k}" for k in range(each)] for _ in range(groups)])
    return value.compare(old=old, new=new)


numbers = st.lists(st.sampled_from([0.0, 0.1, 0.5, 1.0, -2.0, 7.25]), min_size=12, max_size=12)


@settings(max_examples=60)
@given(numbers, numbers)
def test_the_numbers_are_those_of_the_definition(old, new):
    found = scored_by(old, new).agreements["new"]
    a, b = np.array(old), np.array(new)
    pairs = [(i, j) for g in range(3) for i in range(4 * g, 4 * g + 4) for j in range(i + 1, 4 * g + 4)]
    order = [np.sign(round(a[i] - a[j], 6)) != np.sign(round(b[i] - b[j], 6)) for i, j in pairs]
    signs = [[np.sign(round(x[i] - x[i // 4 * 4 : i // 4 * 4 + 4].mean(), 6)) for i in range(12)] for x in (a, b)]
    assert found.order_changed == pytest.approx(np.mean(order))
    assert found.flipped == pytest.approx(np.mean([s * t < 0 for s, t in zip(*signs, strict=True)]))
    assert found.changed == pytest.approx(np.mean(a != b)) and found.mean == pytest.approx(b.mean())
    assert found.spread == pytest.approx(np.mean([len(set(new[4 * g : 4 * g + 4])) > 1 for g in range(3)]))
    frame = pandas.DataFrame({"a": a, "b": b})
    if len(set(old)) > 1 and len(set(new)) > 1:
        assert found.correlation == pytest.approx(frame.corr()["a"]["b"], abs=1e-9)
    else:
        assert np.isnan(found.correlation)


def test_a_reward_scaled_and_shifted_changes_values_and_neither_order_nor_advantage_signs():
    old = [0.1, 0.3, 0.7, 0.7] * 3
    found = scored_by(old, [5 * x - 3 for x in old]).agreements["new"]
    assert (found.changed, found.order_changed, found.flipped) == (1, 0, 0)
    assert found.correlation == pytest.approx(1)
    turned = scored_by(old, [-x for x in old]).agreements["new"]
    assert turned.flipped == 1 and turned.correlation == pytest.approx(-1)


def test_rounding_is_no_change():
    old = [0.1 * 3] * 4 + [0.7] * 8
    found = scored_by(old, [0.3] * 4 + [0.7] * 8).agreements["new"]
    assert (found.changed, found.order_changed, found.flipped, found.spread) == (0, 0, 0, 0)
    equal = [0.7] * 3 + [0.1 + 0.2, 0.3, 0.3]  # less its mean each is 1e-16, and no advantage
    assert scored_by(equal, [1, 0, 0, 1, 1, 1], groups=2).agreements["new"].flipped == 0
    assert scored_by(equal, [5] * 6, groups=2).agreements["new"].order_changed == 0


def test_the_table_has_a_row_per_reward_and_counts_say_which_value_met_which():
    lab = rollouts().compare(a=[0, 0, 0, 1, 1, 1], b=[0, 0, 1, 1, 1, 1], c=[2] * 6)
    assert lab.table().index.tolist() == ["a", "b", "c"] and lab.table()["changed"]["b"] == pytest.approx(1 / 6)
    rows, columns, counts = lab.counts()
    assert (rows, columns, counts.tolist()) == (["0", "1"], ["0", "1"], [[2, 1], [0, 3]])
    rows, columns, counts = lab.counts("c")
    assert columns == ["2"] and counts.tolist() == [[3], [3]]
    many = scored_by(np.arange(12.0), np.arange(12.0) ** 2)
    rows, columns, counts = many.counts()
    assert rows[0] == "0 to 2.75" and len(columns) == 4 and counts.tolist() == (3 * np.eye(4)).tolist()


def test_disagreements_come_first_failed_then_largest():
    def new(rollout):
        return [0, 1, 2.5, 1 / 0 if rollout.index == 3 else 0, 9, 5][rollout.index]

    lab = rollouts().compare(old=range(6), new=new)
    found = lab.disagreements()
    assert [d.index for d in found] == [3, 4, 2] and np.isnan(found[0].new)
    worst = found[1]
    assert (worst.prompt, worst.response, worst.label) == ("sort 4 :", "p2s0", "4")
    assert (worst.old, worst.new, worst.diff) == (4, 9, 5)
    assert len(lab.disagreements(1)) == 1 and len(pandas.DataFrame(lab.disagreements())) == 3
    (error,) = lab.errors("new")
    assert error.index == 3 and "ZeroDivisionError" in error.error and not lab.errors("old")
    agreement = lab.agreements["new"]
    assert (agreement.errors, agreement.compared) == (1, 5)
    _, columns, counts = lab.counts()
    assert columns[-1] == "failed" and counts[:, -1].tolist() == [0, 0, 0, 1, 0, 0]


def test_the_slowest_are_those_that_took_longest_whichever_reward_it_was(monkeypatch):
    clock = HandClock()
    monkeypatch.setattr("time.perf_counter", clock)

    def sleepy(index, seconds):
        return lambda r: clock.pass_by(seconds * (r.index == index)) or 1

    lab = rollouts().compare(a=sleepy(2, 0.03), b=sleepy(4, 0.09), c=[0] * 6)
    assert [(t.name, t.index) for t in lab.slowest(2)] == [("b", 4), ("a", 2)]
    assert lab.slowest(1)[0].response == "p2s0" and np.isnan(lab.agreements["c"].seconds)
    assert len(lab.slowest(100)) == 12


def test_rewards_they_have_are_what_a_new_one_is_compared_with():
    first = rollouts().score(lambda r: {"reward": r.index, "length": len(r)})
    lab = first.compare(new=[0] * 6)
    assert lab.names == ["old", "new"] and lab.rewards("old").tolist() == [0, 1, 2, 3, 4, 5]
    assert lab.rollouts("old").components.keys() == {"length"} and lab.rollouts("new").rewards.tolist() == [0] * 6
    lab = first.compare(before="rewards", length="length")
    assert lab.rewards("length").tolist() == [1, 2, 3, 4, 5, 6] and lab.baseline == "before"
    assert first.compare(old=[1] * 6).names == ["before", "old"]


@pytest.mark.parametrize(
    ("rewards", "said"),
    [
        ({}, "0 rewards"),
        ({"new": [0] * 6}, "1 rewards"),
        ({"a": "rewards", "b": [0] * 6}, "asks for 'rewards' of these rollouts; they are not scored yet"),
        ({"a": [0] * 5, "b": [0] * 6}, "wanted 6 rewards"),
        ({"a": [0] * 6, "b": 3}, "wanted 6 rewards that are numbers"),
    ],
)
def test_what_cannot_be_compared_is_refused(rewards, said):
    with pytest.raises(DataError, match=said):
        rollouts().compare(**rewards)


def test_names_are_looked_up_with_the_nearest_and_options_are_checked():
    lab = rollouts().score(lambda r: {"reward": 1, "length": 2})
    with pytest.raises(DataError, match="nearest: length"):
        lab.compare(a="lenght", b=[0] * 6)
    with pytest.raises(DataError, match="no reward 'nwe'; nearest: new"):
        lab.compare(new=[0] * 6).rollouts("nwe")
    with pytest.raises(DataError, match="isolate=True"):
        lab.compare(new=lambda r: 1, timeout_s=1)
    with pytest.raises(DataError, match="0 completions"):
        rollouts().select(np.zeros(6, bool)).compare(a=[], b=[])


def test_options_reach_each_function():
    lab = rollouts().compare(a=lambda r: os.getpid(), b=lambda r: os.getpid(), isolate=True, concurrency=1)
    assert os.getpid() not in {*lab.rewards("a"), *lab.rewards("b")}


def test_an_interrupt_keeps_the_rewards_that_are_whole():
    def pressing(rollout):
        if rollout.index == 2:
            raise KeyboardInterrupt
        return 1.0

    with pytest.raises(Stopped, match=r"'c': .*2 of 6.*; 2 of 3 rewards are whole") as stopped:
        rollouts().compare(a=[0] * 6, b=[1] * 6, c=pressing)
    assert stopped.value.partial.names == ["a", "b"]
    with pytest.raises(Stopped) as stopped:
        rollouts().compare(a=[0] * 6, c=pressing)
    assert stopped.value.partial is None


def test_it_is_a_value():
    lab = rollouts().compare(old=[0] * 6, new=rb.rewards.exact())
    assert repr(lab) == "RewardComparison(6 completions: old 0, new 0)"
    assert pickle.loads(pickle.dumps(lab)).agreements.keys() == lab.agreements.keys()
