"""Divergences from their definitions; tokens without probability; what must never leak."""

import math

import pytest
import torch

from rlbench.errors import LossError
from rlbench.rl.supervised import DIVERGENCES, distillation_loss, kd_loss

NAN, INF = float("nan"), float("inf")
MASK = torch.tensor([[True, True, False], [True, False, False], [False, False, False]])


def logits(seed: int) -> torch.Tensor:
    drawn = 2 * torch.randn(3, 3, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return torch.where(MASK[..., None], drawn, NAN)


def probabilities(row: torch.Tensor, temperature: float) -> list[float]:
    exps = [math.exp(v / temperature) for v in row.tolist()]
    return [e / sum(exps) for e in exps]


def kl(p: list[float], q: list[float]) -> float:
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a > 0)


def slow(p: list[float], q: list[float], divergence: str, mixture: float = 0.5) -> float:
    """Divergence of student p and teacher q."""
    if divergence == "kd":
        return -sum(b * math.log(a) for a, b in zip(p, q, strict=True) if b > 0)
    if divergence == "forward_kl":
        return kl(q, p)
    if divergence == "reverse_kl":
        return kl(p, q)
    m = [mixture * b + (1 - mixture) * a for a, b in zip(p, q, strict=True)]
    return mixture * kl(q, m) + (1 - mixture) * kl(p, m)


def loss_of(divergence: str, student, teacher, **options):
    if divergence == "kd":
        return kd_loss(student, teacher, MASK, **options)
    return distillation_loss(student, teacher, MASK, divergence, **options)


@pytest.mark.parametrize("divergence", ["kd", *DIVERGENCES])
@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_each_divergence_equals_its_definition(divergence, temperature):
    student, teacher = logits(0), logits(1)
    got = loss_of(divergence, student, teacher, temperature=temperature)
    assert (got[~MASK] == 0).all()
    for i, t in MASK.nonzero().tolist():
        p, q = probabilities(student[i, t], temperature), probabilities(teacher[i, t], temperature)
        assert got[i, t].item() == pytest.approx(slow(p, q, divergence))


def test_an_uneven_mixture():
    student, teacher = logits(0), logits(1)
    got = distillation_loss(student, teacher, MASK, "jsd", mixture=0.1)
    p, q = probabilities(student[0, 0], 1.0), probabilities(teacher[0, 0], 1.0)
    assert got[0, 0].item() == pytest.approx(slow(p, q, "jsd", 0.1))


@pytest.mark.parametrize("divergence", ["kd", *DIVERGENCES])
def test_gradients_reach_the_student_alone_and_never_the_padding(divergence):
    student, teacher = logits(0).requires_grad_(), logits(1).requires_grad_()
    got = torch.autograd.grad(loss_of(divergence, student, teacher).sum(), [student, teacher], allow_unused=True)
    assert got[1] is None
    assert torch.isfinite(got[0]).all()
    assert (got[0][~MASK] == 0).all()
    assert (got[0][MASK] != 0).any()
    clean = torch.where(MASK[..., None], logits(0), 0.0).requires_grad_()
    assert torch.autograd.gradcheck(lambda s: loss_of(divergence, s, logits(1)), [clean])


@pytest.mark.parametrize("divergence", ["kd", *DIVERGENCES])
def test_tokens_that_neither_can_produce_do_not_count(divergence):
    """A vocabulary padded to a round number: the logits of its end are -inf."""
    student, teacher = logits(0), logits(1)
    expected = loss_of(divergence, student, teacher)
    pad = torch.full((3, 3, 2), -INF, dtype=torch.float64)
    padded = torch.cat([student, pad], dim=-1).requires_grad_()
    got = loss_of(divergence, padded, torch.cat([teacher, pad], dim=-1))
    torch.testing.assert_close(got, expected)
    (gradient,) = torch.autograd.grad(got.sum(), padded)
    assert torch.isfinite(gradient).all()


def test_equal_distributions_have_no_divergence_and_kd_is_their_entropy():
    for divergence in DIVERGENCES:
        assert loss_of(divergence, logits(0), logits(0)).abs().max() < 1e-12
    p = probabilities(logits(0)[0, 0], 1.0)
    assert kd_loss(logits(0), logits(0), MASK)[0, 0].item() == pytest.approx(-sum(a * math.log(a) for a in p))


def test_narrow_logits_are_computed_in_float32():
    got = distillation_loss(logits(0).bfloat16(), logits(1).bfloat16(), MASK)
    assert got.dtype == torch.float32
    expected = distillation_loss(logits(0).bfloat16().double(), logits(1).bfloat16().double(), MASK)
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)


def test_refusals():
    student, teacher = logits(0), logits(1)
    with pytest.raises(ValueError, match=r"teacher_logits has shape \(3, 3, 4\); wanted \(3, 3, 5\)"):
        kd_loss(student, teacher[..., :4], MASK)
    with pytest.raises(LossError, match="student_logits has shape"):
        kd_loss(student[:2], teacher, MASK)
    with pytest.raises(LossError, match="nearest: reverse_kl"):
        distillation_loss(student, teacher, MASK, "revers_kl")
    with pytest.raises(LossError, match="jsd"):
        distillation_loss(student, teacher, MASK, "forward_kl", mixture=0.2)
    with pytest.raises(LossError, match="temperature"):
        kd_loss(student, teacher, MASK, temperature=0.0)
