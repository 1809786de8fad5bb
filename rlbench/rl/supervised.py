"""What critics, students of a teacher, and reward models are trained on; not aggregated.

Losses per token (S, T) go through `rlbench.rl.aggregate`, multiplied by their coefficient. A teacher's logits (S, T, V)
get no gradient. Pairwise losses take scores (B,) of the chosen and the rejected response and return one loss per pair,
with the (B,) metrics `margin` (chosen - rejected) and `accuracy`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, log_softmax, logsigmoid

from rlbench.errors import LossError
from rlbench.rl import checks
from rlbench.rl.checks import output_dtype, placed, wide_rows
from rlbench.rl.policy import Metrics, masked

DIVERGENCES = ("forward_kl", "reverse_kl", "jsd")
LOG_SCALE_START = math.log(1 / 0.07)
"""Where a learned log-scale of scores begins: CLIP's (arXiv 2103.00020), kept by HPS v2."""


def value_loss(
    values: Tensor, returns: Tensor, mask: Tensor, old_values: Tensor | None = None, clip: float | None = None
) -> tuple[Tensor, Metrics]:
    """Squared error of the critic per token, clipped like PPO's ratio where `clip` is given, (S, T).

    L = 1/2 max((V - R)², (V_old + clamp(V - V_old, -clip, clip) - R)²), or 1/2 (V - R)² (PPO's code, arXiv 1707.06347;
    arXiv 2005.12729). The metric `value_clip_fraction` is 1 where the clipped error was the larger one.
    """
    checks.mask(mask)
    shape = tuple(mask.shape)
    checks.shape("values", values, shape)
    checks.shape("returns", returns, shape)
    value = masked(values.to(output_dtype(values)), mask)
    target = masked(returns.detach().to(value.dtype), mask)
    loss = 0.5 * (value - target) ** 2
    clipped_more = torch.zeros_like(loss)
    if clip is not None:
        checks.number("value_loss", "clip", clip, 0.0, above=True)
        if old_values is None:
            raise LossError(f"value_loss: clip={clip!r} needs old_values {shape}, those of when it was collected.")
        checks.shape("old_values", old_values, shape)
        old = masked(old_values.detach().to(value.dtype), mask)
        clipped = 0.5 * (old + (value - old).clamp(-clip, clip) - target) ** 2
        # inside the bound both are the same number but for rounding: take the plain one there
        worse = (clipped > loss) & ((value - old).abs() > clip)
        loss = torch.where(worse, clipped, loss)
        clipped_more = worse.to(loss.dtype)
    return loss, {"value_clip_fraction": clipped_more}


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> float:
    """Share of the returns' variance that the critic explains: 1 - Var(R - V) / Var(R); 0 where R does not vary."""
    checks.mask(mask)
    checks.shape("values", values, tuple(mask.shape))
    checks.shape("returns", returns, tuple(mask.shape))
    target = returns.detach()[mask].double()
    error = target - values.detach()[mask].double()
    if target.numel() == 0:
        return 0.0
    variance = target.var(correction=0)
    # of equal returns, rounding may leave a variance of about 1e-32 of their square
    if variance <= 1e-24 * target.square().mean():
        return 0.0
    return float(1.0 - error.var(correction=0) / variance)


def ptx_loss(logits: Tensor, tokens: Tensor, mask: Tensor) -> Tensor:
    """Next-token cross-entropy on pretraining text, per predicted token (InstructGPT's PPO-ptx, arXiv 2203.02155).

    L[:, t] = -log softmax(logits[:, t])[tokens[:, t + 1]], (S, T - 1), to be aggregated with `mask[:, 1:]`.
    """
    checks.mask(mask)
    checks.shape("tokens", tokens, tuple(mask.shape))
    checks.logits("logits", logits, mask)
    predicted = mask[:, 1:]
    kept = logits[:, :-1][predicted]
    return placed(cross_entropy(kept.to(output_dtype(logits)), tokens[:, 1:][predicted], reduction="none"), predicted)


# -- a teacher's distributions


