"""Losses of a teacher against TRL's formula, written down by its definition, and against sums over the vocabulary."""

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F

from rlbench import rl
from rlbench.errors import LossError
from rlbench.rl.distillation import with_tail
from rlbench.rl.types import TeacherTokens

S, T, V = 3, 4, 11


def trl_generalized_jsd(student_logits, teacher_logits, mask, beta):
    """`GKDTrainer.generalized_jsd_loss` of TRL, reduction "batchmean", as its source defines it."""
    student = F.log_softmax(student_logits, dim=-1)
    teacher = F.log_softmax(teacher_logits, dim=-1)
    if beta == 0:
        jsd = F.kl_div(student, teacher, reduction="none", log_target=True)
    elif beta == 1:
        jsd = F.kl_div(teacher, student, reduction="none", log_target=True)
    else:
        beta = torch.tensor(beta, dtype=student.dtype)
        mixture = torch.logsumexp(torch.stack([student + torch.log1p(-beta), teacher + torch.log(beta)]), dim=0)
        kl_teacher = F.kl_div(mixture, teacher, reduction="none", log_target=True)
        kl_student = F.kl_div(mixture, student, reduction="none", log_target=True)
        jsd = beta * kl_teacher + (1 - beta) * kl_student
    return jsd[mask].sum() / mask.sum()


def made(k, seed=0, dtype=torch.float32):
    """Inputs whose teacher kept k tokens, and both models' logits (S, T, V), the policy's with gradient."""
    chance = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=chance, dtype=torch.float64).to(dtype)  # noqa: E731
    student, teacher = (2 * draw(S, T, V)).requires_grad_(), 2 * draw(S, T, V)
    mask = torch.rand(S, T, generator=chance) > 0.3
    tokens = torch.randint(V, (S, T, 1), generator=chance)
    own, others = student.log_softmax(-1), teacher.log_softmax(-1)
    top, ids = others.topk(k)
    said = TeacherTokens(others.gather(-1, tokens)[..., 0], ids, top, own.gather(-1, ids))
    zeros = torch.zeros(S, T, dtype=dtype)
    x = rl.LossInputs(
        logprobs=own.gather(-1, tokens)[..., 0],
        old_logprobs=zeros,
        sampler_logprobs=zeros,
        ref_logprobs=None,
        advantages=zeros,
        mask=mask,
        entropy=-(own.exp() * own).sum(-1),
        teacher=said,
    )
    return x, student, teacher


@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("tail", [True, False])
def test_gkd_over_the_whole_vocabulary_is_trls_loss_and_gradient(beta, tail):
    x, student, teacher = made(V)
    per_token, metrics = rl.gkd(beta=beta, tail=tail)(x)
    expected = trl_generalized_jsd(student, teacher, x.mask, beta)
    found = per_token.sum() / x.mask.sum()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    mine, theirs = (torch.autograd.grad(one, student, retain_graph=True)[0] for one in (found, expected))
    torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(metrics["teacher_mass"][x.mask], torch.ones(int(x.mask.sum())))


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_a_part_of_the_vocabulary_counts_the_rest_as_one_token_and_never_says_more(beta):
    x, student, teacher = made(4, dtype=torch.float64)
    per_token, _ = rl.gkd(beta=beta)(x)
    own, others = student.detach().log_softmax(-1), teacher.log_softmax(-1)
    kept = others.topk(4).indices
    parts = []
    for logp in (own, others):
        rest = 1 - logp.exp().gather(-1, kept).sum(-1, keepdim=True)
        parts.append(torch.cat([logp.exp().gather(-1, kept), rest], -1))
    p, q = parts
    m = beta * q + (1 - beta) * p
    kl = lambda a, b: (a * (a / b).log()).sum(-1)  # noqa: E731
    wanted = {0.0: kl(q, p), 1.0: kl(p, q)}.get(beta, beta * kl(q, m) + (1 - beta) * kl(p, m))
    torch.testing.assert_close(per_token.detach()[x.mask], wanted[x.mask], rtol=1e-8, atol=1e-10)
    whole, _ = rl.gkd(beta=beta)(made(V, dtype=torch.float64)[0])
    assert bool((per_token[x.mask] <= whole[x.mask] + 1e-9).all()), "lumping tokens cannot add information"
    assert bool((per_token[~x.mask] == 0).all())


def test_a_distribution_that_the_teachers_tokens_exhaust_has_a_finite_loss_and_gradient():
    logprobs = torch.tensor([[0.0, -40.0], [math.log(0.5), math.log(0.5)], [-1e-9, -30.0]], requires_grad=True)
    found = with_tail(logprobs)
    assert bool(torch.isfinite(found).all()) and bool((found[:, -1].exp() < 2e-6).all())
    (gradient,) = torch.autograd.grad(found[:, -1].sum(), logprobs)
    assert bool(torch.isfinite(gradient).all())


def test_the_sampled_kl_has_the_gradient_of_the_kl_in_expectation():
    """Over all tokens, weighed by the policy, k2's gradient sums to that of KL(policy || teacher)."""
    x, student, teacher = made(V, dtype=torch.float64)
    own = student[0, 0].log_softmax(-1)
    others = teacher[0, 0].log_softmax(-1)
    kl = (own.exp() * (own - others)).sum()
    (expected,) = torch.autograd.grad(kl, student, retain_graph=True)
    whole = {n: torch.zeros(V, 1, dtype=torch.float64) for n in ("old_logprobs", "sampler_logprobs", "advantages")}
    every = dataclasses.replace(
        x,
        logprobs=own[:, None],
        entropy=torch.zeros(V, 1, dtype=torch.float64),
        mask=torch.ones(V, 1, dtype=torch.bool),
        teacher=TeacherTokens(others[:, None]),
        **whole,
    )
    per_token, metrics = rl.sampled_kl()(every)
    (found,) = torch.autograd.grad((own.exp().detach()[:, None] * per_token).sum(), student)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close((own.exp()[:, None] * metrics["teacher_kl"]).sum(), kl)


def test_the_reward_form_has_the_same_gradient_where_the_policy_drew_the_tokens():
    x, student, _ = made(V, dtype=torch.float64)
    loss, _ = rl.sampled_kl()(x)
    (direct,) = torch.autograd.grad(loss.sum(), student, retain_graph=True)
    drawn = dataclasses.replace(x, sampler_logprobs=x.logprobs.detach())
    advantages = rl.on_policy_distillation(clip=None)(
        torch.zeros(S),
        torch.arange(S),
        logprobs=drawn.sampler_logprobs,
        teacher_logprobs=x.teacher.logprobs,
        mask=x.mask,
    )
    reward_form, _ = rl.importance_sampling()(dataclasses.replace(drawn, advantages=advantages))
    (by_reward,) = torch.autograd.grad(reward_form.sum(), student)
    torch.testing.assert_close(direct, by_reward, rtol=1e-5, atol=1e-8)


def test_a_teacher_that_was_not_asked_is_missed_by_name():
    x, _, _ = made(V)
    for loss, teacher, said in (
        (rl.gkd(), None, r"teacher\.score\(batch\)"),
        (rl.sampled_kl(), None, r"teacher\.score\(batch\)"),
        (rl.gkd(), TeacherTokens(x.logprobs.detach()), "top_k=16"),
    ):
        with pytest.raises(LossError, match=said):
            loss(dataclasses.replace(x, teacher=teacher))
    with pytest.raises(LossError, match="beta"):
        rl.gkd(beta=1.5)
    assert rl.resolve("gkd") == rl.gkd() and "gkd" in repr(rl.presets())
