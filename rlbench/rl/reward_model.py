"""What reward models are trained on: pairs of scores, or labels of steps.

Pairwise losses take scores (B,) of the chosen and the rejected response and return one loss per pair (B,), not
averaged, with the (B,) metrics `margin` (chosen - rejected) and `accuracy`. The process reward model's loss is per
token, to be averaged over the labelled ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, log_softmax, logsigmoid

from rlbench.errors import LossError
from rlbench.rl.policy import Metrics
from rlbench.rl.reward_checks import check_shape, output_dtype, wide_rows

LOG_SCALE_START = math.log(1 / 0.07)
"""Where a learned log-scale of scores begins: CLIP's (arXiv 2103.00020), kept by HPS v2."""


def bradley_terry_loss(
    chosen: Tensor, rejected: Tensor, margin: Tensor | float | None = None
) -> tuple[Tensor, Metrics]:
    """Negative log-likelihood of the preference: L = -log sigmoid(chosen - rejected - margin).

    Bradley and Terry, 1952; for language models arXiv 2009.01325 and 2203.02155, the margin, a number or (B,), arXiv
    2307.09288.
    """
    c, r = wide_rows(chosen=chosen, rejected=rejected)
    wanted = torch.as_tensor(0.0 if margin is None else margin, dtype=c.dtype, device=c.device)
    if wanted.dim() != 0:
        check_shape("margin", wanted, tuple(c.shape))
    return -logsigmoid(c - r - wanted), _metrics(c, r)


def log_exp_loss(chosen: Tensor, rejected: Tensor) -> tuple[Tensor, Metrics]:
    """Log-exp loss, L = log(1 + exp(rejected - chosen)) (arXiv 2204.05862).

    The number of `bradley_terry_loss` without a margin: the formula as it stands overflows in float32 beyond 88.
    """
    c, r = wide_rows(chosen=chosen, rejected=rejected)
    return -logsigmoid(c - r), _metrics(c, r)


def hps_loss(
    chosen: Tensor, rejected: Tensor, preference: Tensor | None = None, log_scale: Tensor | float = 0.0
) -> tuple[Tensor, Metrics]:
    """Cross-entropy over the two scaled scores (HPS v2, arXiv 2306.09341).

    L = -q log p - (1 - q) log(1 - p) with p = softmax(exp(log_scale) * [chosen, rejected])[0]. With q = 1 and log_scale
    = 0 it equals `bradley_terry_loss` without a margin. `preference` (B,) is q, the share of raters who preferred the
    chosen one (0.5 for a tie), None: all; `log_scale` a number, or a learned scalar that begins at `LOG_SCALE_START`.
    """
    c, r = wide_rows(chosen=chosen, rejected=rejected)
    scale = torch.as_tensor(log_scale, dtype=c.dtype, device=c.device)
    if scale.dim() != 0:
        raise LossError(f"log_scale has shape {tuple(scale.shape)}; wanted a scalar.")
    logps = log_softmax(torch.stack([c, r], dim=1) * scale.exp(), dim=1)
    if preference is None:
        return -logps[:, 0], _metrics(c, r)
    check_shape("preference", preference, tuple(c.shape))
    q = preference.to(c.dtype)
    if not bool(((q >= 0) & (q <= 1)).all()):
        raise LossError("preference holds values outside [0, 1]; wanted the share of raters who chose the first.")
    return -(q * logps[:, 0] + (1 - q) * logps[:, 1]), _metrics(c, r)


def tie_penalty(first: Tensor, second: Tensor) -> Tensor:
    """Distance of the scores of two responses rated equal, |first - second| per pair (B,).

    LightRFT's scalar reward model adds 0.01 times its mean. The gradient at equality is 0.
    """
    a, b = wide_rows(first=first, second=second)
    return (a - b).abs()


def centering_penalty(chosen: Tensor, rejected: Tensor) -> Tensor:
    """Penalty that keeps scores around 0, (chosen + rejected)² per pair (B,) (arXiv 2312.09244).

    A preference fixes differences of scores alone; TRL recommends to add 0.01 times its mean.
    """
    c, r = wide_rows(chosen=chosen, rejected=rejected)
    return (c + r) ** 2


