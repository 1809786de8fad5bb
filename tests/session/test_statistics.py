"""Numbers of an evaluation against their definitions by brute force, and what is known of them."""

import itertools
import math

import numpy as np
import pytest

from rlbench.errors import DataError
from rlbench.session.training import statistics

RNG = np.random.default_rng(3)
REWARDS = [RNG.integers(0, 2, 6).astype(float) for _ in range(9)]


@pytest.mark.parametrize("k", [1, 2, 5, 6])
def test_pass_at_k_is_the_mean_over_all_choices_of_k(k):
    for chance, rewards in zip(statistics.pass_at(k, REWARDS), REWARDS, strict=True):
        assert chance == pytest.approx(np.mean([max(chosen) for chosen in itertools.combinations(rewards, k)]))
    np.testing.assert_allclose(statistics.pass_at(1, REWARDS), [rewards.mean() for rewards in REWARDS])


def test_pass_at_k_asks_for_as_many_completions_and_for_a_reward_of_at():
    with pytest.raises(DataError, match="n=7"):
        statistics.pass_at(7, REWARDS)
    with pytest.raises(DataError, match="k=0"):
        statistics.pass_at(0, REWARDS)
    assert statistics.pass_at(1, [np.array([0.4, 0.6])], at=0.5).tolist() == [0.5]


def test_the_answer_given_most_often_counts_and_equal_ones_in_equal_parts():
    rewards = [np.array([1.0, 0, 0, 0]), np.array([1.0, 1, 0, 0]), np.array([0.0, 0, 1, 0])]
    answers = [["7", "8", "8", "9"], ["7", "7", "8", "8"], [None, None, "7", None]]
    assert statistics.majority_at(4, rewards, answers).tolist() == [0, 0.5, 1]
    assert statistics.majority_at(1, rewards, answers).tolist() == [1, 1, 0], "the first k, and no vote wins nothing"


def test_the_interval_is_over_prompts_not_over_completions():
    low, high = statistics.mean_interval(REWARDS)
    means = [rewards.mean() for rewards in REWARDS]
    assert (low + high) / 2 == pytest.approx(np.mean(means))
    assert high - low == pytest.approx(2 * 1.96 * np.std(means, ddof=1) / 3, rel=1e-4)
    doubled = [np.concatenate([rewards, rewards]) for rewards in REWARDS]
    assert statistics.mean_interval(doubled) == pytest.approx((low, high)), "the same completions again say nothing new"
    assert all(map(math.isnan, statistics.mean_interval(REWARDS[:1])))


def test_it_covers_the_truth_about_19_times_in_20():
    rng, covered = np.random.default_rng(5), 0
    for _ in range(400):
        chances = rng.beta(2, 2, 60)  # of mean 0.5
        low, high = statistics.mean_interval([rng.binomial(1, chance, 4).astype(float) for chance in chances])
        covered += low <= 0.5 <= high
    assert 0.92 <= covered / 400 <= 0.98


def test_a_paired_test_of_few_is_exact_and_of_many_agrees_with_it(monkeypatch):
    before = [np.array([0.0])] * 10
    after = [np.array([1.0])] * 8 + [np.array([0.0])] * 2
    found = statistics.paired(before, after)
    assert found.p_value == 2 / 2**8 and found.difference == 0.8
    assert (found.gained, found.lost) == (tuple(range(8)), ())
    swapped = statistics.paired(after, before)
    assert swapped.p_value == found.p_value and swapped.lost == found.gained and swapped.difference == -0.8
    monkeypatch.setattr(statistics, "EXACT", 0)
    assert statistics.paired(before, after).p_value == pytest.approx(found.p_value, abs=0.003)


def test_without_a_difference_the_p_value_is_one_and_false_alarms_are_one_in_twenty():
    assert statistics.paired(REWARDS, REWARDS).p_value == 1
    rng = np.random.default_rng(7)
    alarms = 0
    for _ in range(300):
        before, after = ([np.array([x]) for x in rng.normal(size=12)] for _ in range(2))
        alarms += statistics.paired(before, after).p_value < 0.05
    assert 4 <= alarms <= 28
    with pytest.raises(DataError, match="same"):
        statistics.paired(REWARDS, REWARDS[:2])