def kd_loss(student_logits: Tensor, teacher_logits: Tensor, mask: Tensor, temperature: float = 1.0) -> Tensor:
    """Cross-entropy of the student under the teacher's distribution, per token (arXiv 1503.02531), (S, T).

    L = -sum_v p_teacher(v) log p_student(v) (MiniLLM, arXiv 2306.08543); no factor temperature² is applied.
    """
    student, teacher = _log_distributions(student_logits, teacher_logits, mask, temperature)
    return placed(-_expected(teacher, student), mask)


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

    * `forward_kl`: KL(teacher || student); `reverse_kl`: KL(student || teacher), infinite where the teacher holds -inf.
    * `jsd`: b KL(teacher || m) + (1 - b) KL(student || m) with m = b teacher + (1 - b) student, b = `mixture`.
    """
    checks.choice("distillation_loss", "divergence", divergence, DIVERGENCES)
    if not 0 < mixture < 1 or (divergence != "jsd" and mixture != 0.5):
        raise LossError(f"distillation_loss: mixture={mixture!r} must lie in (0, 1), and acts with 'jsd' alone.")
    student, teacher = _log_distributions(student_logits, teacher_logits, mask, temperature)
    beta = {"forward_kl": 0.0, "reverse_kl": 1.0}.get(divergence, mixture)
    return placed(generalized_jsd(student, teacher, beta), mask)


def generalized_jsd(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """Divergence of two log-distributions (…, V), in nats, (…): GKD's generalised JSD (arXiv 2306.13649).

    beta KL(teacher || m) + (1 - beta) KL(student || m) with m = beta teacher + (1 - beta) student; at its ends, where
    that is 0, KL(teacher || student) for beta = 0 and KL(student || teacher) for beta = 1.
    """
    if beta == 0:
        return _kl(teacher, student)
    if beta == 1:
        return _kl(student, teacher)
    mixed = _mixed(teacher, student, beta)
    return beta * _kl(teacher, mixed) + (1 - beta) * _kl(student, mixed)


def _log_distributions(student: Tensor, teacher: Tensor, mask: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Return both log-distributions of the trained tokens alone, (trained, V); the teacher's without gradient."""
    checks.mask(mask)
    checks.logits("student_logits", student, mask)
    checks.shape("teacher_logits", teacher, tuple(student.shape))
    checks.number("distillation", "temperature", temperature, 0.0, above=True)
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


# -- scores of reward models


def bradley_terry_loss(
    chosen: Tensor, rejected: Tensor, margin: Tensor | float | None = None
) -> tuple[Tensor, Metrics]:
    """Negative log-likelihood of the preference: L = -log sigmoid(chosen - rejected - margin).

    Bradley and Terry, 1952; arXiv 2009.01325, 2203.02155; the margin, a number or (B,), arXiv 2307.09288.
    """
    c, r = wide_rows(chosen=chosen, rejected=rejected)
    wanted = torch.as_tensor(0.0 if margin is None else margin, dtype=c.dtype, device=c.device)
    if wanted.dim() != 0:
        checks.shape("margin", wanted, tuple(c.shape))
    return -logsigmoid(c - r - wanted), _score_metrics(c, r)


def log_exp_loss(chosen: Tensor, rejected: Tensor) -> tuple[Tensor, Metrics]:
    """Log-exp loss, L = log(1 + exp(rejected - chosen)) (arXiv 2204.05862): `bradley_terry_loss` without a margin."""
    return bradley_terry_loss(chosen, rejected)


def hps_loss(
    chosen: Tensor, rejected: Tensor, preference: Tensor | None = None, log_scale: Tensor | float = 0.0
) -> tuple[Tensor, Metrics]:
    """Cross-entropy over the two scaled scores (HPS v2, arXiv 2306.09341).

    L = -q log p - (1 - q) log(1 - p) with p = softmax(exp(log_scale) * [chosen, rejected])[0]; q = `preference` (B,),
    the share of raters who preferred the chosen one; a learned `log_scale` begins at `LOG_SCALE_START`.
    """
    c, r = wide_rows(chosen=chosen, rejected=rejected)
    scale = torch.as_tensor(log_scale, dtype=c.dtype, device=c.device)
    checks.shape("log_scale", scale, ())
    logps = log_softmax(torch.stack([c, r], dim=1) * scale.exp(), dim=1)
    if preference is None:
        return -logps[:, 0], _score_metrics(c, r)
    checks.shape("preference", preference, tuple(c.shape))
    _check_probabilities("preference", preference)
    q = preference.to(c.dtype)
    return -(q * logps[:, 0] + (1 - q) * logps[:, 1]), _score_metrics(c, r)


