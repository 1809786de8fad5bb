"""What scoring leaves in rollouts: components, times and errors that go along; NaN that no batch is made of."""

import pickle

import numpy as np
import pytest

from rlbench.data import Prompt, Rollouts
from rlbench.data.rollouts.scoring import RewardErrors, described
from rlbench.errors import DataError, LossError
from rlbench.rl import gdpo
from tests.data.values import generated, rollouts


def reward(rollout):
    """Fails on completion 3; components for the others."""
    if rollout.index == 3:
        raise ValueError("no answer")
    return {"reward": rollout.index, "length": len(rollout), "length/odd": len(rollout) % 2}


def kept():
    return rollouts().score(reward, on_error="keep")


def zero(rewards, group):
    return np.zeros(len(rewards), np.float32)


# -- errors that are kept


def test_kept_errors_say_which_completion_what_and_where():
    value = kept()
    np.testing.assert_array_equal(value.rewards, [0, 1, 2, np.nan, 4, 5])
    (error,) = value.reward_errors
    assert (error.index, error.prompt) == (3, "sort 312 :")
    assert error.error == "the reward raised ValueError: no answer"
    assert 'raise ValueError("no answer")' in error.line and "reward, " in error.line
    table = value.reward_errors.table()
    assert list(table.columns) == ["index", "prompt", "error", "line"] and table["index"].tolist() == [3]
    assert list(rollouts().reward_errors.table().columns) == list(table.columns)


def test_a_batch_of_completions_without_a_reward_is_refused_naming_the_way_out():
    with pytest.raises(DataError, match="1 of 6 completions have no reward") as error:
        kept().batch(zero)
    assert "rollouts.select(~np.isnan(rollouts.rewards))" in str(error.value)
    value = kept()
    batch = value.select(~np.isnan(value.rewards)).batch(zero)
    assert batch.rewards.tolist() == [0, 1, 2, 4, 5]


def test_one_that_is_left_out_anyway_does_not_stand_in_the_way():
    samples = [(0, 0, [1, 2], "stop"), (0, 1, [3], "abort"), (1, 0, [4], "stop")]
    value = Rollouts.merge([Prompt("a"), Prompt("b")], [generated(samples)], {})
    scored = value.score(lambda r: 1 if r.finish_reason == "stop" else 1 / 0, on_error="keep")
    assert scored.batch(zero).rewards.tolist() == [1, 1]
    with pytest.raises(DataError, match="1 of 3 completions have no reward"):
        scored.batch(zero, drop_aborted=False)


def test_a_summary_is_of_the_rewards_that_are_known():
    value = kept()
    assert "reward 2.4 ± 1.85 · 1 without a reward" in repr(value)
    assert value.rewards.summary()["mean"] == 2.4 and value.rewards.summary()["count"] == 5
    assert "5 values" in repr(value.rewards.plot())
    assert described([np.nan, np.nan]) == "2 without a reward"
    assert [r.reward for r in value.flat] == [0, 1, 2, None, 4, 5]


# -- what goes along


def test_a_selection_takes_components_times_and_errors_along():
    value = kept()
    part = value.select(np.array([0, 0, 1, 1, 0, 1], bool))
    np.testing.assert_array_equal(part.rewards, [2, np.nan, 5])
    np.testing.assert_array_equal(part.components["length"], [3, np.nan, 6])
    assert part.reward_seconds.tolist() == value.reward_seconds[[2, 3, 5]].tolist()
    assert [(e.index, e.prompt) for e in part.reward_errors] == [(1, "sort 312 :")]
    assert not value.select(np.arange(6) < 3).reward_errors


def test_a_slice_in_another_order_does_too():
    part = kept()[::-1]
    np.testing.assert_array_equal(part.components["length"], [5, 6, 3, np.nan, 1, 2])
    assert [(e.index, e.prompt) for e in part.reward_errors] == [(3, "sort 312 :")]
    assert [(e.index, e.prompt) for e in kept()[1:].reward_errors] == [(1, "sort 312 :")]


def test_it_travels_between_processes():
    back = pickle.loads(pickle.dumps(kept()))
    assert back.reward_errors == kept().reward_errors and type(back.reward_errors) is RewardErrors
    assert list(back.components) == ["length", "length/odd"]


def test_tables_and_trajectories_hold_it_too(tmp_path):
    frame = kept().to_pandas()
    assert frame["component.length"][4] == 5 and np.isnan(frame["component.length"][3])
    assert frame["reward_error"][3].endswith("no answer") and frame["reward_error"].isna().sum() == 5
    assert {"reward_seconds", "reward_error_line", "component.length/odd"} <= set(frame.columns)
    import json

    read = json.loads(kept().to_json(tmp_path / "t.json").read_text())["trajectories"]
    assert read[3]["reward"] is None and read[4]["reward_components"] == {"length": 5.0, "length/odd": 1.0}


# -- components and advantages


def two(rollout):
    return {"reward": 1, "a": rollout.index, "b": rollout.index % 2, "a/detail": 7}


def test_an_advantage_that_asks_for_components_gets_those_of_the_rewards_without_details():
    seen = {}

    def advantage(rewards, group, *, components):
        seen.update({name: values.tolist() for name, values in components.items()})
        return rewards

    rollouts().score(two).select(np.arange(6) > 1).batch(advantage)
    assert seen == {"a": [2, 3, 4, 5], "b": [0, 1, 0, 1]}


def test_it_is_what_giving_them_by_hand_gives():
    scored = rollouts().score(two)
    weights = {"a": 1.0, "b": 0.5}
    by_hand = scored.batch(gdpo(weights=weights), components={name: scored.components[name] for name in ("a", "b")})
    assert scored.batch(gdpo(weights=weights)).advantages.tolist() == by_hand.advantages.tolist()
    given = scored.batch(gdpo(weights={"c": 1.0}), components={"c": np.arange(6.0) ** 2})
    assert given.advantages.tolist() != by_hand.advantages.tolist()


def test_an_advantage_that_asks_for_none_is_not_bothered():
    assert rollouts().score(two).batch(zero).advantages.tolist() == [0] * 21


def test_components_that_only_some_completions_have_are_refused_where_they_are_asked_for():
    scored = rollouts().score(lambda r: {"reward": 1, "a": 1} if r.index else 1)
    with pytest.raises(DataError, match="'a' is not known for 1 of 6 completions"):
        scored.batch(gdpo())
    assert len(scored.select(np.arange(6) > 0).batch(gdpo())) == 5
    with pytest.raises((DataError, LossError), match="components"):
        rollouts().score(lambda r: 1).batch(gdpo())
