"""Numbers of a step, summed over micro-batches and ranks with the right weights."""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rlbench.errors import LossError
from rlbench.rl import LossInputs, MismatchMoments, k3


@dataclass
class MetricSums:
    """`sums[name] / weights[name]` is a mean; `totals` are sums; `peaks` maxima; `mismatch` of sampler and trainer."""

    sums: dict[str, float] = field(default_factory=dict)
    weights: dict[str, float] = field(default_factory=dict)
    totals: dict[str, float] = field(default_factory=dict)
    peaks: dict[str, float] = field(default_factory=dict)
    mismatch: MismatchMoments = field(default_factory=MismatchMoments)

    def mean(self, name: str, value: float, weight: float) -> None:
        """Add `value` (already a sum over `weight` tokens) to the mean `name`."""
        self.sums[name] = self.sums.get(name, 0.0) + value
        self.weights[name] = self.weights.get(name, 0.0) + weight

    def scale(self, factor: float) -> None:
        """Scale the loss, as the gradients were that it belongs to."""
        if "loss" in self.totals:
            self.totals["loss"] *= factor

    @classmethod
    def joined(cls, parts: Iterable[MetricSums]) -> MetricSums:
        """Add up what several micro-batches or ranks counted."""
        whole = cls()
        for part in parts:
            for name in part.sums:
                whole.mean(name, part.sums[name], part.weights[name])
            for name, value in part.totals.items():
                whole.totals[name] = whole.totals.get(name, 0.0) + value
            for name, value in part.peaks.items():
                whole.peaks[name] = max(whole.peaks.get(name, 0.0), value)
            whole.mismatch = whole.mismatch + part.mismatch
        return whole

    def result(self) -> dict[str, float]:
        """The numbers by name."""
        means = {name: total / self.weights[name] for name, total in self.sums.items() if self.weights[name]}
        mismatch = self.mismatch.result() if self.mismatch.tokens else {}
        return {**self.totals, **self.peaks, **means, **{f"mismatch/{n}": v for n, v in mismatch.items()}}


TAKEN = frozenset(
    "loss tokens entropy kl logprob_gap logprob_gap_max no_signal logprobs old_logprobs ref_logprobs".split()
)
"""Names of the standard metrics and per-token channels that a loss cannot replace."""


@torch.no_grad()
def measure(
    sums: MetricSums, inputs: LossInputs, own: dict[str, Tensor | float], loss: float, with_sampler: bool = True
) -> None:
    """Count one micro-batch: the standard numbers (docs/metrics.md), then the loss's own.

    A loss that says `ref_kl`, as one with `kl_coef` does, means it in the place of the standard estimate.
    `loss`: this rank's terms of the whole; `with_sampler`: compare the old policy with the sampler, which may stand in
    for it.
    """
    mask = inputs.mask
    tokens = float(mask.sum())
    sums.totals["loss"] = sums.totals.get("loss", 0.0) + loss
    sums.totals["tokens"] = sums.totals.get("tokens", 0.0) + tokens
    if inputs.scores is None:
        _measure_policy(sums, inputs, tokens, with_sampler, own)
    for name, value in own.items():
        if isinstance(value, Tensor) and value.shape == mask.shape:
            sums.mean(own_name(name), float(torch.where(mask, value.float(), 0.0).sum()), tokens)
        elif isinstance(value, Tensor) and value.shape == (len(mask), 1):
            rows = mask.any(dim=1) & ~value.isnan()[:, 0]
            sums.mean(own_name(name), float(value[rows].float().sum()), float(rows.sum()))
        elif isinstance(value, Tensor) and value.numel() != 1:
            raise LossError(
                f"the loss's metric {name!r} has shape {tuple(value.shape)}; one number, {tuple(mask.shape)} or "
                f"{(len(mask), 1)}."
            )
        else:
            sums.mean(own_name(name), float(value) * tokens, tokens)


def _measure_policy(
    sums: MetricSums, inputs: LossInputs, tokens: float, with_sampler: bool, own: Container[str]
) -> None:
    """Count what a policy says of its `tokens` trained tokens, but for what the loss says itself."""
    mask = inputs.mask
    sampled = mask & ~inputs.sampler_logprobs.isnan()  # tokens of a text have no sampler
    if with_sampler and sampled.any():
        sums.mismatch = sums.mismatch + MismatchMoments.of(inputs.old_logprobs, inputs.sampler_logprobs, sampled)
    standard = {"entropy": inputs.entropy, "kl": k3(inputs.logprobs, inputs.old_logprobs)}
    if inputs.ref_logprobs is not None and "ref_kl" not in own:
        standard["ref_kl"] = k3(inputs.logprobs, inputs.ref_logprobs)
    for name, value in standard.items():
        sums.mean(name, float(torch.where(mask, value, 0.0).sum()), tokens)
    _measure_gap(sums, inputs, sampled)


def _measure_gap(sums: MetricSums, inputs: LossInputs, sampled: Tensor) -> None:
    """Count how far the policy is from the sampler, on the trained tokens (S, T) that one sampled."""
    tokens = float(sampled.sum())
    if tokens:
        gap = (inputs.logprobs - inputs.sampler_logprobs).abs()
        sums.mean("logprob_gap", float(torch.where(sampled, gap, 0.0).sum()), tokens)
        sums.peaks["logprob_gap_max"] = max(sums.peaks.get("logprob_gap_max", 0.0), float(gap[sampled].max()))


def own_name(name: str) -> str:
    """What a loss's own metric is called beside the standard ones."""
    return f"loss/{name}" if name in TAKEN else name
