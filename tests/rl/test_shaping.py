"""Shaping and placing of rewards: by hand, against statistics, and nothing lost in silence."""

import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlbench.errors import LossError
from rlbench.rl.kl import ESTIMATORS
from rlbench.rl.placing import at_last_token, at_positions, at_turn_ends, kl_in_reward
from rlbench.rl.returns import discounted_returns
from rlbench.rl.shaping import (
    RunningMoments,
    clip_values,
    groups_with_signal,
    groups_within,
    overlong_penalty,
    stop_properly,
    without_truncated,
)

EXAMPLES = settings(max_examples=60, derandomize=True)
NUMBERS = st.lists(st.floats(-100, 100, width=32), min_size=0, max_size=8)
MASK = torch.tensor([[1, 1, 0, 1, 0], [1, 0, 0, 0, 0], [0, 0, 0, 0, 0]]).bool()


# -- clipping and running scale -------------------------------------------------------------------------------


def test_clipping_tells_the_share_that_stood_outside():
    values = torch.tensor([-3.0, -1.0, 0.5, 1.0, 9.0])
    got, share = clip_values(values, -1.0, 1.0)
    assert got.tolist() == [-1.0, -1.0, 0.5, 1.0, 1.0]
    assert share == pytest.approx(2 / 5)
    mask = torch.tensor([True, True, True, False, False])
    got, share = clip_values(torch.where(mask, values, math.nan), -1.0, 1.0, mask)
    assert got.tolist() == [-1.0, -1.0, 0.5, 0.0, 0.0]
    assert share == pytest.approx(1 / 3)
    assert clip_values(values, 2.0, 3.0, torch.zeros(5, dtype=torch.bool))[1] == 0.0


@EXAMPLES
@given(st.lists(NUMBERS, min_size=1, max_size=5))
def test_running_moments_are_those_of_everything_seen(batches):
    moments, seen = RunningMoments(), []
    for batch in batches:
        moments = moments.update(torch.tensor(batch))
        seen += batch
    assert moments.count == len(seen)
    if seen:
        assert moments.mean == pytest.approx(statistics.fmean(seen), rel=1e-9, abs=1e-9)
    if len(seen) > 1 and max(seen) - min(seen) > 1e-3:
        assert moments.std == pytest.approx(statistics.stdev(seen), rel=1e-6)
    whole = RunningMoments()
    for batch in reversed(batches):
        whole = RunningMoments().update(torch.tensor(batch)).merge(whole)
    assert whole.mean == pytest.approx(moments.mean, rel=1e-9, abs=1e-9)
    assert whole.squares == pytest.approx(moments.squares, rel=1e-9, abs=1e-6)


def test_running_moments_do_not_lose_a_small_spread_on_a_large_mean():
    moments = RunningMoments()
    for _ in range(50):
        moments = moments.update(torch.tensor([1e6, 1e6 + 1.0], dtype=torch.float64))
    assert moments.std == pytest.approx(statistics.stdev([0.0, 1.0] * 50), rel=1e-6)


def test_normalising_by_hand_and_while_there_is_no_spread():
    moments = RunningMoments().update(torch.tensor([1.0, 2.0, 3.0]))
    assert moments == RunningMoments(3, 2.0, 2.0)
    assert moments.normalized(torch.tensor([2.0, 4.0])).tolist() == [0.0, 2.0]
    assert moments.normalized(torch.tensor([2.0, 4.0]), centre=False).tolist() == [2.0, 4.0]
    for few in (RunningMoments(), RunningMoments().update(torch.tensor([0.7]))):
        assert few.std == 0.0
        assert torch.isfinite(few.normalized(torch.tensor([5.0]))).all()
    same = RunningMoments().update(torch.full((9,), 0.7)).update(torch.full((5,), 0.7))
    assert same.std == 0.0
    assert same.normalized(torch.tensor([0.7]), centre=False).item() == pytest.approx(0.7)
    rounded = RunningMoments().update(torch.tensor([0.1 + 0.2, 0.3], dtype=torch.float64))
    assert rounded.squares > 0.0
    assert rounded.std == 0.0
    mask = torch.tensor([True, True, False])
    assert RunningMoments().update(torch.tensor([1.0, 3.0, math.nan]), mask).mean == 2.0


# -- length and truncation ------------------------------------------------------------------------------------


def test_the_overlong_penalty_grows_along_the_buffer():
    got = overlong_penalty(torch.tensor([0, 80, 85, 90, 100, 130]), max_length=100, buffer=20, factor=2.0)
    assert got.tolist() == pytest.approx([0.0, 0.0, -0.5, -1.0, -2.0, -2.0])


def test_stopping_properly_scales_or_replaces():
    rewards, truncated = torch.tensor([1.0, 0.8, -0.5]), torch.tensor([False, True, True])
    assert stop_properly(rewards, truncated, scale=0.25).tolist() == pytest.approx([1.0, 0.2, -0.125])
    assert stop_properly(rewards, truncated, scale=0.0).tolist() == pytest.approx([1.0, 0.0, 0.0])
    assert stop_properly(rewards, truncated, value=-0.5).tolist() == pytest.approx([1.0, -0.5, -0.5])


