"""What a critic is trained on, and the pretraining loss that may run beside a policy loss.

Losses are per token and not aggregated: `rlbench.rl.aggregate` does that, over the whole optimizer step, and the
caller multiplies by its coefficient.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from rlbench.errors import LossError
from rlbench.rl.policy import Metrics, masked
from rlbench.rl.reward_checks import check_mask, check_number, check_shape, output_dtype


def value_loss(
    values: Tensor, returns: Tensor, mask: Tensor, old_values: Tensor | None = None, clip: float | None = None
) -> tuple[Tensor, Metrics]:
    """Squared error of the critic per token, clipped like PPO's ratio where `clip` is given, (S, T).

    L = 1/2 max((V - R)², (V_clipped - R)²) with V_clipped = V_old + clamp(V - V_old, -clip, clip); without `clip` L =
    1/2 (V - R)². PPO's public implementation (arXiv 1707.06347; described in arXiv 2005.12729). verl, OpenRLHF and
    AReaL clip at 0.5, SkyRL at 0.2. `old_values` are those when the batch was collected. The metric
    `value_clip_fraction` is 1 for the tokens whose clipped error was the larger one.
    """
    check_mask(mask)
    shape = tuple(mask.shape)
    check_shape("values", values, shape)
    check_shape("returns", returns, shape)
    value = masked(values.to(output_dtype(values)), mask)
    target = masked(returns.detach().to(value.dtype), mask)
    loss = 0.5 * (value - target) ** 2
    clipped_more = torch.zeros_like(loss)
    if clip is not None:
        check_number("value_loss", "clip", clip, 0.0, above=True)
        if old_values is None:
            raise LossError(f"value_loss: clip={clip!r} needs old_values, of shape {shape}; none were given.")
        check_shape("old_values", old_values, shape)
        old = masked(old_values.detach().to(value.dtype), mask)
        clipped = 0.5 * (old + (value - old).clamp(-clip, clip) - target) ** 2
        # inside the bound both are the same number but for rounding: take the plain one there
        worse = (clipped > loss) & ((value - old).abs() > clip)
        loss = torch.where(worse, clipped, loss)
        clipped_more = worse.to(loss.dtype)
    return loss, {"value_clip_fraction": clipped_more}


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> float:
    """Share of the returns' variance that the critic explains: 1 - Var(R - V) / Var(R).

    1 for a perfect critic, 0 for a constant one, negative for one that is worse than a constant. 0 where the returns do
    not vary. Computed in float64 over the trained tokens.
    """
    check_mask(mask)
    check_shape("values", values, tuple(mask.shape))
    check_shape("returns", returns, tuple(mask.shape))
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

    L[:, t] = -log softmax(logits[:, t])[tokens[:, t + 1]], (S, T - 1): one column less than the input. Aggregate it
    with `mask[:, 1:]`, and multiply by the coefficient there. `logits` (S, T, V), `tokens` (S, T) int64.
    """
    check_mask(mask)
    check_shape("tokens", tokens, tuple(mask.shape))
    if logits.dim() != 3 or logits.shape[:2] != mask.shape:
        raise LossError(f"logits has shape {tuple(logits.shape)}; wanted {(*mask.shape, 'V')}.")
    predicted = mask[:, 1:]
    kept = logits[:, :-1][predicted]
    losses = cross_entropy(kept.to(output_dtype(logits)), tokens[:, 1:][predicted], reduction="none")
    return torch.zeros(predicted.shape, dtype=losses.dtype, device=losses.device).masked_scatter(predicted, losses)
