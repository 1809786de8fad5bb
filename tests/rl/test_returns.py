"""Advantages per token: by hand, against loops over ragged masks, and what stands on untrained tokens."""

import math
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlbench.errors import LossError
from rlbench.rl.returns import (
    discounted_returns,
    gae,
    gae_advantages,
    length_adaptive,
    on_policy_distillation,
    reinforce_plus_plus,
    remax,
)
from tests.rl import advantage_reference as reference
from tests.rl.advantage_reference import EXAMPLES, near


def double(rows) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64)


# -- values by hand -------------------------------------------------------------------------------------------


def test_returns_are_carried_through_untrained_tokens():
    """A tool's output between two turns neither earns, nor discounts, nor stops the reward."""
    mask = torch.tensor([[1, 1, 0, 0, 1, 0]]).bool()
    rewards = torch.tensor([[1.0, 0.0, 9.0, math.nan, 8.0, math.inf]])
    near(discounted_returns(rewards, mask, 0.5), [[3.0, 4.0, 0.0, 0.0, 8.0, 0.0]])
    near(discounted_returns(rewards, mask), [[9.0, 8.0, 0.0, 0.0, 8.0, 0.0]])
    near(discounted_returns(rewards, mask, 0.0), [[1.0, 0.0, 0.0, 0.0, 8.0, 0.0]])


def test_gae_by_hand():
    rewards, values = double([[0.0, 0.0, 1.0]]), double([[0.5, 0.4, 0.3]])
    advantages, targets = gae_advantages(rewards, values, torch.ones(1, 3, dtype=torch.bool), 1.0, 0.95)
    near(advantages, [[0.43675, 0.565, 0.7]], 1e-12)
    near(targets, [[0.93675, 0.965, 1.0]], 1e-12)


def test_gae_skips_observations():
    mask = torch.tensor([[1, 1, 0, 1]]).bool()
    rewards, values = double([[0.0, 0.0, 50.0, 1.0]]), double([[0.5, 0.4, math.nan, 0.3]])
    advantages, targets = gae_advantages(rewards, values, mask, 1.0, 0.95)
    near(advantages, [[0.43675, 0.565, 0.0, 0.7]], 1e-12)
    near(targets, [[0.93675, 0.965, 0.0, 1.0]], 1e-12)


def test_gae_ends_between_td_error_and_return():
    random = torch.Generator().manual_seed(0)
    rewards, values = (
        torch.randn(3, 6, generator=random).double(),
        torch.randn(3, 6, generator=random).double(),
    )
    mask = torch.rand(3, 6, generator=random) < 0.7
    long, targets = gae_advantages(rewards, values, mask, 0.9, 1.0)
    near(targets, discounted_returns(rewards, mask, 0.9), 1e-12)
    near(long, torch.where(mask, targets - values, 0.0), 1e-12)
    short, _ = gae_advantages(rewards, values, mask, 0.0, 0.5)
    near(short, torch.where(mask, rewards - values, 0.0), 1e-12)


def test_a_truncated_response_is_worth_its_last_value():
    values, mask = double([[0.5, 0.4], [0.5, 0.4]]), torch.ones(2, 2, dtype=torch.bool)
    known = {"values": values, "mask": mask, "truncated": torch.tensor([True, False])}
    rewards, group = double([0.0, 0.0]), torch.tensor([0, 1])
    got = gae(lam=1.0, whiten=False, bootstrap_truncated=True)(rewards, group, **known)
    near(got, [[-0.1, 0.0], [-0.5, -0.4]], 1e-12)
    near(gae(lam=1.0, whiten=False)(rewards, group, **known), [[-0.5, -0.4], [-0.5, -0.4]], 1e-12)


def test_policy_and_value_may_have_their_own_lambda():
    values, mask = double([[0.5, 0.4, 0.3]]), torch.ones(1, 3, dtype=torch.bool)
    decoupled = gae(lam=0.95, value_lam=1.0, whiten=False)
    known = {"values": values, "mask": mask}
    near(decoupled(double([1.0]), torch.tensor([0]), **known), [[0.43675, 0.565, 0.7]], 1e-12)
    near(decoupled.returns(double([1.0]), torch.tensor([0]), **known), [[1.0, 1.0, 1.0]], 1e-12)
    near(gae().returns(double([1.0]), torch.tensor([0]), **known), [[0.93675, 0.965, 1.0]], 1e-12)


