"""Preference losses by hand, against loops, and by gradcheck."""

import math
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlbench.errors import LossError
from rlbench.rl.preference import dpo, ipo, kto, kto_kl, orpo, sequence_logprobs, simpo

NAN = float("nan")


def softplus(x: float) -> float:
    """-log sigmoid(-x), without overflow."""
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


def slow_pair(loss, c: float, r: float, ref_c: float, ref_r: float) -> float:
    x = (c - r) - (ref_c - ref_r)
    name = type(loss).__name__
    if name == "dpo":
        s, right, wrong = loss.label_smoothing, softplus(-loss.beta * x), softplus(loss.beta * x)
        return ((1 - s) * right - s * wrong) / (1 - 2 * s) if loss.robust else (1 - s) * right + s * wrong
    if name == "ipo":
        return (x - 1 / (2 * loss.beta)) ** 2
    if name == "simpo":
        return softplus(-(loss.beta * (c - r) - loss.gamma))
    odds = [math.log(math.exp(v) / (1 - math.exp(v))) for v in (c, r)]
    return -c + loss.beta * softplus(-(odds[0] - odds[1]))


WITH_REFERENCE = [
    dpo(),
    dpo(0.5, label_smoothing=0.2),
    dpo(0.5, label_smoothing=0.2, robust=True),
    ipo(),
    ipo(0.7),
]
WITHOUT = [simpo(), simpo(beta=1.0, gamma=0.0), orpo(), orpo(beta=1.5)]


def pairs(seed: int, size: int = 4) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    return [-3 * torch.rand(size, generator=random, dtype=torch.float64) - 0.05 for _ in range(4)]


@pytest.mark.parametrize("loss", [*WITH_REFERENCE, *WITHOUT], ids=repr)
@settings(derandomize=True, max_examples=15)
@given(seed=st.integers(0, 10_000), size=st.integers(1, 5))
def test_pair_losses_equal_the_loop(loss, seed, size):
    args = pairs(seed, size)
    per_pair, metrics = loss.of(*args) if loss in WITH_REFERENCE else loss.of(*args[:2])
    for i in range(size):
        c, r, ref_c, ref_r = (value[i].item() for value in args)
        assert per_pair[i].item() == pytest.approx(slow_pair(loss, c, r, ref_c, ref_r), rel=1e-9)
        base = (ref_c, ref_r) if loss in WITH_REFERENCE else (0.0, 0.0)
        assert metrics["reward_chosen"][i].item() == pytest.approx(loss.beta * (c - base[0]))
        assert metrics["reward_rejected"][i].item() == pytest.approx(loss.beta * (r - base[1]))
        margin = metrics["reward_chosen"][i] - metrics["reward_rejected"][i]
        assert metrics["reward_margin"][i] == margin
        assert metrics["reward_accuracy"][i] == float(margin > 0)


def test_by_hand():
    one = [torch.tensor([v]) for v in (-1.0, -2.0, -1.5, -1.5)]  # x = 1
    assert dpo(beta=1.0).of(*one)[0].item() == pytest.approx(math.log(1 + math.exp(-1)))
    assert ipo(beta=0.25).of(*one)[0].item() == pytest.approx(1.0)
    assert simpo(beta=2.0, gamma=1.0).of(*one[:2])[0].item() == pytest.approx(math.log(1 + math.exp(-1)))
    at_reference = [torch.tensor([-3.0])] * 4
    assert dpo().of(*at_reference)[0].item() == pytest.approx(math.log(2))
    assert dpo().of(*at_reference)[1]["reward_accuracy"].item() == 0, "a tie is not a win"
    half = torch.tensor([math.log(0.5)])
    assert orpo(beta=2.0).of(half, half)[0].item() == pytest.approx(math.log(2) + 2 * math.log(2))


def test_the_robust_loss_is_unbiased_under_flipped_labels():
    c, r, ref_c, ref_r = pairs(3)
    loss = dpo(0.5, label_smoothing=0.3, robust=True)
    expected = 0.7 * loss.of(c, r, ref_c, ref_r)[0] + 0.3 * loss.of(r, c, ref_r, ref_c)[0]
    torch.testing.assert_close(expected, dpo(0.5).of(c, r, ref_c, ref_r)[0])


@pytest.mark.parametrize("loss", [*WITH_REFERENCE, *WITHOUT], ids=repr)
def test_gradients_reach_the_policy_alone(loss):
    args = [value.requires_grad_() for value in pairs(1)]
    count = 4 if loss in WITH_REFERENCE else 2
    assert torch.autograd.gradcheck(lambda c, r: loss.of(c, r, *args[2:count])[0], args[:2])
    got = torch.autograd.grad(loss.of(*args[:count])[0].sum(), args, allow_unused=True)
    assert got[2] is None
    assert got[3] is None
    assert (got[0] < 0).any(), "the chosen response becomes likelier"
    assert not loss.of(*args[:count])[1]["reward_margin"].requires_grad


@pytest.mark.parametrize("gap", [-5000.0, 5000.0])
def test_absurd_margins_stay_finite(gap):
    chosen = torch.tensor([-6000.0 + gap if gap > 0 else -6000.0], requires_grad=True)
    rejected = torch.tensor([-6000.0 if gap > 0 else -1000.0])
    zero = torch.zeros(1)
    for loss, args in ((dpo(), (zero, zero)), (ipo(), (zero, zero)), (simpo(), ()), (orpo(), ())):
        value, _ = loss.of(chosen, rejected, *args)
        (gradient,) = torch.autograd.grad(value.sum(), chosen)
        assert torch.isfinite(value).all()
        assert torch.isfinite(gradient).all()


