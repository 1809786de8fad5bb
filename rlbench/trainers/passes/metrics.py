"""Numbers of a step, summed over micro-batches and ranks with the right weights."""

from __future__ import annotations

from collections.abc import Iterable
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

    def so_far(self, share: float) -> dict[str, float]:
        """The tokens trained on, and their part of the loss, for whoever watches; `share` as of `Pending`."""
        return {"trained": self.totals.get("tokens", 0.0), "loss": self.totals.get("loss", 0.0) / share}

    def scale(self, factor: float) -> None:
        """Scale the loss, as the gradients were that it belongs to."""
        if "loss" in self.totals:
            self.totals["loss"] *= factor

    @classmethod
    def joined(cls, parts: Iterable[MetricSums]) -> MetricSums:
        """All parts together."""
        whole = cls()
        for part in parts:
            whole.merge(part)
        return whole

    def merge(self, other: MetricSums) -> None:
        """Take in what another rank counted."""
        for name in other.sums:
            self.mean(name, other.sums[name], other.weights[name])
        for name, value in other.totals.items():
            self.totals[name] = self.totals.get(name, 0.0) + value
        for name, value in other.peaks.items():
            self.peaks[name] = max(self.peaks.get(name, 0.0), value)
        self.mismatch = self.mismatch + other.mismatch

    def result(self) -> dict[str, float]:
        """The numbers by name."""
        means = {name: total / self.weights[name] for name, total in self.sums.items() if self.weights[name]}
        mismatch = self.mismatch.result() if self.mismatch.tokens else {}
        return {**self.totals, **self.peaks, **means, **{f"mismatch/{n}": v for n, v in mismatch.items()}}


TAKEN = frozenset(
    {
        "loss",
        "tokens",
        "entropy",
        "kl",
        "ref_kl",
        "logprob_gap",
        "logprob_gap_max",
        "logprobs",
        "old_logprobs",
        "ref_logprobs",
    }
)
"""Names of the standard metrics and per-token channels."""


@torch.no_grad()
def measure(
    sums: MetricSums, inputs: LossInputs, own: dict[str, Tensor | float], loss: float, with_sampler: bool = True
) -> None:
    """Count one micro-batch: the standard numbers, then the loss's own (prefixed `loss/` where a name is
    taken).

    `with_sampler`: compare the old policy with the sampler; not where the sampler stands in for it.

    Standard: `loss` (this rank's terms of the whole), `entropy`, `kl` (k3 of old to current policy),
    `ref_kl` (to the reference), `logprob_gap` and `logprob_gap_max` (sampler against trainer now), `tokens`, and
    `mismatch/…` (sampler against the trainer's old policy, see `rlbench.rl.diagnostics`).

    Raises:
        LossError: a metric that is neither a number nor (sequences, tokens).
    """
    mask = inputs.mask
    tokens = float(mask.sum())
    sums.totals["loss"] = sums.totals.get("loss", 0.0) + loss
    sums.totals["tokens"] = sums.totals.get("tokens", 0.0) + tokens
    if with_sampler:
        sums.mismatch = sums.mismatch + MismatchMoments.of(inputs.old_logprobs, inputs.sampler_logprobs, mask)
    gap = (inputs.logprobs - inputs.sampler_logprobs).abs()
    standard = {
        "entropy": inputs.entropy,
        "kl": k3(inputs.logprobs, inputs.old_logprobs),
        "logprob_gap": gap,
    }
    if inputs.ref_logprobs is not None:
        standard["ref_kl"] = k3(inputs.logprobs, inputs.ref_logprobs)
    for name, value in standard.items():
        sums.mean(name, float(torch.where(mask, value, 0.0).sum()), tokens)
    if tokens:
        sums.peaks["logprob_gap_max"] = max(sums.peaks.get("logprob_gap_max", 0.0), float(gap[mask].max()))
    for name, given in own.items():
        _own_metric(sums, own_name(name), given, mask, tokens)


def own_name(name: str) -> str:
    """What a loss's own metric is called beside the standard ones."""
    return f"loss/{name}" if name in TAKEN else name


def _own_metric(sums: MetricSums, name: str, value: Tensor | float, mask: Tensor, tokens: float) -> None:
    if isinstance(value, Tensor) and value.shape == mask.shape:
        sums.mean(name, float(torch.where(mask, value.float(), 0.0).sum()), tokens)
    elif isinstance(value, Tensor) and value.numel() != 1:
        raise LossError(
            f"the loss's metric {name!r} has shape {tuple(value.shape)}; it must be one number or {tuple(mask.shape)}."
        )
    else:
        sums.mean(name, float(value) * tokens, tokens)


def merged(parts: Iterable[MetricSums]) -> dict[str, float]:
    """The numbers of all ranks together."""
    return MetricSums.joined(parts).result()