def test_lambda_by_length():
    near(length_adaptive(0.05)(torch.tensor([0, 1, 20, 40, 2000])), [0.0, 0.0, 0.0, 0.5, 0.99], 1e-12)
    values, mask = torch.rand(2, 40).double(), torch.ones(2, 40, dtype=torch.bool)
    mask[1, 25:] = False
    got = gae(lam=length_adaptive(), whiten=False)(double([1.0, 2.0]), torch.tensor([0, 0]), values=values, mask=mask)
    for row, lam in ((0, 0.5), (1, 0.2)):
        alone = gae(lam=lam, whiten=False)(double([1.0, 2.0]), torch.tensor([0, 0]), values=values, mask=mask)
        near(got[row], alone[row], 1e-12)


def test_remax_subtracts_the_greedy_response():
    mask = torch.tensor([[1, 0, 1], [1, 1, 0], [0, 0, 0]]).bool()
    known = {"mask": mask, "baseline_rewards": torch.tensor([0.25, 1.0, 5.0])}
    rewards, group = torch.tensor([1.0, 0.0, 1.0]), torch.tensor([0, 0, 0])
    near(remax()(rewards, group, **known), [[0.75, 0.0, 0.75], [-1.0, -1.0, 0.0], [0.0, 0.0, 0.0]])
    placed = torch.tensor([[1.0, math.nan, 2.0], [0.0, 4.0, math.nan], [math.nan] * 3])
    got = remax()(rewards, group, token_rewards=placed, **known)
    near(got, [[2.75, 0.0, 1.75], [3.0, 3.0, 0.0], [0.0, 0.0, 0.0]])


def test_distillation_follows_the_teacher():
    mask = torch.tensor([[1, 1, 1, 0]]).bool()
    known = {
        "mask": mask,
        "logprobs": torch.tensor([[-1.0, -50.0, 0.0, math.nan]]),
        "teacher_logprobs": torch.tensor([[-0.25, 0.0, -50.0, math.nan]]),
    }
    rewards, group = torch.tensor([7.0]), torch.tensor([0])
    near(on_policy_distillation()(rewards, group, **known), [[0.75, 20.0, -20.0, 0.0]])
    near(on_policy_distillation(clip=None)(rewards, group, **known), [[0.75, 50.0, -50.0, 0.0]])
    near(on_policy_distillation(clip=0.5)(rewards, group, **known), [[0.5, 0.5, -0.5, 0.0]])


# -- against the loops, on any batch --------------------------------------------------------------------------


@st.composite
def batches(draw):
    """Ragged masks with holes and empty rows; NaN, infinities and large numbers on untrained tokens."""
    rows, width = draw(st.integers(1, 6)), draw(st.integers(1, 9))
    mask = draw(st.lists(st.lists(st.booleans(), min_size=width, max_size=width), min_size=rows, max_size=rows))

    def plane():
        number = st.floats(-50, 50, width=32)
        garbage = st.sampled_from([math.nan, math.inf, -math.inf, 1e30])
        return [[draw(number if own else garbage) for own in row] for row in mask]

    rewards = draw(st.lists(st.floats(-10, 10, width=32), min_size=rows, max_size=rows))
    return rewards, mask, plane(), plane(), draw(st.sampled_from([0.0, 0.5, 0.97, 1.0]))


@EXAMPLES
@given(batches(), st.sampled_from([0.0, 0.3, 0.95, 1.0]))
def test_equals_the_loops(batch, lam):
    rewards, mask, placed, values, gamma = batch
    r, m, p, v = double(rewards), torch.tensor(mask), double(placed), double(values)
    g = torch.zeros(len(r), dtype=torch.long)
    near(discounted_returns(p, m, gamma), double(reference.returns(placed, mask, gamma)), 1e-9)
    last = reference.on_last(rewards, mask)
    returns = reference.returns(last, mask, gamma)
    near(reinforce_plus_plus(gamma, whiten=False)(r, g, mask=m), double(returns), 1e-9)
    near(reinforce_plus_plus(gamma)(r, g, mask=m), double(reference.whitened(returns, mask)), 1e-6)

    after = [float(i) for i in range(len(rewards))]
    for lams in (lam, [lam if i % 2 else 0.5 for i in range(len(rewards))]):
        advantages, targets = reference.gae(placed, values, mask, gamma, lams, after)
        got = gae_advantages(p, v, m, gamma, double(lams) if isinstance(lams, list) else lams, double(after))
        near(got[0], double(advantages), 1e-9)
        near(got[1], double(targets), 1e-9)
    advantages, targets = reference.gae(last, values, mask, gamma, lam)
    near(gae(gamma, lam)(r, g, values=v, mask=m), double(reference.whitened(advantages, mask)), 1e-6)
    near(gae(gamma, lam).returns(r, g, values=v, mask=m), double(targets), 1e-9)
    advantages, _ = reference.gae(placed, values, mask, gamma, lam)
    near(gae(gamma, lam, whiten=False)(r, g, values=v, mask=m, token_rewards=p), double(advantages), 1e-9)


