"""Advantages within groups: by hand, against loops, and exact zeros where there is nothing to learn."""

import math
import pickle
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlbench.errors import LossError
from rlbench.rl.advantages import (
    cpgd_advantage,
    gpg_advantage,
    group_normalized,
    maxrl,
    opo,
    reinforce_plus_plus_baseline,
    rloo,
)
from rlbench.rl.group_advantages import gdpo, optimal_token_baseline, pass_at_k, process_normalized
from rlbench.rl.groups import whiten
from tests.rl import advantage_reference as reference
from tests.rl.advantage_reference import EXAMPLES, batches, near, tensors

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


def test_rounding_is_no_difference_and_a_thousandth_is_one():
    group = torch.tensor([0, 0, 1, 1])
    rewards = torch.tensor([0.1 + 0.2, 0.3, 1.0, 1.001], dtype=torch.float64)
    got = group_normalized(eps=0.0)(rewards, group)
    assert got[:2].tolist() == [0.0, 0.0]
    assert got[2:].tolist() == pytest.approx([-(0.5**0.5), 0.5**0.5])


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
        == "group_normalized(std='none', ddof=1, eps=1e-06, leave_one_out=False, singleton='zero')"
    )


# -- values by hand -------------------------------------------------------------------------------------------


def test_grpo_and_its_relatives_by_hand():
    rewards, group = torch.tensor([1.0, 0.0, 1.0, 0.0]), torch.zeros(4, dtype=torch.long)
    near(group_normalized()(rewards, group), [0.8660, -0.8660, 0.8660, -0.8660], 1e-4)
    near(group_normalized(ddof=0)(rewards, group), [1.0, -1.0, 1.0, -1.0], 1e-5)
    near(group_normalized(std="none")(rewards, group), [0.5, -0.5, 0.5, -0.5])
    near(rloo()(rewards, group), [2 / 3, -2 / 3, 2 / 3, -2 / 3])
    near(cpgd_advantage()(rewards, group), [1.0, -1.0, 1.0, -1.0], 1e-5)
    near(maxrl()(torch.tensor([1.0, 0.0, 0.0, 0.0]), group), [3.0, -1.0, -1.0, -1.0], 1e-5)


def test_opo_weighs_the_baseline_by_length():
    got = opo()(torch.tensor([1.0, 0.0]), torch.tensor([5, 5]), lengths=torch.tensor([30, 10]))
    near(got, [0.25, -0.75])
    untrained = opo()(torch.tensor([1.0, 0.0]), torch.tensor([5, 5]), lengths=torch.tensor([0, 0]))
    near(untrained, [0.5, -0.5])


def test_gpg_makes_up_for_the_prompts_that_teach_nothing():
    rewards, group = torch.tensor([1.0, 0.0, 1.0, 1.0]), torch.tensor([0, 0, 1, 1])
    near(gpg_advantage()(rewards, group), [1.0, -1.0, 0.0, 0.0])  # 4 / 2 responses with signal
    near(gpg_advantage(alpha="nonzero")(rewards, group), [2 / 3, -2 / 3, 0.0, 0.0])  # 4 / 3 rewards that are not 0
    near(gpg_advantage(alpha="none")(rewards, group), [0.5, -0.5, 0.0, 0.0])


def test_cpgd_weighs_by_prompts_with_signal_up_to_a_bound():
    rewards, group = torch.tensor([1.0, 0.0] + [1.0] * 8), torch.tensor([0, 0, 1, 1, 2, 2, 3, 3, 4, 4])
    near(cpgd_advantage("clip_filter")(rewards, group)[:2], [1.5, -1.5])  # 5 / 1, at most 3
    near(cpgd_advantage("clip_filter", most=10.0)(rewards, group)[:2], [2.5, -2.5])
    near(cpgd_advantage("none")(rewards, group)[:2], [0.5, -0.5])


# -- against the loops, on any batch --------------------------------------------------------------------------


@EXAMPLES
@given(batches(), st.sampled_from(["zero", "raw"]))
def test_one_per_response_equals_the_loop(batch, singleton):
    rewards, group, _ = batch
    r, g, m = tensors(batch)
    lengths = m.sum(1)
    wanted = {
        group_normalized(singleton=singleton): reference.normalized(rewards, group, singleton=singleton),
        group_normalized(ddof=0, eps=1e-4): reference.normalized(rewards, group, ddof=0, eps=1e-4),
        group_normalized(std="none", singleton=singleton): reference.centred(rewards, group, singleton),
        rloo(singleton): reference.rloo(rewards, group, singleton),
        cpgd_advantage(): reference.normalized(rewards, group, ddof=0),
        cpgd_advantage("clip_filter", most=1.5): reference.cpgd_clip_filter(rewards, group, 1.5),
        gpg_advantage("signal", singleton): reference.gpg(rewards, group, "signal", singleton),
        gpg_advantage("nonzero", singleton): reference.gpg(rewards, group, "nonzero", singleton),
    }
    for estimator, expected in wanted.items():
        near(estimator(r, g), expected, 1e-9)
    near(
        opo(singleton)(r, g, lengths=lengths),
        reference.opo(rewards, group, lengths.tolist(), singleton),
        1e-9,
    )
    near(maxrl()(r.abs(), g), reference.maxrl(r.abs().tolist(), group), 1e-9)


