"""Losses of reward models by hand, against each other, and by gradcheck."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlbench.errors import LossError
from rlbench.rl.supervised import (
    LOG_SCALE_START,
    bradley_terry_loss,
    centering_penalty,
    hps_loss,
    log_exp_loss,
    prm_loss,
    tie_penalty,
)

NAN = float("nan")
GOOD, BAD, STEP = 2, 4, 6  # token ids: the two labels, and the placeholder

score = st.floats(-50, 50, allow_nan=False)


@settings(derandomize=True, max_examples=60)
@given(rows=st.lists(st.tuples(score, score, st.floats(0, 3)), min_size=1, max_size=5))
def test_pair_losses_equal_the_loop(rows):
    chosen, rejected, margin = (torch.tensor(column, dtype=torch.float64) for column in zip(*rows, strict=True))
    losses = {
        "bt": bradley_terry_loss(chosen, rejected)[0],
        "margin": bradley_terry_loss(chosen, rejected, margin)[0],
        "log_exp": log_exp_loss(chosen, rejected)[0],
        "hps": hps_loss(chosen, rejected)[0],
        "soft": hps_loss(chosen, rejected, torch.full_like(chosen, 0.75), log_scale=math.log(2.0))[0],
        "tie": tie_penalty(chosen, rejected),
        "centre": centering_penalty(chosen, rejected),
    }

    def log1p_exp(x):
        return max(x, 0.0) + math.log1p(math.exp(-abs(x)))

    for i, (c, r, m) in enumerate(rows):
        expected = {
            "bt": log1p_exp(r - c),
            "margin": log1p_exp(r - c + m),
            "log_exp": log1p_exp(r - c),
            "hps": log1p_exp(r - c),
            "soft": 0.75 * log1p_exp(2 * (r - c)) + 0.25 * log1p_exp(2 * (c - r)),
            "tie": abs(c - r),
            "centre": (c + r) ** 2,
        }
        assert {name: loss[i].item() for name, loss in losses.items()} == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_by_hand():
    c, r = torch.tensor([2.0, 0.0]), torch.tensor([1.0, 0.0])
    loss, metrics = bradley_terry_loss(c, r, margin=1.0)
    assert loss.tolist() == pytest.approx([math.log(2), math.log(1 + math.e)])
    assert metrics["margin"].tolist() == [1.0, 0.0]
    assert metrics["accuracy"].tolist() == [1.0, 0.0], "a tie is not a win"
    assert math.exp(LOG_SCALE_START) == pytest.approx(1 / 0.07)


def test_log_exp_does_not_overflow():
    loss, _ = log_exp_loss(torch.tensor([0.0]), torch.tensor([1000.0]))
    assert loss.item() == 1000.0


def test_a_tie_is_best_scored_equal():
    c = torch.tensor([0.4], dtype=torch.float64, requires_grad=True)
    loss, _ = hps_loss(c, torch.tensor([0.4], dtype=torch.float64), preference=torch.tensor([0.5]))
    (gradient,) = torch.autograd.grad(loss.sum(), c)
    assert gradient.item() == pytest.approx(0.0, abs=1e-12)
    equal = torch.zeros(1, requires_grad=True)
    assert torch.autograd.grad(tie_penalty(equal, torch.zeros(1)).sum(), equal)[0].item() == 0


def test_gradients():
    random = torch.Generator().manual_seed(0)
    c, r, m = (torch.randn(3, generator=random, dtype=torch.float64, requires_grad=True) for _ in range(3))
    scale = torch.tensor(LOG_SCALE_START, dtype=torch.float64, requires_grad=True)
    half = torch.tensor([0.2, 1.0, 0.5], dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda a, b: bradley_terry_loss(a, b, m.detach())[0], [c, r])
    assert torch.autograd.gradcheck(lambda a, b: log_exp_loss(a, b)[0], [c, r])
    assert torch.autograd.gradcheck(lambda a, b, s: hps_loss(a, b, half, s)[0], [c, r, scale])
    assert torch.autograd.gradcheck(tie_penalty, [c, r])
    assert torch.autograd.gradcheck(centering_penalty, [c, r])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_scores_are_computed_in_float32(dtype):
    c, r = torch.tensor([30.0, 0.1]).to(dtype), torch.tensor([1.0, 7.0]).to(dtype)
    for loss in (bradley_terry_loss, log_exp_loss, hps_loss):
        got, _ = loss(c, r)
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, loss(c.float(), r.float())[0])


# -- process reward model ------------------------------------------------------------------------------------

TOKENS = torch.tensor([[1, STEP, 3, STEP], [STEP, 5, 5, 5], [0, 0, 0, 0]])
LABELS = torch.tensor([[-100, GOOD, -100, BAD], [GOOD, -100, -100, -100], [-100] * 4])


def prm_logits(seed: int = 0) -> torch.Tensor:
    drawn = torch.randn(3, 4, 7, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return torch.where((TOKENS == STEP)[..., None], drawn, NAN)


def slow_prm(row: list[float], wanted: dict[int, float], candidates: list[int]) -> float:
    total = sum(math.exp(row[token]) for token in candidates)
    return -sum(share * math.log(math.exp(row[token]) / total) for token, share in wanted.items())


@pytest.mark.parametrize("reward_tokens", [None, [GOOD, BAD], [BAD, 0, GOOD]])
def test_hard_step_labels_equal_the_loop(reward_tokens):
    logits = prm_logits()
    loss, metrics = prm_loss(logits, TOKENS, LABELS, STEP, reward_tokens)
    candidates = list(range(7)) if reward_tokens is None else reward_tokens
    for i in range(3):
        for t in range(4):
            if TOKENS[i, t] != STEP:
                assert loss[i, t] == metrics["accuracy"][i, t] == 0
                continue
            row, label = logits[i, t].tolist(), int(LABELS[i, t])
            assert loss[i, t].item() == pytest.approx(slow_prm(row, {label: 1.0}, candidates))
            assert metrics["accuracy"][i, t] == float(max(candidates, key=lambda token: row[token]) == label)


def test_soft_step_labels_equal_the_loop():
    logits = prm_logits()
    shares = torch.where(TOKENS == STEP, torch.tensor([[0.0, 0.25, 0.0, 1.0]]), NAN)
    shares[1, 0] = 0.6
    loss, metrics = prm_loss(logits, TOKENS, shares, STEP, [GOOD, BAD])
    for i, t in (TOKENS == STEP).nonzero().tolist():
        share, row = shares[i, t].item(), logits[i, t].tolist()
        assert loss[i, t].item() == pytest.approx(slow_prm(row, {GOOD: share, BAD: 1 - share}, [GOOD, BAD]))
        assert metrics["accuracy"][i, t] == float((row[GOOD] > row[BAD]) == (share > 0.5))
    hard = torch.where(LABELS == GOOD, 1.0, 0.0)
    same, _ = prm_loss(logits, TOKENS, hard, STEP, [GOOD, BAD])
    torch.testing.assert_close(same, prm_loss(logits, TOKENS, LABELS, STEP, [GOOD, BAD])[0])


@pytest.mark.parametrize("reward_tokens", [None, [GOOD, BAD]])
def test_prm_gradients_do_not_leak(reward_tokens):
    clean = torch.nan_to_num(prm_logits()).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: prm_loss(x, TOKENS, LABELS, STEP, reward_tokens)[0], [clean])
    garbage = prm_logits().requires_grad_()
    (gradient,) = torch.autograd.grad(prm_loss(garbage, TOKENS, LABELS, STEP, reward_tokens)[0].sum(), garbage)
    assert torch.isfinite(gradient).all()
    assert (gradient[TOKENS != STEP] == 0).all()
    assert (gradient[TOKENS == STEP] != 0).any()


def test_a_batch_without_steps_is_zero():
    loss, _ = prm_loss(prm_logits()[2:], TOKENS[2:], LABELS[2:], STEP, [GOOD, BAD])
    assert loss.sum() == 0
    assert torch.isfinite(loss).all()
    assert prm_loss(prm_logits().bfloat16(), TOKENS, LABELS, STEP)[0].dtype == torch.float32


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            lambda: bradley_terry_loss(torch.zeros(2), torch.zeros(3)),
            r"rejected has shape \(3,\); wanted \(2,\)",
        ),
        (lambda: bradley_terry_loss(torch.zeros(0), torch.zeros(0)), "chosen has shape"),
        (lambda: bradley_terry_loss(torch.zeros(2), torch.zeros(2), torch.zeros(3)), "margin has shape"),
        (lambda: hps_loss(torch.zeros(2), torch.zeros(2), torch.tensor([0.5, 1.5])), "preference"),
        (lambda: hps_loss(torch.zeros(2), torch.zeros(2), log_scale=torch.zeros(2)), "log_scale has shape"),
        (lambda: tie_penalty(torch.zeros(2), torch.zeros(3)), "second has shape"),
        (lambda: prm_loss(prm_logits(), TOKENS, LABELS[:2], STEP), "labels has shape"),
        (lambda: prm_loss(prm_logits()[:2], TOKENS, LABELS, STEP), "logits has shape"),
        (lambda: prm_loss(prm_logits(), TOKENS, LABELS, STEP, [GOOD, 0]), rf"labels hold \[{BAD}\]"),
        (lambda: prm_loss(prm_logits(), TOKENS, LABELS + 700, STEP), "labels hold"),
        (lambda: prm_loss(prm_logits(), TOKENS, LABELS, STEP, [GOOD]), "two or more"),
        (lambda: prm_loss(prm_logits(), TOKENS, LABELS, STEP, [GOOD, 99]), "99"),
        (lambda: prm_loss(prm_logits(), TOKENS, LABELS.double(), STEP, [GOOD, BAD]), "outside"),
        (lambda: prm_loss(prm_logits(), TOKENS, LABELS.double(), STEP), "soft"),
        (lambda: prm_loss(prm_logits()[:0], TOKENS[:0], LABELS[:0], STEP), "tokens has shape"),
    ],
)
def test_bad_values_are_refused_by_name(make, said):
    with pytest.raises(ValueError, match=said) as caught:
        make()
    assert isinstance(caught.value, LossError)
