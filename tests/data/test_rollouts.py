"""Rollouts: joined from replicas, looked at, sliced, selected, scored and made into a batch, never changed."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlbench.data import Prompt, Rollouts
from rlbench.errors import DataError, Stopped
from tests.data.comparing import cut_short
from tests.data.values import generated, rollouts


def keys(value):
    return [r.text for r in value.flat]


def zero(rewards, group):
    return np.zeros(len(rewards), np.float32)


# -- merge


@given(st.permutations([(p, s) for p in range(4) for s in range(3)]), st.integers(0, 12))
def test_however_replicas_shared_the_work_the_result_is_prompt_major(order, cut):
    samples = [(p, s, [p, s] * (s + 1), "stop") for p, s in order]
    parts = [generated(part) for part in (samples[:cut], samples[cut:])]
    merged = Rollouts.merge([Prompt(f"q{p}") for p in range(4)], parts, {})
    assert keys(merged) == [f"p{p}s{s}" for p in range(4) for s in range(3)]
    assert merged.group.tolist() == [p for p in range(4) for _ in range(3)]
    for rollout in merged.flat:
        s = (len(rollout) // 2) - 1
        assert rollout.token_ids == [rollout.group, s] * (s + 1)
        assert rollout.logprobs == pytest.approx([-t / 100 for t in rollout.token_ids])


def test_prompts_nobody_started_are_listed_and_keep_their_place():
    merged = Rollouts.merge(
        [Prompt(t) for t in "abc"],
        [generated([(0, 0, [1], "stop")]), generated([(2, 0, [2, 3], "abort")])],
        {},
    )
    assert merged.not_started == (1,) and len(merged) == 3 and merged.samples == 2
    assert [len(group.outputs) for group in merged] == [1, 0, 1]
    assert merged[2].prompt_token_ids == [12, 12, 12] and merged[1].prompt_token_ids == []
    assert "1 aborted, 1 prompts not started" in repr(merged)


def test_a_replica_that_served_nothing_adds_nothing():
    merged = Rollouts.merge([Prompt("a")], [generated([]), generated([(0, 0, [5], "stop")])], {})
    assert merged.samples == 1 and merged.not_started == ()


def test_nothing_at_all_started_is_still_a_value_to_look_at():
    merged = Rollouts.merge([Prompt("a"), Prompt("b")], [generated([])], {})
    assert merged.samples == 0 and merged.not_started == (0, 1) and list(merged[0].outputs) == []
    assert "2 prompts not started" in repr(merged)


def test_tokens_add_up_over_replicas_and_seconds_are_those_of_the_slowest():
    parts = [
        generated([(0, 0, [1, 2], "stop")], seconds=2.0),
        generated([(1, 0, [3], "stop")], seconds=3.0),
    ]
    merged = Rollouts.merge([Prompt("a"), Prompt("b")], parts, {})
    assert merged.stats == {"tokens": 3.0, "seconds": 3.0}


def test_the_weight_version_is_one_number_or_none_where_it_is_mixed():
    first, second = generated([(0, 0, [1], "stop")], 3), generated([(1, 0, [1], "stop")], 4)
    prompts = [Prompt("a"), Prompt("b")]
    assert Rollouts.merge(prompts, [first, second], {}).weight_version is None
    assert Rollouts.merge(prompts[:1], [first], {}).weight_version == 3
    assert "v3/4" in repr(Rollouts.merge(prompts, [first, second], {}))


# -- looking


def test_a_completion_carries_what_a_reward_needs():
    rollout = list(rollouts().flat)[3]
    assert (rollout.prompt, rollout.label, rollout.text) == ("sort 312 :", "123", "p1s1")
    assert rollout.token_ids == [0, 1, 2, 3] and len(rollout) == 4 and rollout.reward is None
    assert (rollout.group, rollout.index, rollout.weight_version, rollout.finish_reason) == (1, 3, 0, "stop")


def test_iterating_gives_prompts_with_their_completions():
    groups = list(rollouts())
    assert [g.prompt for g in groups] == ["sort 21 :", "sort 312 :", "sort 4 :"]
    assert [[o.text for o in g.outputs] for g in groups] == [[f"p{p}s{s}" for s in range(2)] for p in range(3)]


def test_a_prompt_is_found_from_either_end_and_beyond_them_is_an_index_error():
    value = rollouts()
    assert value[-1].prompt == value[2].prompt == "sort 4 :"
    with pytest.raises(IndexError, match="prompt 3 of 3"):
        value[3]


@pytest.mark.parametrize(
    "chosen",
    [slice(1, 3), slice(None, None, -1), slice(0, 0), slice(None, None, 2), slice(-1, None)],
    ids=str,
)
def test_a_slice_is_the_rollouts_of_those_prompts_numbered_anew(chosen):
    value = rollouts().score(range(6))
    part = value[chosen]
    wanted = list(value)[chosen]
    assert [g.prompt for g in part] == [g.prompt for g in wanted]
    assert [[(o.text, o.reward) for o in g.outputs] for g in part] == [
        [(o.text, o.reward) for o in g.outputs] for g in wanted
    ]
    assert [o.group for g in part for o in g.outputs] == [i for i in range(len(wanted)) for _ in range(2)]


def test_a_slice_keeps_track_of_what_was_not_started():
    merged = Rollouts.merge([Prompt(t) for t in "abc"], [generated([(0, 0, [1], "stop")])], {})
    assert merged.not_started == (1, 2) and merged[2:].not_started == (0,) and merged[:1].not_started == ()


def test_select_by_function_and_by_mask_keeps_all_prompts():
    value = rollouts()
    by_function = value.select(lambda r: len(r) > 2)
    assert keys(by_function) == ["p1s0", "p1s1", "p2s0", "p2s1"] and len(by_function) == 3
    assert keys(value.select(value.lengths > 2)) == keys(by_function)
    assert [r.token_ids for r in by_function.flat] == [r.token_ids for r in value.flat if len(r) > 2]
    assert by_function[0].outputs == [] and len(by_function[2].outputs) == 2


def test_select_takes_numbers_too_and_filter_is_its_other_name():
    value = rollouts()
    assert keys(value.select([4, 0])) == ["p2s0", "p0s0"] and keys(value.filter(lambda r: r.group == 1)) == keys(
        value[1:2]
    )


def test_a_mask_of_another_length_is_refused():
    for chosen in ([True, False], [0.5] * 6, [[0]]):
        with pytest.raises(DataError, match="wanted 6 booleans"):
            rollouts().select(chosen)
    with pytest.raises(DataError, match="wanted 6 booleans"):
        rollouts()[np.array([True] * 5)]


def test_booleans_in_brackets_choose_prompts_or_completions_by_their_number():
    value = rollouts()
    assert keys(value[[True, False, True]]) == ["p0s0", "p0s1", "p2s0", "p2s1"] and len(value[[True, False, True]]) == 2
    chosen = value[value.lengths > 4]
    assert keys(chosen) == ["p2s0", "p2s1"] and len(chosen) == 3, "of completions the prompts stay"


def test_a_group_is_a_sequence_of_its_completions():
    group = rollouts().score(range(6))[1]
    assert len(group) == 2 and [one.text for one in group] == ["p1s0", "p1s1"] and group[-1].text == "p1s1"
    assert group.rewards.tolist() == [2.0, 3.0] and np.isnan(rollouts()[0].rewards).all()


# -- score


def test_scoring_gives_a_new_value_each_time_and_leaves_the_old_one():
    value = rollouts()
    first, second = value.score(lambda r: len(r)), value.score([0.0] * 5 + [1.0])
    assert value.rewards is None
    assert first.rewards.tolist() == [1, 2, 3, 4, 5, 6] and second.rewards.tolist() == [0, 0, 0, 0, 0, 1]
    assert [o.reward for o in first[1].outputs] == [3.0, 4.0]


def test_booleans_count_as_zero_and_one():
    assert rollouts().score(lambda r: r.text == "p1s0").rewards.tolist() == [0, 0, 1, 0, 0, 0]


def test_a_reward_that_raises_names_its_completion():
    def reward(rollout):
        return 1 / (rollout.index - 4)

    with pytest.raises(DataError, match="ZeroDivisionError") as error:
        rollouts().score(reward)
    for part in ("completion 4", "prompt 2", "sort 4 :", "p2s0"):
        assert part in str(error.value)
    assert isinstance(error.value.__cause__, ZeroDivisionError)


@pytest.mark.parametrize("given", [None, "good", [1, 2]])
def test_a_reward_that_is_no_number_names_its_completion(given):
    with pytest.raises(DataError, match=r"completion 0; wanted one number"):
        rollouts().score(lambda r: given)


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_a_plain_function_that_gives_a_coroutine_is_refused_naming_the_way():
    async def reward(rollout):
        return 1.0

    with pytest.raises(DataError, match=r"gave an awaitable .* `async def`"):
        rollouts().score(lambda rollout: reward(rollout))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_reward_that_is_not_finite_is_refused(value):
    with pytest.raises(DataError, match="reward 3 is not finite"):
        rollouts().score([0, 0, 0, value, 0, 0])


@pytest.mark.parametrize("given", [[1.0], np.zeros((6, 1)), []])
def test_another_number_of_rewards_is_refused(given):
    with pytest.raises(DataError, match="wanted 6 rewards"):
        rollouts().score(given)


def test_rewards_that_are_no_numbers_are_refused():
    with pytest.raises(DataError, match="numbers"):
        rollouts().score(["a"] * 6)


# -- batch


def test_a_batch_has_one_row_per_completion_with_its_prompt():
    batch = rollouts(temperature=0.7).score(range(6)).batch(zero)
    assert [p.tolist() for p in batch.prompts] == [[10], [10], [11, 11], [11, 11], [12] * 3, [12] * 3]
    assert [r.tolist() for r in batch.responses] == [list(range(n)) for n in range(1, 7)]
    assert batch.rewards.tolist() == [0, 1, 2, 3, 4, 5] and batch.group.tolist() == [0, 0, 1, 1, 2, 2]
    assert batch.mask.all() and batch.mask.dtype == bool and batch.temperature == 0.7
    assert batch.truncated.tolist() == [False] * 5 + [True]
    assert batch.sampler_logprobs == pytest.approx(-batch.responses.values / 100)


def test_an_advantage_per_completion_is_spread_over_its_tokens():
    batch = rollouts().score(range(6)).batch(lambda rewards, group: rewards * 10 + group)
    assert batch.advantages.dtype == np.float32
    assert [set(row.tolist()) for row in batch.responses.with_values(batch.advantages)] == [
        {0.0},
        {10.0},
        {21.0},
        {31.0},
        {42.0},
        {52.0},
    ]


def test_an_advantage_per_token_is_taken_as_it_is():
    given = np.arange(21, dtype=np.float64)
    assert rollouts().score(range(6)).batch(lambda rewards, group: given).advantages.tolist() == given.tolist()


def test_the_standard_advantage_is_zero_in_a_group_of_equal_rewards():
    from rlbench.rl import group_normalized

    batch = rollouts().score([0, 1, 1, 1, 0, 0]).batch(group_normalized())
    rows = [row[0] for row in batch.responses.with_values(batch.advantages)]
    assert rows[0] == -rows[1] < 0 and rows[2:] == [0, 0, 0, 0]


@pytest.mark.parametrize("shape", [(), (5,), (6, 1), (22,)])
def test_an_advantage_of_another_shape_is_refused_naming_both_it_may_have(shape):
    with pytest.raises(DataError, match=r"\(6,\)"):
        rollouts().score(range(6)).batch(lambda rewards, group: np.zeros(shape))


def test_an_advantage_that_is_not_finite_is_refused():
    with pytest.raises(DataError, match="not finite"):
        rollouts().score(range(6)).batch(lambda rewards, group: rewards / 0)


def test_an_interrupted_scoring_keeps_the_rewards_there_are():
    calls = []

    def slow(rollout):
        calls.append(rollout.index)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return float(rollout.index)

    with pytest.raises(Stopped, match="3 of 6 completions") as stopped:
        rollouts().score(slow)
    partial = stopped.value.partial
    assert partial.rewards.tolist() == [0, 1, 2] and partial.batch(zero).rewards.tolist() == [0, 1, 2]
    calls[:] = [0] * 3
    with pytest.raises(Stopped, match="0 of 6") as stopped:
        rollouts().score(slow)
    assert stopped.value.partial is None


def test_unscored_rollouts_are_refused_naming_the_call():
    with pytest.raises(DataError, match=r"score\(reward_fn\)"):
        rollouts().batch(zero)


def test_completions_cut_by_an_interrupt_and_empty_ones_are_left_out():
    batch = cut_short().batch(lambda rewards, group: rewards)
    assert batch.rewards.tolist() == [1, 3] and [r.tolist() for r in batch.responses] == [[1, 2], [4]]
    assert batch.advantages.tolist() == [1, 1, 3]


def test_completions_cut_by_an_interrupt_may_be_kept():
    batch = cut_short().batch(zero, drop_aborted=False)
    assert batch.rewards.tolist() == [1, 2, 3]


def test_nothing_left_to_train_on_is_refused_naming_the_way_out():
    only = cut_short().select([False, True, False, False])
    with pytest.raises(DataError, match="drop_aborted=False"):
        only.batch(zero)
