"""Policy losses that single out the few tokens which drive the entropy down: Clip-Cov and KL-Cov (arXiv 2505.22617).

    cov = (A - mean A) (log p - mean log p),   means over the trained tokens of the whole optimizer step, float64

Which tokens are meant is decided once per step, in `plan`, so that it does not depend on how the step was split.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rlbench.errors import LossError
from rlbench.rl.checks import within
from rlbench.rl.clipped import ppo
from rlbench.rl.policy import Metrics, PolicyLoss, masked, ratio_metrics, ratio_of
from rlbench.rl.types import LossInputs


@dataclass(frozen=True, kw_only=True, repr=False)
class clip_cov(ppo):
    """PPO's clip, and no gradient for a few random tokens of high covariance: Clip-Cov (arXiv 2505.22617).

    Of the tokens with low < cov < high that PPO's clip leaves alone, max(1, floor(fraction N)) get loss 0; N is the
    step's trained tokens. Which ones is a hash of `seed`, the position and the sampler's log-probabilities of the
    response.
    """

    paper: ClassVar[str] = "2505.22617"
    fraction: float = within(2e-4, 0.0, 1.0)
    low: float = within(1.0, -math.inf, above=True)
    high: float = within(5.0, -math.inf, above=True)
    seed: int = within(0, -math.inf, whole=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.low < self.high:
            raise LossError(f"{self.name}: low={self.low!r} must be below high={self.high!r}.")

    def surrogate_plan(self, whole: LossInputs) -> dict[str, Tensor]:
        _, metrics = super().surrogate(whole)
        free = torch.as_tensor(metrics["clip_fraction"]) == 0
        cov = covariance(whole)
        eligible = whole.mask & free & (cov > self.low) & (cov < self.high)
        places = _flat(eligible, _priority(whole, self.seed))[: _count(self.fraction, whole.mask)]
        return {f"{self.name}/dropped": _chosen(eligible, places)}

    def surrogate(self, x: LossInputs) -> tuple[Tensor, Metrics]:
        loss, metrics = super().surrogate(x)
        dropped = self.channel(x, "dropped")
        return torch.where(dropped, 0.0, loss), metrics | {"cov_dropped": dropped.float()}


@dataclass(frozen=True, kw_only=True, repr=False)
class kl_cov(PolicyLoss):
    """Unclipped PPO with a KL pull on the tokens of highest covariance: KL-Cov (arXiv 2505.22617).

    L = -A r, plus coef |log new - log old| on the max(1, floor(fraction N)) tokens with the largest covariance.
    """

    paper: ClassVar[str] = "2505.22617"
    fraction: float = within(2e-4, 0.0, 1.0)
    coef: float = within(1.0, 0.0)

    def surrogate_plan(self, whole: LossInputs) -> dict[str, Tensor]:
        places = _flat(whole.mask, _priority(whole, seed=0))
        largest_first = covariance(whole).flatten()[places].argsort(descending=True, stable=True)
        chosen = places[largest_first][: _count(self.fraction, whole.mask)]
        return {f"{self.name}/pulled": _chosen(whole.mask, chosen)}

    def surrogate(self, x: LossInputs) -> tuple[Tensor, Metrics]:
        ratio = ratio_of(x)
        pulled = self.channel(x, "pulled")
        distance = (x.logprobs - x.old_logprobs).abs()
        loss = -x.advantages * ratio + torch.where(pulled, self.coef * distance, 0.0)
        return loss, ratio_metrics(x, ratio) | {"cov_pulled": pulled.float()}


def covariance(x: LossInputs) -> Tensor:
    """Return the covariance of each trained token (S, T) float64; the means are over all of `x`."""
    centred = []
    for values in (x.advantages, x.logprobs):
        wide = masked(values.detach().double(), x.mask)
        centred.append(wide - wide.sum() / x.mask.sum().clamp(min=1))
    return masked(centred[0] * centred[1], x.mask)


def _count(fraction: float, mask: Tensor) -> int:
    """Return floor(fraction of the trained tokens), at least 1 (a fraction of 0 is none)."""
    return max(1, math.floor(fraction * int(mask.sum()) + 1e-9)) if fraction else 0


def _flat(eligible: Tensor, priority: Tensor) -> Tensor:
    """Return the flat places of the eligible tokens, lowest priority number first."""
    places = eligible.flatten().nonzero().squeeze(1)
    return places[priority.flatten()[places].argsort(stable=True)]


def _chosen(like: Tensor, places: Tensor) -> Tensor:
    out = torch.zeros(like.numel(), dtype=torch.bool, device=like.device)
    out[places] = True
    return out.view(like.shape)


def _priority(x: LossInputs, seed: int) -> Tensor:
    """Return a random-looking number below 2^32 per token (S, T), the same wherever its sequence stands."""
    bits = (x.sampler_logprobs.float() + 0.0).contiguous().view(torch.int32).to(torch.int64)  # -0.0 becomes 0.0
    place = torch.arange(bits.shape[1], device=bits.device)
    token = _mixed(bits + _mixed(place + _mixed(torch.tensor(seed, device=bits.device))))
    sequence = torch.where(x.mask, token, 0).sum(1, keepdim=True)
    return _mixed(token + _mixed(sequence))


def _mixed(numbers: Tensor) -> Tensor:
    """Return 32 well-mixed bits of int64 numbers; multiplications stay below 2^63."""
    for _ in range(2):
        numbers = numbers & 0xFFFFFFFF
        numbers = (numbers ^ (numbers >> 16)) * 0x45D9F3B
    numbers = numbers & 0xFFFFFFFF
    return numbers ^ (numbers >> 16)