@EXAMPLES
@given(batches(), st.randoms(use_true_random=False))
def test_rows_do_not_touch_each_other_and_padding_changes_nothing(batch, random):
    rewards, mask, placed, values, gamma = batch
    r, m, p, v = double(rewards), torch.tensor(mask), double(placed), double(values)
    order = list(range(len(r)))
    random.shuffle(order)
    take = torch.tensor(order)
    whole = gae_advantages(p, v, m, gamma, 0.9)
    for got, expected in zip(gae_advantages(p[take], v[take], m[take], gamma, 0.9), whole, strict=True):
        assert torch.equal(got, expected[take])
    alone = gae_advantages(p[:1], v[:1], m[:1], gamma, 0.9)
    assert torch.equal(alone[0], whole[0][:1])

    def wider(values: torch.Tensor, fill: float | bool) -> torch.Tensor:
        return torch.cat([values, torch.full((len(values), 4), fill, dtype=values.dtype)], dim=1)

    padded = gae_advantages(wider(p, math.nan), wider(v, math.nan), wider(m, False), gamma, 0.9)
    for got, expected in zip(padded, whole, strict=True):
        near(got[:, : m.shape[1]], expected, 1e-12)
        assert (got[:, m.shape[1] :] == 0).all()
    g = torch.zeros(len(r), dtype=torch.long)
    shuffled = reinforce_plus_plus(gamma)(r[take], g, mask=m[take])
    near(shuffled, reinforce_plus_plus(gamma)(r, g, mask=m)[take], 1e-9)


def test_whitening_happens_exactly_once():
    random = torch.Generator().manual_seed(3)
    r, v = torch.rand(8, generator=random).double(), torch.rand(8, 9, generator=random).double()
    m, g = torch.rand(8, 9, generator=random) < 0.7, torch.zeros(8, dtype=torch.long)
    for estimator, known in ((gae(0.9, 0.8), {"values": v}), (reinforce_plus_plus(0.9), {})):
        got = estimator(r, g, mask=m, **known)
        assert (got[~m] == 0).all()
        assert got[m].mean().item() == pytest.approx(0.0, abs=1e-12)
        assert got[m].std().item() == pytest.approx(1.0, rel=1e-5)
        plain = type(estimator)(**{**vars(estimator), "whiten": False})(r, g, mask=m, **known)
        near(got[m], (plain[m] - plain[m].mean()) / plain[m].std(), 1e-5)
    targets = gae(0.9, 0.8).returns(r, g, mask=m, values=v)
    near(targets[m], gae(0.9, 0.8, whiten=False).returns(r, g, mask=m, values=v)[m], 0.0)


