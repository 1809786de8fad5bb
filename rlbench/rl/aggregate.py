"""From a loss per token to one number: the only place where a policy loss is normalised.

The normalisers cover the whole optimizer step (all micro-batches of all ranks). Each micro-batch contributes
`sum(per_token * weights)`, and the contributions are *summed* over micro-batches and ranks: the gradient then
does not depend on how the batch was split. Nothing may divide it again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from rlbench.errors import LossError, nearest

MODES = ("token-mean", "token-sum", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")


@dataclass(frozen=True)
class BatchTotals:
    """Size of a whole optimizer step, over all micro-batches and ranks.

    Attributes:
        tokens: trained tokens (mask True).
        sequences: sequences with at least one trained token.
        max_length: tokens of the longest response, trained or not.
    """

    tokens: int
    sequences: int
    max_length: int

    @classmethod
    def of(cls, mask: Tensor) -> BatchTotals:
        """Count one padded bool mask (sequences, tokens); `max_length` is its width."""
        per_sequence = mask.sum(dim=1)
        return cls(int(per_sequence.sum()), int((per_sequence > 0).sum()), mask.shape[1])

    @classmethod
    def combine(cls, parts: Iterable[BatchTotals]) -> BatchTotals:
        """Put together the totals of micro-batches or of ranks that hold different sequences."""
        held = list(parts)
        return cls(
            tokens=sum(part.tokens for part in held),
            sequences=sum(part.sequences for part in held),
            max_length=max((part.max_length for part in held), default=0),
        )


@dataclass(frozen=True)
class Aggregation:
    """How per-token losses become one loss.

    Modes, with L the per-token loss, N all trained tokens, B the sequences, T_i the trained tokens of one:

    * `token-mean`: sum(L) / N. Each token weighs the same (DAPO, arXiv 2503.14476).
    * `token-sum`: sum(L).
    * `seq-mean-token-mean`: mean over sequences of their token mean (GRPO, arXiv 2402.03300).
    * `seq-mean-token-sum`: sum(L) / B.
    * `seq-mean-token-sum-norm`: sum(L) / (B * longest response) (Dr. GRPO, arXiv 2503.20783).
    """

    mode: str = "token-mean"

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise LossError(
                f"unknown aggregation {self.mode!r}{nearest(self.mode, MODES)}. "
                f"Use one of: {', '.join(MODES)}."
            )

    def weights(self, mask: Tensor, totals: BatchTotals) -> Tensor:
        """Return the weight of each token, such that the step's loss is the sum of `per_token * weights`.

        Args:
            mask: (S, T) bool of one micro-batch of whole sequences.
            totals: the whole optimizer step, not this micro-batch.

        Returns:
            (S, T) float32, zero where `mask` is False.

        Raises:
            LossError: the step has no trained token at all.
        """
        if totals.tokens < 1 or totals.sequences < 1:
            raise LossError(
                f"nothing to train on: the step has {totals}. "
                "Check the mask, and that responses are not empty."
            )
        weights = mask.float()
        if self.mode == "token-mean":
            return weights / totals.tokens
        if self.mode == "token-sum":
            return weights
        if self.mode == "seq-mean-token-mean":
            own_tokens = weights.sum(dim=1, keepdim=True).clamp(
                min=1.0
            )  # a row without trained tokens stays zero
            return weights / (own_tokens * totals.sequences)
        if self.mode == "seq-mean-token-sum":
            return weights / totals.sequences
        return weights / (totals.sequences * totals.max_length)
