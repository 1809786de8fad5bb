"""Log-probability and entropy of sampled tokens, with the gradients of both, from one softmax."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

CHUNK_ELEMENTS = 1 << 24


class _TokenStats(torch.autograd.Function):
    """Keeps one (R, V) float32 matrix between forward and backward, where the plain formulas keep four."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        scaled = logits.float()
        if temperature != 1.0:
            scaled = scaled / temperature
        logp = torch.log_softmax(scaled, dim=-1)
        entropy = torch.empty(len(logp), dtype=torch.float32, device=logp.device)
        for rows in _chunks(logp):
            entropy[rows] = -(logp[rows].exp() * logp[rows]).sum(-1)
        ctx.save_for_backward(logp, targets, entropy)
        ctx.temperature, ctx.dtype = temperature, logits.dtype
        return logp.gather(-1, targets), entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        by_logprob, by_entropy = grads
        logp, targets, entropy = ctx.saved_tensors
        gradient = torch.empty(logp.shape, dtype=ctx.dtype, device=logp.device)
        for rows in _chunks(logp):
            p = logp[rows].exp()
            # d log p_y / dz = onehot(y) - p;  dH / dz = -p (log p + H)
            summed = by_logprob[rows].sum(-1, keepdim=True)
            slope = (logp[rows] + entropy[rows, None]).mul_(by_entropy[rows, None]).add_(summed)
            part = p.mul_(slope).neg_()
            part.scatter_add_(-1, targets[rows], by_logprob[rows])
            gradient[rows] = part.div_(ctx.temperature)
        return gradient, None, None


def token_stats(logits: Tensor, targets: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return log-probability of each target and entropy (R,) of each distribution, float32, differentiable.

    `targets`: (R,), or (R, C), several tokens of each row; log-probs have their shape. `logits` (R, V) of any float
    dtype are divided by `temperature`, the sampler's, in float32.
    """
    chosen = targets.view(len(targets), -1) if len(targets) else targets.view(0, 1)
    logprobs, entropy = _TokenStats.apply(logits, chosen, temperature)
    return logprobs.view(targets.shape), entropy


def _chunks(matrix: Tensor) -> list[slice]:
    step = max(1, CHUNK_ELEMENTS // max(1, matrix.shape[-1]))
    return [slice(start, start + step) for start in range(0, matrix.shape[0], step)]