def prm_loss(
    logits: Tensor,
    tokens: Tensor,
    labels: Tensor,
    placeholder: int,
    reward_tokens: Sequence[int] | None = None,
) -> tuple[Tensor, Metrics]:
    """Cross-entropy at the end of each step of a process reward model (arXiv 2305.20050, 2312.08935).

    A placeholder token stands at the end of each step; there the model's next-token distribution, over `reward_tokens`
    or the whole vocabulary, is trained on the step's label.

    Args:
        logits: (S, T, V) of the model at each token.
        tokens: (S, T) int64, the input; the loss looks where it equals `placeholder`.
        labels: (S, T), read there alone: int64 token ids; or floats in [0, 1], the probability of the first of
            two `reward_tokens`.
        reward_tokens: ids of the tokens that stand for labels, the good one first; None for the whole vocabulary.

    Returns:
        (S, T) loss, 0 but at the placeholders: average it with the mask `tokens == placeholder`. And the metric
        `accuracy` (S, T): 1 where the likeliest token is the label (a soft label above 0.5 means the first).
    """
    if tokens.dim() != 2 or tokens.numel() == 0:
        raise LossError(f"tokens has shape {tuple(tokens.shape)}; wanted (S, T), at least one token.")
    check_shape("labels", labels, tuple(tokens.shape))
    if logits.dim() != 3 or logits.shape[:2] != tokens.shape:
        raise LossError(f"logits has shape {tuple(logits.shape)}; wanted {(*tokens.shape, 'V')}.")
    steps = tokens == placeholder
    scores = logits[steps].to(output_dtype(logits))
    if reward_tokens is not None:
        scores = scores[:, _candidates(reward_tokens, logits.shape[2])]
    target = _target(labels[steps], reward_tokens, logits.shape[2], scores.dtype)
    losses = cross_entropy(scores, target, reduction="none")
    wanted = target.argmax(dim=1) if target.is_floating_point() else target
    right = (scores.argmax(dim=1) == wanted).to(losses.dtype)
    empty = torch.zeros(steps.shape, dtype=losses.dtype, device=losses.device)
    return empty.masked_scatter(steps, losses), {"accuracy": empty.masked_scatter(steps, right)}


# -- what they share -----------------------------------------------------------------------------------------


def _candidates(reward_tokens: Sequence[int], vocabulary: int) -> list[int]:
    """Return the token ids that stand for labels; refuse fewer than two, repeated ones and unknown ones."""
    candidates = list(reward_tokens)
    known = all(0 <= token < vocabulary for token in candidates)
    if len(candidates) < 2 or len(set(candidates)) != len(candidates) or not known:
        raise LossError(f"reward_tokens={candidates} must be two or more different token ids in [0, {vocabulary}).")
    return candidates


def _target(labels: Tensor, reward_tokens: Sequence[int] | None, vocabulary: int, dtype: torch.dtype) -> Tensor:
    """Return the wanted class of each step, (steps,) int64, or with soft labels its probabilities, (steps, 2)."""
    if labels.is_floating_point():
        if reward_tokens is None or len(reward_tokens) != 2:
            raise LossError(
                f"labels are soft ({labels.dtype}): they need two reward_tokens, good and bad; seen {reward_tokens}."
            )
        if not bool(((labels >= 0) & (labels <= 1)).all()):
            raise LossError("labels hold values outside [0, 1] at placeholder tokens; wanted probabilities.")
        good = labels.to(dtype)
        return torch.stack([good, 1 - good], dim=1)
    if reward_tokens is None:
        known, classes = (labels >= 0) & (labels < vocabulary), labels
    else:
        matches = labels[:, None] == torch.tensor(list(reward_tokens), device=labels.device)
        known, classes = matches.any(dim=1), matches.int().argmax(dim=1)
    if not bool(known.all()):
        wanted = "ids in the vocabulary" if reward_tokens is None else f"one of reward_tokens {list(reward_tokens)}"
        raise LossError(
            f"labels hold {sorted(set(labels[~known].tolist()))[:5]} at placeholder tokens; wanted {wanted}."
        )
    return classes.long()


def _metrics(chosen: Tensor, rejected: Tensor) -> Metrics:
    margin = (chosen - rejected).detach()
    return {"margin": margin, "accuracy": (margin > 0).to(margin.dtype)}