def test_truncated_rows_leave_the_mask():
    got = without_truncated(MASK, torch.tensor([False, True, False]))
    assert got.tolist() == [MASK[0].tolist(), [False] * 5, [False] * 5]


# -- dynamic sampling -----------------------------------------------------------------------------------------


def test_groups_with_signal_are_kept_whole():
    rewards = torch.tensor([1.0, 0.7, 0.0, 0.7, 1.0, 0.7, 0.0, 1.0])
    group = torch.tensor([5, 1, 5, 1, 9, 1, 3, 9])  # 5 differs; 1 and 9 are equal; 3 is alone
    signal = groups_with_signal(rewards, group)
    assert signal.tolist() == [True, False, True, False, False, False, False, False]
    rewards[7] = 0.0
    signal = groups_with_signal(rewards, group)
    assert signal.nonzero()[:, 0].tolist() == [0, 2, 4, 7]


def test_groups_within_bounds_leave_out_the_solved_and_the_hopeless():
    rewards, group = torch.tensor([1.0, 1.0, 0.0, 1.0, 0.0, 0.0]), torch.tensor([0, 0, 1, 1, 2, 2])
    assert groups_within(rewards, group, 0.0, 1.0).tolist() == [False, False, True, True, False, False]
    assert groups_within(rewards, group, -1.0, 0.5).tolist() == [False, False, False, False, True, True]
    assert torch.equal(groups_within(rewards, group, 0.0, 1.0), groups_with_signal(rewards, group))


@EXAMPLES
@given(st.lists(st.tuples(st.sampled_from([0.0, 1.0, 0.7]), st.integers(0, 3)), min_size=1, max_size=12))
def test_signal_equals_the_loop(pairs):
    rewards, group = torch.tensor([r for r, _ in pairs]), torch.tensor([g for _, g in pairs])
    wanted = [len({r for r, g in pairs if g == own}) > 1 for _, own in pairs]
    assert groups_with_signal(rewards, group).tolist() == wanted


# -- placing --------------------------------------------------------------------------------------------------


def test_the_reward_goes_to_the_last_trained_token():
    got = at_last_token(torch.tensor([1.0, -2.0, 5.0]), MASK)
    assert got.tolist() == [[0, 0, 0, 1.0, 0], [-2.0, 0, 0, 0, 0], [0, 0, 0, 0, 0]]


def test_turn_rewards_go_to_the_ends_of_turns():
    turns = torch.tensor([[0, 0, 77, 1, 77], [0, 77, 77, 77, 77], [77] * 5])
    rewards = torch.tensor([[1.0, 2.0], [3.0, math.nan], [0.0, 0.0]])
    got = at_turn_ends(rewards, turns, MASK)
    assert got.tolist() == [[0, 1.0, 0, 2.0, 0], [3.0, 0, 0, 0, 0], [0] * 5]
    assert discounted_returns(got, MASK)[0].tolist() == [3.0, 3.0, 0.0, 2.0, 0.0]


def test_step_rewards_go_to_their_positions_and_add_up():
    positions = torch.tensor([[0, 3, 3], [0, -1, -1], [-1, -1, -1]])
    rewards = torch.tensor([[1.0, 2.0, 0.5], [4.0, math.nan, 7.0], [math.nan] * 3])
    got = at_positions(rewards, positions, MASK)
    assert got.tolist() == [[1.0, 0, 0, 2.5, 0], [4.0, 0, 0, 0, 0], [0] * 5]


@pytest.mark.parametrize("name", ESTIMATORS)
def test_kl_is_taken_off_token_by_token(name):
    random = torch.Generator().manual_seed(0)
    p, q = -torch.rand(3, 5, generator=random).double(), -torch.rand(3, 5, generator=random).double()
    rewards = torch.tensor([1.0, -1.0, 4.0], dtype=torch.float64)
    garbage = torch.where(MASK, p, math.nan).requires_grad_(), torch.where(MASK, q, math.inf)
    got = kl_in_reward(rewards, *garbage, MASK, coef=0.3, estimator=name)
    assert not got.requires_grad
    wanted = torch.where(MASK, at_last_token(rewards, MASK) - 0.3 * ESTIMATORS[name](p, q), 0.0)
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)
    assert torch.equal(kl_in_reward(rewards, *garbage, MASK, coef=0.0), at_last_token(rewards, MASK))
    if name == "k1":  # summed, it is the penalised reward of the response
        assert got.sum(1)[1].item() == pytest.approx(-1.0 - 0.3 * (p - q)[1, 0].item())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_narrow_rewards_are_shaped_wide(dtype):
    rewards, wide = (
        torch.tensor([1.0, 0.5, 2.0], dtype=dtype),
        torch.float64 if dtype == torch.float64 else torch.float32,
    )
    zero = torch.zeros(3, 5, dtype=dtype)
    for got in (
        at_last_token(rewards, MASK),
        kl_in_reward(rewards, zero, zero, MASK, 0.1),
        stop_properly(rewards, torch.tensor([True, False, False]), scale=0.5),
        RunningMoments(2, 0.0, 1.0).normalized(rewards),
    ):
        assert got.dtype == wide