def all_estimators(m: torch.Tensor, r: torch.Tensor) -> list:
    """Every estimator, bound to what it needs besides rewards and group; rows are picked by `take`."""
    turns = torch.arange(m.shape[1]).expand(m.shape) // 2
    placed = torch.where(m, r[:, None] * (turns + 1), math.nan)
    return [
        lambda r, g, take: group_normalized()(r, g),
        lambda r, g, take: group_normalized(std="batch", leave_one_out=True, singleton="raw")(r, g),
        lambda r, g, take: rloo()(r, g),
        lambda r, g, take: opo()(r, g, lengths=m[take].sum(1)),
        lambda r, g, take: maxrl()(r.abs(), g),
        lambda r, g, take: cpgd_advantage()(r, g),
        lambda r, g, take: cpgd_advantage("clip_filter")(r, g),
        lambda r, g, take: gpg_advantage()(r, g),
        lambda r, g, take: pass_at_k()(r, g),
        lambda r, g, take: gdpo()(r, g, components={"a": r, "b": r.abs()}, mask=m[take]),
        lambda r, g, take: process_normalized()(r, g, mask=m[take], token_rewards=placed[take], turns=turns[take]),
        lambda r, g, take: reinforce_plus_plus_baseline()(r, g, mask=m[take]),
    ]


@EXAMPLES
@given(batches(), st.randoms(use_true_random=False))
def test_order_of_the_rows_does_not_matter_and_runs_repeat(batch, random):
    r, g, m = tensors(batch)
    order = list(range(len(r)))
    random.shuffle(order)
    take, same = torch.tensor(order), torch.arange(len(r))
    for estimator in all_estimators(m, r):
        whole = estimator(r, g, same)
        assert torch.equal(whole, estimator(r, g, same))
        assert torch.isfinite(whole).all()
        torch.testing.assert_close(estimator(r[take], g[take], take), whole[take], rtol=1e-7, atol=1e-9)


@EXAMPLES
@given(batches())
def test_padding_changes_nothing(batch):
    r, g, m = tensors(batch)
    wide = torch.cat([m, torch.zeros(len(m), 3, dtype=torch.bool)], dim=1)
    same = torch.arange(len(r))
    for narrow, padded in zip(all_estimators(m, r), all_estimators(wide, r), strict=True):
        expected, got = narrow(r, g, same), padded(r, g, same)
        if got.dim() == 2:
            assert (got[:, m.shape[1] :] == 0).all()
            got = got[:, : m.shape[1]]
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_narrow_rewards_give_float32(dtype):
    r, g = torch.tensor([1.0, 0.0, 0.5, 2.0, 0.25]).to(dtype), torch.tensor([0, 0, 0, 1, 1])
    m = torch.ones(5, 4, dtype=torch.bool)
    exact = r.double()
    for narrow, wide in zip(all_estimators(m, r), all_estimators(m, exact), strict=True):
        got = narrow(r, g, torch.arange(5))
        assert got.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        near(got, wide(exact, g, torch.arange(5)).tolist(), 1e-5)


# -- whitening happens once -----------------------------------------------------------------------------------


def test_whitened_estimators_have_mean_0_and_variance_1_over_trained_tokens():
    random = torch.Generator().manual_seed(0)
    r = torch.rand(12, generator=random, dtype=torch.float64)
    g, m = torch.arange(12) // 4, torch.rand(12, 7, generator=random) < 0.6
    for got in (
        gdpo()(r, g, components={"a": r, "b": r**2}, mask=m),
        reinforce_plus_plus_baseline()(r, g, mask=m),
    ):
        assert (got[~m] == 0).all()
        assert got[m].mean().item() == pytest.approx(0.0, abs=1e-12)
        assert got[m].std().item() == pytest.approx(1.0, rel=1e-6)
    alone = gdpo(whiten="sequences")(r, g, components={"a": r, "b": r**2})
    assert alone.std().item() == pytest.approx(1.0, rel=1e-6)


