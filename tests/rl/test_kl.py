"""KL estimators: values by hand, expectations over a small vocabulary, gradients, extreme and narrow inputs."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlbench.errors import LossError
from rlbench.rl import LossInputs, reinforce
from rlbench.rl.kl import ESTIMATORS, absolute, k1, k1_plus, k2, k3, k3_plus, kl_estimator

P_LOGITS = [0.3, -0.5, 1.1, 0.0]
Q_LOGITS = [-0.2, 0.9, 0.4, 0.1]


def policies() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits of the policy, with gradient, and the log-probabilities of policy and reference over four tokens."""
    logits = torch.tensor(P_LOGITS, dtype=torch.float64, requires_grad=True)
    return logits, logits.log_softmax(0), torch.tensor(Q_LOGITS, dtype=torch.float64).log_softmax(0)


@pytest.mark.parametrize(
    ("name", "at_half", "at_minus_one"),
    [
        ("k1", 0.5, -1.0),
        ("k2", 0.125, 0.5),
        ("k3", 0.10653, 0.71828),
        ("abs", 0.5, 1.0),
        ("k1+", 0.5, -1.0),
        ("k3+", 0.10653, 0.71828),
    ],
)
def test_values_by_hand(name, at_half, at_minus_one):
    got = kl_estimator(name)(torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.0]))
    assert got.tolist() == pytest.approx([at_half, at_minus_one], abs=1e-5)


@given(st.lists(st.tuples(st.floats(-60, 0), st.floats(-60, 0)), min_size=1, max_size=6))
@settings(max_examples=60, derandomize=True)
def test_equals_the_formula_one_number_at_a_time(pairs):
    p, q = torch.tensor(pairs, dtype=torch.float64).unbind(1)
    for i, (own, other) in enumerate(pairs):
        gap = own - other
        bounded = min(max(-gap, -20.0), 20.0)
        wanted = {"k1": gap, "k2": gap * gap / 2, "k3": math.expm1(bounded) - bounded, "abs": abs(gap)}
        wanted |= {"k1+": wanted["k1"], "k3+": wanted["k3"]}
        for name, estimator in ESTIMATORS.items():
            assert estimator(p, q)[i].item() == pytest.approx(wanted[name], rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("name", ["k1", "k3", "k1+", "k3+"])
def test_unbiased_estimators_average_to_the_kl(name):
    _, p, q = policies()
    exact = (p.exp() * (p - q)).sum()
    torch.testing.assert_close((p.exp() * ESTIMATORS[name](p, q)).sum(), exact, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "is_the_gradient"),
    [("k2", True), ("k1+", True), ("k3+", True), ("k1", False), ("k3", False)],
)
def test_which_have_the_gradient_of_the_kl_when_used_as_a_loss(name, is_the_gradient):
    logits, p, q = policies()
    (exact,) = torch.autograd.grad((p.exp() * (p - q)).sum(), logits, retain_graph=True)
    (got,) = torch.autograd.grad((p.exp().detach() * ESTIMATORS[name](p, q)).sum(), logits)
    assert torch.allclose(got, exact, rtol=1e-10, atol=1e-12) == is_the_gradient


def test_in_expectation_k1_does_not_move_and_k3_pulls_the_other_kl():
    logits, p, q = policies()
    (of_k1,) = torch.autograd.grad((p.exp().detach() * k1(p, q)).sum(), logits, retain_graph=True)
    assert of_k1.abs().max() < 1e-12
    (reverse,) = torch.autograd.grad((q.exp() * (q - p)).sum(), logits, retain_graph=True)
    (of_k3,) = torch.autograd.grad((p.exp().detach() * k3(p, q)).sum(), logits)
    torch.testing.assert_close(of_k3, reverse, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", ["k1", "k3"])
def test_ratio_correction_makes_value_and_gradient_those_of_the_current_policy(name):
    """Tokens drawn from an older policy; both are exact in expectation (DeepSeek-V3.2)."""
    logits, p, q = policies()
    old = torch.tensor([0.0, 0.2, -0.3, 0.5], dtype=torch.float64).log_softmax(0)
    exact = (p.exp() * (p - q)).sum()
    (wanted,) = torch.autograd.grad(exact, logits, retain_graph=True)
    loss = reinforce(kl_coef=1.0, kl_estimator=name, kl_ratio_correction=True)
    none = torch.zeros(1, 4, dtype=torch.float64)
    tokens = (p[None], old[None], old[None], q[None], none, torch.ones(1, 4, dtype=torch.bool), none)
    corrected = (old.exp() * loss(LossInputs(*tokens))[0][0]).sum()
    torch.testing.assert_close(corrected, exact, rtol=1e-12, atol=1e-12)
    (got,) = torch.autograd.grad(corrected, logits)
    torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("estimator", [k1, k2, k3, absolute])
def test_gradients_are_exact(estimator):
    p = torch.tensor([-0.3, -1.7, -4.0], dtype=torch.float64, requires_grad=True)
    q = torch.tensor([-0.9, -0.2, -3.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(estimator, (p, q))


@pytest.mark.parametrize(("estimator", "value"), [(k1_plus, k1), (k3_plus, k3)])
def test_straight_through_has_one_value_and_the_gradient_of_k2(estimator, value):
    p = torch.tensor([-0.3, -1.7, -60.0], requires_grad=True)
    q = torch.tensor([-0.9, -0.2, -3.0])
    torch.testing.assert_close(estimator(p, q), value(p, q))
    torch.testing.assert_close(torch.autograd.grad(estimator(p, q).sum(), p)[0], (p - q).detach())


@pytest.mark.parametrize("gap", [50.0, -50.0, 1e4, -1e4])
def test_extreme_ratios_stay_finite_in_value_and_gradient(gap):
    for name, estimator in ESTIMATORS.items():
        p = torch.tensor([gap], requires_grad=True)
        got = estimator(p, torch.zeros(1))
        (gradient,) = torch.autograd.grad(got.sum(), p)
        assert torch.isfinite(got).all(), name
        assert torch.isfinite(gradient).all(), name


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_narrow_inputs_are_computed_wide(dtype):
    p, q = torch.tensor([-1.0, -12.0], dtype=dtype), torch.tensor([-1.0, -1.0], dtype=dtype)
    for estimator in ESTIMATORS.values():
        got = estimator(p, q)
        assert got.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        torch.testing.assert_close(got.double(), estimator(p.double(), q.double()), rtol=1e-6, atol=1e-6)
        assert torch.isfinite(got).all()  # e^11 is no float16 number's square


def test_what_cannot_be_used_is_refused():
    with pytest.raises(LossError, match=r"ref_logprobs has shape \(3,\); wanted \(2,\)"):
        k3(torch.zeros(2), torch.zeros(3))
    with pytest.raises(LossError, match=r"k3\+"):
        kl_estimator("k33")
