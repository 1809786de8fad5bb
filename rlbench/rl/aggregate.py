"""From a loss per token to one number: the only place where a policy loss is normalised.

The normalisers cover the whole optimizer step (all micro-batches of all ranks). Each micro-batch contributes
`sum(per_token * weights)`, and the contributions are *summed* over micro-batches and ranks: the gradient then
does not depend on how the batch was split. Nothing may divide it again. Tokens are counted before any rejection
or filter of a loss: those give a token weight 0, and change no normaliser.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from rlbench.errors import LossError, nearest

MODES = (
    "token-mean",
    "token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
    "prompt-mean",
)


@dataclass(frozen=True)
class BatchTotals:
    """Size of a whole optimizer step, over all micro-batches and ranks.

    Trained tokens (mask True); sequences with a trained token; tokens of the longest response, trained or not; prompts
    with a trained token and {group number: trained tokens}, 0 and empty where groups are not known.
    """

    tokens: int
    sequences: int
    max_length: int
    prompts: int = 0
    prompt_tokens: Mapping[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, mask: Tensor, group: Tensor | None = None) -> BatchTotals:
        """Count one padded mask (S, T), whose width is `max_length`; `group` (S,) is needed by "prompt-mean" alone."""
        per_sequence = mask.sum(dim=1)
        by_prompt: dict[int, int] = {}
        if group is not None:
            _check_group(group, mask)
            for number, tokens in zip(group.tolist(), per_sequence.tolist(), strict=True):
                if tokens:
                    by_prompt[int(number)] = by_prompt.get(int(number), 0) + int(tokens)
        return cls(
            tokens=int(per_sequence.sum()),
            sequences=int((per_sequence > 0).sum()),
            max_length=mask.shape[1],
            prompts=len(by_prompt),
            prompt_tokens=by_prompt,
        )

    @classmethod
    def combine(cls, parts: Iterable[BatchTotals]) -> BatchTotals:
        """Put together micro-batches or ranks of one batch: other sequences, the same numbering of prompts."""
        held = list(parts)
        by_prompt: dict[int, int] = {}
        for part in held:
            for number, tokens in part.prompt_tokens.items():
                by_prompt[number] = by_prompt.get(number, 0) + tokens
        return cls(
            tokens=sum(part.tokens for part in held),
            sequences=sum(part.sequences for part in held),
            max_length=max((part.max_length for part in held), default=0),
            prompts=len(by_prompt),
            prompt_tokens=by_prompt,
        )

    def then(self, batch: BatchTotals) -> BatchTotals:
        """Extend a step by another batch, whose groups are other prompts whatever their numbers.

        The result weighs that batch's sequences: `prompt_tokens` are its own.
        """
        whole = self.combine([self, batch])
        return replace(whole, prompts=self.prompts + batch.prompts, prompt_tokens=batch.prompt_tokens)


@dataclass(frozen=True)
class Aggregation:
    """How per-token losses become one loss.

    Modes, with L the per-token loss, N all trained tokens, B the sequences, T_i the trained tokens of one:

    * `token-mean`: sum(L) / N. Each token weighs the same (DAPO, arXiv 2503.14476).
    * `token-sum`: sum(L).
    * `seq-mean-token-mean`: mean over sequences of their token mean (GRPO, arXiv 2402.03300).
    * `seq-mean-token-sum`: sum(L) / B.
    * `seq-mean-token-sum-norm`: sum(L) / (B * length) (Dr. GRPO, arXiv 2503.20783).
    * `prompt-mean`: mean over prompts of the token mean over all their responses (SkyRL).

    Attributes:
        mode: one of the above.
        length: the constant of `seq-mean-token-sum-norm`, in tokens; None: the step's longest response.
    """

    mode: str = "token-mean"
    length: int | None = None

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise LossError(
                f"unknown aggregation {self.mode!r}{nearest(self.mode, MODES)}. Use one of: {', '.join(MODES)}."
            )
        if self.length is not None and (self.mode != "seq-mean-token-sum-norm" or self.length < 1):
            raise LossError(
                f"aggregation length={self.length!r}: it is a number of tokens, at least 1, and acts in "
                f'"seq-mean-token-sum-norm" alone; the mode is {self.mode!r}.'
            )

    @classmethod
    def of(cls, given: str | Aggregation) -> Aggregation:
        """Return the value that a mode's name stands for; a value is returned as it is."""
        return given if isinstance(given, Aggregation) else cls(given)

    def divisor(self, totals: BatchTotals) -> float:
        """Return what the whole step's sum is divided by: the part that is equal for all its tokens."""
        if self.mode == "token-mean":
            return float(totals.tokens)
        if self.mode == "token-sum":
            return 1.0
        if self.mode == "prompt-mean":
            return float(totals.prompts)
        if self.mode == "seq-mean-token-sum-norm":
            return float(totals.sequences) * (totals.max_length if self.length is None else self.length)
        return float(totals.sequences)

    def weights(self, mask: Tensor, totals: BatchTotals, group: Tensor | None = None) -> Tensor:
        """Return the weight of each token (S, T), such that the step's loss is the sum of `per_token * weights`.

        `mask` (S, T) is one micro-batch of whole sequences, `totals` the whole step; "prompt-mean" also needs `group`
        (S,), the numbers of `totals.prompt_tokens`.
        """
        if totals.tokens < 1 or totals.sequences < 1:
            raise LossError(
                f"nothing to train on: the step has {totals}. Check the mask, and that responses are not empty."
            )
        weights = mask.float()
        if self.mode == "seq-mean-token-mean":  # a row without trained tokens stays zero
            weights = weights / weights.sum(dim=1, keepdim=True).clamp(min=1.0)
        elif self.mode == "prompt-mean":
            weights = weights / _tokens_of_prompts(mask, totals, group)
        return weights / self.divisor(totals)


def _tokens_of_prompts(mask: Tensor, totals: BatchTotals, group: Tensor | None) -> Tensor:
    """Return the trained tokens of each sequence's prompt in the whole step, (S, 1) float32."""
    if group is None:
        raise LossError('aggregation "prompt-mean" needs group (S,): which sequences answer the same prompt.')
    _check_group(group, mask)
    trained = mask.any(dim=1).tolist()
    numbers = [int(n) for n in group.tolist()]
    unknown = sorted({n for n, own in zip(numbers, trained, strict=True) if own} - set(totals.prompt_tokens))
    if unknown:
        raise LossError(
            f"group holds {unknown[:5]}, which the step's totals do not: they know {len(totals.prompt_tokens)} "
            "groups. Count the totals with BatchTotals.of(mask, group) on the same numbers."
        )
    counts = [float(totals.prompt_tokens.get(number, 1)) for number in numbers]
    return torch.tensor(counts, device=mask.device)[:, None]


def _check_group(group: Tensor, mask: Tensor) -> None:
    if tuple(group.shape) != tuple(mask.shape[:1]):
        raise LossError(
            f"group has shape {tuple(group.shape)}; wanted {tuple(mask.shape[:1])}, one number per sequence."
        )