def tie_penalty(first: Tensor, second: Tensor) -> Tensor:
    """Return |first - second| per pair (B,), of responses rated equal (LightRFT adds 0.01 times its mean)."""
    a, b = wide_rows(first=first, second=second)
    return (a - b).abs()


def centering_penalty(chosen: Tensor, rejected: Tensor) -> Tensor:
    """Return (chosen + rejected)², which keeps scores around 0 (arXiv 2312.09244; TRL adds 0.01 times its mean)."""
    c, r = wide_rows(chosen=chosen, rejected=rejected)
    return (c + r) ** 2


def prm_loss(
    logits: Tensor, tokens: Tensor, labels: Tensor, placeholder: int, reward_tokens: Sequence[int] | None = None
) -> tuple[Tensor, Metrics]:
    """Cross-entropy at the end of each step of a process reward model (arXiv 2305.20050, 2312.08935), and `accuracy`.

    Where `tokens` (S, T) equals `placeholder`, the next-token distribution of `logits` (S, T, V), over
    `reward_tokens` (the good one first) or the whole vocabulary, is trained on the label in `labels` (S, T): int64
    token ids; or floats in [0, 1], the probability of the first of two `reward_tokens`. (S, T), 0 but at the
    placeholders.
    """
    if tokens.dim() != 2 or tokens.numel() == 0:
        raise LossError(f"tokens has shape {tuple(tokens.shape)}; wanted (S, T), at least one token.")
    checks.shape("labels", labels, tuple(tokens.shape))
    checks.logits("logits", logits, tokens)
    vocabulary, steps = range(logits.shape[2]), tokens == placeholder
    scores = logits[steps].to(output_dtype(logits))
    classes: Sequence[int] = vocabulary
    if reward_tokens is not None:
        classes = list(reward_tokens)
        if not 2 <= len(set(classes)) == len(classes) or not set(classes) <= set(vocabulary):
            raise LossError(f"reward_tokens={classes} must be two or more different ids in {vocabulary}.")
        scores = scores[:, classes]
    target = _target(labels[steps], classes, scores.dtype)
    losses = cross_entropy(scores, target, reduction="none")
    wanted = target.argmax(dim=1) if target.is_floating_point() else target
    right = (scores.argmax(dim=1) == wanted).to(losses.dtype)
    return placed(losses, steps), {"accuracy": placed(right, steps)}


def _target(labels: Tensor, classes: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return the wanted class of each step, (steps,) int64, or with soft labels its probabilities, (steps, 2)."""
    if labels.is_floating_point():
        if len(classes) != 2:
            raise LossError(f"labels are soft ({labels.dtype}): they need two reward_tokens, good and bad.")
        _check_probabilities("labels", labels)
        good = labels.to(dtype)
        return torch.stack([good, 1 - good], dim=1)
    if isinstance(classes, range):
        known, target = (labels >= 0) & (labels < len(classes)), labels
    else:
        matches = labels[:, None] == torch.tensor(list(classes), device=labels.device)
        known, target = matches.any(dim=1), matches.int().argmax(dim=1)
    if not bool(known.all()):
        seen = sorted(set(labels[~known].tolist()))[:5]
        raise LossError(f"labels hold {seen} at placeholder tokens; wanted ids in {classes}.")
    return target.long()


def _check_probabilities(name: str, values: Tensor) -> None:
    if not bool(((values >= 0) & (values <= 1)).all()):
        raise LossError(f"{name} holds values outside [0, 1]; wanted probabilities.")


def _score_metrics(chosen: Tensor, rejected: Tensor) -> Metrics:
    margin = (chosen - rejected).detach()
    return {"margin": margin, "accuracy": (margin > 0).to(margin.dtype)}
