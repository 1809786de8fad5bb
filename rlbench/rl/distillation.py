"""Losses of a teacher: `train_step(teacher.score(batch), loss=rb.rl.sampled_kl())`, `loss=rb.rl.gkd(beta=0.5)`.

They need no reward and no advantage. Which tokens they see says what is minimised: on the policy's own samples this is
on-policy distillation, on a teacher's or a data set's answers the usual one; GKD draws at each step which it is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rlbench.errors import LossError
from rlbench.rl.checks import one_of, placed, within
from rlbench.rl.kl import ESTIMATORS
from rlbench.rl.policy import Metrics, PolicyLoss
from rlbench.rl.supervised import generalized_jsd
from rlbench.rl.types import LossInputs, TeacherTokens

TAIL_FLOOR = 1e-6
"""The least probability that the tokens outside of the teacher's have together: float32 knows 1 - sum no better."""


@dataclass(frozen=True, kw_only=True, repr=False)
class DistillationLoss(PolicyLoss):
    """Base of the losses of a teacher."""

    needs: ClassVar[tuple[str, ...]] = ("teacher",)

    def teacher(self, x: LossInputs) -> TeacherTokens:
        """Return what the teacher said; LossError where nobody asked it."""
        if x.teacher is None:
            raise LossError(f"{self} needs a teacher's log-probs, and the batch has none: teacher.score(batch).")
        return x.teacher


@dataclass(frozen=True, kw_only=True, repr=False)
class sampled_kl(DistillationLoss):
    """KL(policy || teacher), estimated from the sampled tokens alone: on-policy distillation (MiniLLM, 2306.08543).

    L = 1/2 (log p - log q)^2 ("k2"), whose gradient (log p - log q) grad log p is that of the KL where the policy drew
    the tokens; other estimators as in `rb.rl.kl_estimator`. The same as a reward, as Thinking Machines' recipe has it:
    `batch(advantage=rb.rl.on_policy_distillation())` with `importance_sampling`, which also holds off policy.
    `teacher_kl`: the mean of log p - log q.
    """

    paper: ClassVar[str] = "2306.08543"
    estimator: str = one_of("k2", ESTIMATORS)

    def surrogate(self, x: LossInputs) -> tuple[Tensor, Metrics]:
        of_teacher = torch.where(x.mask, self.teacher(x).logprobs.to(x.logprobs.dtype), 0.0)
        gap = x.logprobs.detach() - of_teacher
        return ESTIMATORS[self.estimator](x.logprobs, of_teacher), {"teacher_kl": gap}


@dataclass(frozen=True, kw_only=True, repr=False)
class gkd(DistillationLoss):
    """Generalised JSD of policy and teacher at each token, over the teacher's likeliest tokens: GKD (2306.13649).

    L = beta KL(q || m) + (1 - beta) KL(p || m), m = beta q + (1 - beta) p, of policy p and teacher q; beta = 0:
    KL(q || p), 1: KL(p || q). Of the K tokens that `teacher.score(batch, top_k=K)` kept; `tail`: all others count as
    one more token (exact where K is the vocabulary, a lower bound below), else they are left out. `teacher_mass`: the
    teacher's probability of the K tokens, `teacher_kl` as of `sampled_kl`.
    """

    paper: ClassVar[str] = "2306.13649"
    beta: float = within(0.5, 0.0, 1.0)
    tail: bool = True

    def surrogate(self, x: LossInputs) -> tuple[Tensor, Metrics]:
        found = self.teacher(x)
        if found.top_logprobs is None or found.policy_logprobs is None:
            raise LossError(f"{self} needs the teacher's likeliest tokens, not the sampled one alone: score(top_k=16).")
        teacher, student = found.top_logprobs[x.mask], found.policy_logprobs[x.mask]
        mass = teacher.exp().sum(-1)
        if self.tail:
            teacher, student = with_tail(teacher), with_tail(student)
        gap = torch.where(x.mask, x.logprobs.detach() - found.logprobs, 0.0)
        metrics: Metrics = {"teacher_kl": gap, "teacher_mass": placed(mass.to(gap.dtype), x.mask)}
        return placed(generalized_jsd(student, teacher.to(student.dtype), self.beta), x.mask), metrics


def with_tail(logprobs: Tensor) -> Tensor:
    """Put the log-probability of all other tokens, at least `TAIL_FLOOR`, behind those of K tokens; (n, K + 1)."""
    log_mass = logprobs.logsumexp(-1)
    is_rest = log_mass < math.log1p(-TAIL_FLOOR)
    rest = torch.log(-torch.expm1(torch.where(is_rest, log_mass, -1.0)))  # finite also where it is not taken
    return torch.cat([logprobs, torch.where(is_rest, rest, math.log(TAIL_FLOOR))[:, None]], dim=-1)