def test_orpo_of_a_certain_response_is_finite():
    """A probability of 1 has infinite odds; a sequence without trained tokens has it too."""
    chosen, rejected = (torch.zeros(2, requires_grad=True), torch.tensor([-1.0, 0.0], requires_grad=True))
    value, _ = orpo().of(chosen, rejected)
    assert torch.isfinite(value).all()
    for gradient in torch.autograd.grad(value.sum(), [chosen, rejected]):
        assert torch.isfinite(gradient).all()


def test_kto_by_hand():
    logprobs, ref = torch.tensor([-1.0, -1.0, -3.0]), torch.tensor([-2.0, -2.0, -2.0])
    loss, metrics = kto(beta=1.0, desirable_weight=2.0, undesirable_weight=0.5).of(
        logprobs, ref, torch.tensor([True, False, False]), kl=0.5
    )

    def sigmoid(x):
        return 1 / (1 + math.exp(-x))

    expected = [2 * (1 - sigmoid(1 - 0.5)), 0.5 * (1 - sigmoid(0.5 - 1)), 0.5 * (1 - sigmoid(0.5 + 1))]
    assert loss.tolist() == pytest.approx(expected)
    assert metrics["reward"].tolist() == [1.0, 1.0, -1.0]


def test_kto_takes_a_negative_kl_for_none_and_gives_it_no_gradient():
    logprobs, ref, _, _ = pairs(2)
    good = torch.tensor([True, False, True, False])
    at_zero, _ = kto().of(logprobs, ref, good, kl=0.0)
    torch.testing.assert_close(kto().of(logprobs, ref, good, kl=-3.0)[0], at_zero)
    leaf = logprobs.clone().requires_grad_()
    kl = kto_kl(leaf, ref)
    assert kl.item() == pytest.approx((logprobs - ref).mean().item())
    assert not kl.requires_grad
    assert torch.autograd.gradcheck(lambda p: kto().of(p, ref, good, kl=0.2)[0], [leaf])
    (gradient,) = torch.autograd.grad(kto().of(leaf, ref, good, kl)[0].sum(), leaf)
    assert (gradient[good] < 0).all()
    assert (gradient[~good] > 0).all()


def test_sequence_logprobs_sum_what_is_trained():
    logprobs = torch.tensor([[-1.0, -2.0, NAN], [NAN, -4.0, -8.0], [NAN, NAN, NAN]], requires_grad=True)
    mask = ~torch.isnan(logprobs)
    assert sequence_logprobs(logprobs, mask).tolist() == [-3.0, -12.0, 0.0]
    assert sequence_logprobs(logprobs, mask, average=True).tolist() == [-1.5, -6.0, 0.0]
    (gradient,) = torch.autograd.grad(sequence_logprobs(logprobs, mask, average=True).sum(), logprobs)
    assert gradient.tolist() == [[0.5, 0.5, 0], [0, 0.5, 0.5], [0, 0, 0]]
    assert sequence_logprobs(logprobs.bfloat16(), mask).dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_inputs_are_computed_in_float32(dtype):
    args = [value.to(dtype) for value in pairs(1)]
    wide = [value.float() for value in args]
    for loss, count in ((dpo(), 4), (ipo(), 4), (simpo(), 2), (orpo(), 2)):
        got, _ = loss.of(*args[:count])
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, loss.of(*wide[:count])[0])


def test_losses_are_values():
    assert repr(dpo()) == "dpo(beta=0.1, label_smoothing=0.0, robust=False)"
    assert pickle.loads(pickle.dumps(kto(0.2))) == kto(0.2)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: dpo(beta=0.0), "beta"),
        (lambda: dpo(label_smoothing=0.5), "label_smoothing"),
        (lambda: dpo(robust=True), "robust"),
        (lambda: ipo(beta=-1.0), "beta"),
        (lambda: simpo(gamma=-1.0), "gamma"),
        (lambda: orpo(beta=NAN), "beta"),
        (lambda: kto(desirable_weight=-1.0), "desirable_weight"),
        (
            lambda: dpo().of(*[torch.zeros(2)] * 3, torch.zeros(3)),
            r"ref_rejected has shape \(3,\); wanted \(2,\)",
        ),
        (lambda: dpo().of(*[torch.zeros(0)] * 4), "chosen has shape"),
        (lambda: simpo().of(torch.zeros(2, 3), torch.zeros(2, 3)), r"wanted \(B,\)"),
        (lambda: kto().of(torch.zeros(2), torch.zeros(2), torch.ones(2), 0.0), "desirable has dtype"),
        (lambda: kto().of(torch.zeros(2), torch.zeros(2), torch.ones(2).bool(), torch.zeros(2)), "kl has shape"),
        (lambda: sequence_logprobs(torch.zeros(2, 3), torch.ones(2, 2).bool()), "logprobs has shape"),
    ],
)
def test_bad_values_are_refused_by_name(make, said):
    with pytest.raises(ValueError, match=said) as caught:
        make()
    assert isinstance(caught.value, LossError)
