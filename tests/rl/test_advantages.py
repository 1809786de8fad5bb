"""Group-normalised advantages against a loop, and exact zeros where there is nothing to learn."""

import math
import statistics

import pytest
import torch

from rlbench.errors import LossError
from rlbench.rl import group_normalized

REWARDS = [1.0, 0.0, 0.5, 0.25, 0.7, 0.7, 3.0, -1.0, 0.125]
GROUP = [4, 9, 4, 9, 2, 2, 4, 9, 7]  # interleaved; group 2 is all equal, group 7 has one member


def loop(std: str, ddof: int, eps: float, leave_one_out: bool) -> list[float]:
    out = []
    for reward, own in zip(REWARDS, GROUP, strict=True):
        peers = [r for r, g in zip(REWARDS, GROUP, strict=True) if g == own]
        if len(peers) == 1 or max(peers) == min(peers):
            out.append(0.0)
            continue
        others = list(peers)
        others.remove(reward)
        baseline = statistics.mean(others if leave_one_out else peers)
        deviation = statistics.stdev if ddof else statistics.pstdev
        scale = {"group": deviation(peers) + eps, "batch": deviation(REWARDS) + eps, "none": 1.0}[std]
        out.append((reward - baseline) / scale)
    return out


@pytest.mark.parametrize("std", ["group", "batch", "none"])
@pytest.mark.parametrize("ddof", [0, 1])
@pytest.mark.parametrize("leave_one_out", [False, True])
@pytest.mark.parametrize("eps", [1e-6, 0.1])
def test_equals_the_loop(std, ddof, leave_one_out, eps):
    advantage = group_normalized(std=std, ddof=ddof, eps=eps, leave_one_out=leave_one_out)
    got = advantage(torch.tensor(REWARDS), torch.tensor(GROUP))
    torch.testing.assert_close(got, torch.tensor(loop(std, ddof, eps, leave_one_out)), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("value", [0.0, 0.1, 0.3, 0.7, -1e6, 1e-30])
@pytest.mark.parametrize("size", [1, 2, 8, 12])
@pytest.mark.parametrize("std", ["group", "batch", "none"])
def test_equal_rewards_get_exactly_zero(value, size, std):
    rewards = torch.tensor([value] * size + [0.0, 1.0])
    group = torch.tensor([0] * size + [1, 1])
    got = group_normalized(std=std)(rewards, group)
    assert (got[:size] == 0).all()
    assert (got[size:] != 0).all()


def test_groups_do_not_touch_each_other_and_sum_to_zero():
    rewards, group = torch.tensor(REWARDS), torch.tensor(GROUP)
    got = group_normalized()(rewards, group)
    rewards[group == 9] += 100.0
    again = group_normalized()(rewards, group)
    torch.testing.assert_close(got, again, rtol=1e-4, atol=1e-5)
    for own in set(GROUP):
        assert math.isclose(got[group == own].sum().item(), 0.0, abs_tol=1e-5)


def test_bool_rewards_work_and_bad_ones_are_refused():
    got = group_normalized()(torch.tensor([True, False]), torch.tensor([0, 0]))
    assert got.dtype == torch.float32
    assert got[0] > 0 > got[1]
    with pytest.raises(LossError, match="rows \\[1\\]"):
        group_normalized()(torch.tensor([0.0, float("nan")]), torch.tensor([0, 0]))
    with pytest.raises(LossError, match="shape"):
        group_normalized()(torch.zeros(3), torch.zeros(2))
    for wrong in ({"std": "groups"}, {"ddof": 2}, {"eps": -1.0}):
        with pytest.raises(LossError):
            group_normalized(**wrong)


def test_prints_as_it_is_written():
    assert (
        repr(group_normalized(std="none"))
        == "group_normalized(std='none', ddof=1, eps=1e-06, leave_one_out=False)"
    )