# -- refusals -------------------------------------------------------------------------------------------------


def test_no_reward_is_lost_in_silence():
    turns = torch.tensor([[0, 0, 1, 2, 2]]).expand(3, 5)
    for call, pattern in (
        # the only token of turn 1 is not trained
        (lambda: at_turn_ends(torch.tensor([[0.0, 5.0, 0.0]] * 3), turns, MASK), r"turn_rewards\[0, 1\]"),
        (lambda: at_turn_ends(torch.zeros(3, 2), turns, MASK), "turns holds"),
        (lambda: at_turn_ends(torch.full((3, 3), math.nan), turns, MASK), "not finite"),
        (lambda: at_turn_ends(torch.zeros(2, 3), turns, MASK), r"wanted \(3, K\)"),
        (lambda: at_turn_ends(torch.zeros(3, 3), turns[:, :4], MASK), "turns has shape"),
        (
            lambda: at_positions(torch.ones(3, 1), torch.tensor([[2], [0], [-1]]), MASK),
            r"positions\[0, 0\]=2",
        ),
        (
            lambda: at_positions(torch.ones(3, 1), torch.tensor([[9], [0], [-1]]), MASK),
            r"positions\[0, 0\]=9",
        ),
        (
            lambda: at_positions(torch.ones(3, 1), torch.tensor([[-2], [0], [-1]]), MASK),
            r"positions\[0, 0\]=-2",
        ),
        (
            lambda: at_positions(torch.ones(3, 2), torch.tensor([[0], [0], [-1]]), MASK),
            "step_rewards has shape",
        ),
        (lambda: at_positions(torch.ones(3, 1) / 0, torch.tensor([[0], [0], [-1]]), MASK), "not finite"),
        (lambda: at_last_token(torch.ones(2), MASK), "mask has shape"),
        (lambda: at_last_token(torch.ones(3), MASK.float()), "bool"),
    ):
        with pytest.raises(LossError, match=pattern):
            call()


def test_what_cannot_be_used_is_refused():
    rewards, group, truncated = (
        torch.ones(3),
        torch.zeros(3, dtype=torch.long),
        torch.zeros(3, dtype=torch.bool),
    )
    zero = torch.zeros(3, 5)
    for call, pattern in (
        (lambda: clip_values(rewards, 1.0, 1.0), "below high"),
        (lambda: clip_values(rewards * math.nan, 0.0, 1.0), "NaN"),
        (lambda: clip_values(rewards, 0.0, 1.0, truncated[:2]), "mask has shape"),
        (lambda: RunningMoments().update(rewards / 0), "not finite"),
        (lambda: RunningMoments().update(rewards, truncated[:1]), "mask has shape"),
        (lambda: RunningMoments(count=-1), "count"),
        (lambda: overlong_penalty(group, max_length=10, buffer=11), "buffer=11"),
        (lambda: overlong_penalty(group, max_length=10, buffer=0), "buffer=0"),
        (lambda: overlong_penalty(group, max_length=10, buffer=5, factor=-1.0), "factor"),
        (lambda: stop_properly(rewards, truncated), "exactly one"),
        (lambda: overlong_penalty(group - 1, max_length=10, buffer=5), "at least 0"),
        (lambda: stop_properly(rewards, truncated, value=math.nan), "not finite"),
        (lambda: groups_within(rewards, group, 1.0, 0.0), "below high"),
        (lambda: stop_properly(rewards, truncated, scale=0.5, value=0.0), "exactly one"),
        (lambda: stop_properly(rewards, truncated, scale=1.5), "scale=1.5"),
        (lambda: stop_properly(rewards, truncated[:2], scale=0.5), "truncated has shape"),
        (lambda: without_truncated(MASK, truncated[:2]), "truncated has shape"),
        (lambda: groups_with_signal(rewards, group[:2]), "group has shape"),
        (lambda: groups_with_signal(rewards[:0], group[:0]), "batch is empty"),
        (lambda: kl_in_reward(rewards, zero, zero, MASK, -0.1), "coef=-0.1"),
        (lambda: kl_in_reward(rewards, zero, zero[:, :4], MASK, 0.1), "ref_logprobs has shape"),
        (lambda: kl_in_reward(rewards, zero * math.nan, zero, MASK, 0.1), "logprobs: 4 values"),
        (lambda: kl_in_reward(rewards, zero, zero, MASK, 0.1, "low_var_kl"), "Use one of"),
    ):
        with pytest.raises(LossError, match=pattern):
            call()