def test_whitening_by_hand_and_of_nothing():
    near(whiten(torch.tensor([1.0, 2.0, 3.0])), [-1.0, 0.0, 1.0])
    mask = torch.tensor([[True, False], [True, True]])
    near(whiten(torch.tensor([[1.0, math.nan], [2.0, 3.0]]), mask), [[-1.0, 0.0], [0.0, 1.0]])
    near(whiten(torch.tensor([0.0, 2.0]), eps=2.0), [-0.5, 0.5])
    for nothing in (
        torch.full((4,), 0.7),
        torch.tensor([5.0]),
        torch.zeros(0),
        torch.tensor([0.1 + 0.2, 0.3]),
    ):
        for eps in (1e-8, 0.0):
            assert torch.equal(whiten(nothing, eps=eps), torch.zeros_like(nothing))
    assert (whiten(torch.tensor([1.0, 2.0]), torch.zeros(2, dtype=torch.bool)) == 0).all()
    with pytest.raises(LossError, match="not finite"):
        whiten(torch.tensor([1.0, math.inf]))


# -- refusals -------------------------------------------------------------------------------------------------


def test_what_is_needed_is_named():
    r, g, m = torch.tensor([1.0, 0.0]), torch.tensor([0, 0]), torch.ones(2, 3, dtype=torch.bool)
    for call, name in (
        (lambda: opo()(r, g), "lengths"),
        (lambda: gdpo()(r, g, mask=m), "components"),
        (lambda: gdpo()(r, g, components={"a": r}), "mask"),
        (lambda: reinforce_plus_plus_baseline()(r, g), "mask"),
        (lambda: process_normalized()(r, g, mask=m, turns=m.long()), "token_rewards"),
        (lambda: process_normalized()(r, g, mask=m, token_rewards=m.float()), "turns"),
    ):
        with pytest.raises((LossError, TypeError), match=name):
            call()


def test_shapes_and_values_that_cannot_be_used_are_named():
    r, g, m = torch.tensor([1.0, 0.0]), torch.tensor([0, 0]), torch.ones(2, 3, dtype=torch.bool)
    for call, pattern in (
        (lambda: rloo()(r, torch.tensor([0, 0, 1])), r"group has shape \(3,\); wanted \(2,\)"),
        (lambda: rloo()(r, torch.tensor([0.0, 1.0])), "group has dtype"),
        (lambda: rloo()(torch.zeros(0), torch.zeros(0, dtype=torch.long)), "batch is empty"),
        (lambda: rloo()(r[:, None], g), r"rewards has shape \(2, 1\)"),
        (lambda: opo()(r, g, lengths=torch.tensor([1, 2, 3])), r"lengths has shape \(3,\); wanted \(2,\)"),
        (lambda: opo()(r, g, lengths=torch.tensor([1, -2])), "at least 0"),
        (lambda: maxrl()(-r, g), "divides by"),
        (lambda: gdpo()(r, g, components={"a": r[:1]}, mask=m), r"components\['a'\] has shape \(1,\)"),
        (lambda: gdpo({"right": 1.0})(r, g, components={"rigth": r}, mask=m), "rigth"),
        (
            lambda: reinforce_plus_plus_baseline()(r, g, mask=m[:1]),
            r"mask has shape \(1, 3\)",
        ),
        (lambda: reinforce_plus_plus_baseline()(r, g, mask=m.float()), "bool"),
        (lambda: reinforce_plus_plus_baseline()(r, g, mask=m[:, :0]), "batch is empty"),
        (lambda: optimal_token_baseline(m.float(), g, m, -m.float(), 2.0 * m), r"\(0, 1\]"),
    ):
        with pytest.raises(LossError, match=pattern):
            call()


def test_options_out_of_range_are_refused():
    for call, pattern in (
        (lambda: rloo(singleton="row"), "nearest: raw"),
        (lambda: gpg_advantage(alpha="signals"), "nearest: signal"),
        (lambda: cpgd_advantage(weight="clip-filter"), "nearest: clip_filter"),
        (lambda: cpgd_advantage("clip_filter", most=0.5), "most"),
        (lambda: cpgd_advantage(most=2.0), "no effect"),
        (lambda: group_normalized(ddof=0.5), "ddof"),
        (lambda: pass_at_k(k=2.5), "k=2.5"),
        (lambda: gdpo(whiten="tokens"), "batch"),
        (lambda: gdpo(weights={})(torch.ones(1), torch.zeros(1).long(), components={}), "components"),
        (lambda: gdpo(eps=-1.0), "eps"),
        (lambda: pass_at_k(k=1), "k=1"),
        (lambda: pass_at_k(std="batch"), "std"),
        (lambda: process_normalized(std="batch"), "std"),
        (lambda: maxrl(eps=math.nan), "eps"),
    ):
        with pytest.raises(LossError, match=pattern):
            call()


def test_estimators_are_values():
    for estimator in (
        rloo("raw"),
        opo(),
        maxrl(),
        cpgd_advantage("none"),
        gpg_advantage(),
        pass_at_k(3),
        gdpo({"a": 1.0}),
        gdpo(),
    ):
        assert pickle.loads(pickle.dumps(estimator)) == estimator
        assert isinstance(hash(estimator), int)
        assert repr(estimator).startswith(type(estimator).__name__)