def test_no_variance_and_no_trained_token_give_zero():
    r, g = torch.full((3,), 0.7), torch.zeros(3, dtype=torch.long)
    for m in (torch.ones(3, 4, dtype=torch.bool), torch.zeros(3, 4, dtype=torch.bool)):
        assert (reinforce_plus_plus()(r, g, mask=m) == 0).all()
        assert (gae(lam=1.0)(r, g, mask=m, values=torch.zeros(3, 4)) == 0).all()
    one = torch.tensor([[True, False]])
    assert (reinforce_plus_plus()(r[:1], g[:1], mask=one) == 0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_narrow_inputs_are_computed_wide(dtype):
    """300 rewards of 1 sum to 300 exactly, which neither float16 sums nor bfloat16 numbers would show."""
    m = torch.ones(1, 300, dtype=torch.bool)
    got = discounted_returns(torch.ones(1, 300, dtype=dtype), m)
    assert got.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    near(got, torch.arange(300, 0, -1)[None], 0.0)
    r, g, v = torch.tensor([1.0], dtype=dtype), torch.tensor([0]), torch.zeros(1, 300, dtype=dtype)
    assert gae(whiten=False)(r, g, values=v, mask=m).dtype == got.dtype


def test_long_responses_agree_with_the_loop():
    random = torch.Generator().manual_seed(5)
    placed, mask = (
        torch.randn(2, 3001, generator=random).double(),
        torch.rand(2, 3001, generator=random) < 0.8,
    )
    wanted = reference.returns(placed.tolist(), mask.tolist(), 0.999)
    near(discounted_returns(placed, mask, 0.999), double(wanted), 1e-9)


# -- refusals -------------------------------------------------------------------------------------------------


def test_what_is_needed_is_named():
    r, g, m = torch.tensor([1.0, 0.0]), torch.tensor([0, 0]), torch.ones(2, 3, dtype=torch.bool)
    for call, name in (
        (lambda: gae()(r, g, mask=m), "values"),
        (lambda: gae()(r, g, values=m.float()), "mask"),
        (lambda: gae(bootstrap_truncated=True)(r, g, values=m.float(), mask=m), "truncated"),
        (lambda: reinforce_plus_plus()(r, g), "mask"),
        (lambda: remax()(r, g, mask=m), "baseline_rewards"),
        (lambda: on_policy_distillation()(r, g, mask=m, logprobs=m.float()), "teacher_logprobs"),
        (lambda: on_policy_distillation()(r, g, mask=m, teacher_logprobs=m.float()), "logprobs"),
    ):
        with pytest.raises(LossError if name == "truncated" else TypeError, match=name):
            call()


def test_what_cannot_be_used_is_refused():
    r, g, m = torch.tensor([1.0, 0.0]), torch.tensor([0, 0]), torch.ones(2, 3, dtype=torch.bool)
    flat = m.float()
    hole = torch.where(torch.tensor([[True, True, False]]), flat, math.nan)
    for call, pattern in (
        (lambda: gae()(r, g, values=flat[:, :2], mask=m), r"values has shape \(2, 2\); wanted \(2, 3\)"),
        (lambda: gae()(r, g, values=hole, mask=m), "values: 2 values are not finite"),
        (lambda: gae()(r, g[:1], values=flat, mask=m), r"group has shape \(1,\); wanted \(2,\)"),
        (lambda: gae()(r, g, values=flat, mask=m, token_rewards=hole), "token_rewards"),
        (lambda: gae()(r[:0], g[:0], values=flat[:0], mask=m[:0]), "batch is empty"),
        (lambda: remax()(r, g, mask=m, baseline_rewards=r[:1]), "baseline_rewards has shape"),
        (lambda: remax()(r, g, mask=m, baseline_rewards=r / 0), "baseline_rewards"),
        (lambda: discounted_returns(flat, m, 1.1), "gamma=1.1"),
        (lambda: discounted_returns(flat[0], m), "rewards has shape"),
        (lambda: gae_advantages(flat, flat, m, 1.0, -0.1), "lam"),
        (lambda: gae_advantages(flat, flat, m, 1.0, torch.tensor([0.5, 2.0])), "lam"),
        (lambda: gae_advantages(flat, flat, m, 1.0, 0.5, torch.zeros(3)), "bootstrap has shape"),
        (lambda: gae(gamma=-1.0), "gamma"),
        (lambda: gae(value_lam=2.0), "value_lam"),
        (lambda: length_adaptive(0.0), "alpha"),
        (lambda: on_policy_distillation(clip=0.0), "clip"),
        (lambda: reinforce_plus_plus(gamma=math.nan), "gamma"),
    ):
        with pytest.raises(LossError, match=pattern):
            call()


def test_estimators_are_values():
    for estimator in (
        gae(lam=length_adaptive(0.1)),
        reinforce_plus_plus(0.9),
        remax(),
        on_policy_distillation(1.0),
    ):
        assert pickle.loads(pickle.dumps(estimator)) == estimator
        assert hash(estimator) == hash(pickle.loads(pickle.dumps(estimator)))
