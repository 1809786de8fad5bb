"""Learning from a teacher's full distributions: a divergence per token, not aggregated.

For log-probabilities of the sampled tokens alone, use the teacher as reference in a policy loss, or the advantage
made of teacher and student log-probabilities.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import log_softmax

from rlbench.errors import LossError
from rlbench.rl.reward_checks import check_choice, check_mask, check_number, check_shape, output_dtype

DIVERGENCES = ("forward_kl", "reverse_kl", "jsd")


def kd_loss(student_logits: Tensor, teacher_logits: Tensor, mask: Tensor, temperature: float = 1.0) -> Tensor:
    """Cross-entropy of the student under the teacher's distribution, per token (arXiv 1503.02531), (S, T).

    L = -sum_v p_teacher(v) log p_student(v) = KL(teacher || student) + entropy of the teacher, on logits (S, T, V)
    divided by `temperature`. The teacher gets no gradient. The KD loss of MiniLLM (arXiv 2306.08543) and of earlier
    versions of OpenRLHF; no factor temperature² is applied.
    """
    student, teacher = _log_distributions(student_logits, teacher_logits, mask, temperature)
    return _placed(-_expected(teacher, student), mask)


def distillation_loss(
    student_logits: Tensor,
    teacher_logits: Tensor,
    mask: Tensor,
    divergence: str = "reverse_kl",
    mixture: float = 0.5,
    temperature: float = 1.0,
) -> Tensor:
    """Divergence between the student's and the teacher's distribution at each token, (S, T) nats.

    On the student's own samples this is on-policy distillation (GKD, arXiv 2306.13649; MiniLLM, arXiv 2306.08543).
    Logits are (S, T, V), divided by `temperature`; a token at -inf has no probability.

    * `forward_kl`: KL(teacher || student), which covers all the teacher does.
    * `reverse_kl`: KL(student || teacher), which seeks what the teacher does most; infinite where the student can
      produce a token that the teacher holds at -inf.
    * `jsd`: b KL(teacher || m) + (1 - b) KL(student || m) with m = b teacher + (1 - b) student, b = `mixture`.
    """
    check_choice("distillation_loss", "divergence", divergence, DIVERGENCES)
    if not 0 < mixture < 1 or (divergence != "jsd" and mixture != 0.5):
        raise LossError(
            f"distillation_loss: mixture={mixture!r} must lie in (0, 1), and acts with divergence='jsd' alone; the "
            f"divergence is {divergence!r}."
        )
    student, teacher = _log_distributions(student_logits, teacher_logits, mask, temperature)
    if divergence == "forward_kl":
        return _placed(_kl(teacher, student), mask)
    if divergence == "reverse_kl":
        return _placed(_kl(student, teacher), mask)
    mixed = _mixed(teacher, student, mixture)
    return _placed(mixture * _kl(teacher, mixed) + (1 - mixture) * _kl(student, mixed), mask)


def _log_distributions(student: Tensor, teacher: Tensor, mask: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Return both log-distributions of the trained tokens alone, (trained, V); the teacher's without gradient."""
    check_mask(mask)
    if student.dim() != 3 or student.shape[:2] != mask.shape:
        raise LossError(f"student_logits has shape {tuple(student.shape)}; wanted {(*mask.shape, 'V')}.")
    check_shape("teacher_logits", teacher, tuple(student.shape))
    check_number("distillation", "temperature", temperature, 0.0, above=True)
    wide = output_dtype(student)
    return (
        log_softmax(student[mask].to(wide) / temperature, dim=-1),
        log_softmax(teacher.detach()[mask].to(wide) / temperature, dim=-1),
    )


def _kl(p: Tensor, q: Tensor) -> Tensor:
    return _expected(p, p) - _expected(p, q)


def _mixed(teacher: Tensor, student: Tensor, share: float) -> Tensor:
    """Return the log of the mixture; what neither can produce is kept out of logaddexp, whose gradient is NaN there."""
    never = (teacher == -math.inf) & (student == -math.inf)
    alive_teacher, alive_student = torch.where(never, 0.0, teacher), torch.where(never, 0.0, student)
    mixed = torch.logaddexp(alive_teacher + math.log(share), alive_student + math.log1p(-share))
    return torch.where(never, -math.inf, mixed)


def _expected(p: Tensor, values: Tensor) -> Tensor:
    """Return sum_v exp(p) values over the tokens that p can produce: 0 times -inf is 0 there."""
    return (p.exp() * torch.where(p > -math.inf, values, 0.0)).sum(dim=-1)


def _placed(losses: Tensor, mask: Tensor) -> Tensor:
    return torch.zeros(mask.shape, dtype=losses.dtype, device=losses.device).masked_scatter(mask, losses)
