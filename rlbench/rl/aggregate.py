"""From a loss per token to one number: the only place where a policy loss is normalised.

The normalisers cover the whole optimizer step (all micro-batches of all ranks); the contributions `sum(per_token *
weights)` of micro-batches are *summed*, and nothing may divide again. Tokens are counted before any rejection or
filter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from rlbench.errors import LossError
from rlbench.rl import checks

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
    """Size of a whole optimizer step: trained tokens, sequences and prompts with one, tokens of the longest response.

    `prompt_tokens` is {group number: trained tokens}, empty where groups are not known.
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
        by_prompt: Counter[int] = Counter()
        if group is not None:
            checks.shape("group", group, tuple(mask.shape[:1]))
            for number, tokens in zip(group.tolist(), per_sequence.tolist(), strict=True):
                by_prompt[int(number)] += int(tokens)
        by_prompt = +by_prompt  # prompts with a trained token
        return cls(
            tokens=int(per_sequence.sum()),
            sequences=int((per_sequence > 0).sum()),
            max_length=mask.shape[1],
            prompts=len(by_prompt),
            prompt_tokens=dict(by_prompt),
        )

    @classmethod
    def combine(cls, parts: Iterable[BatchTotals]) -> BatchTotals:
        """Put together micro-batches or ranks of one batch: other sequences, the same numbering of prompts."""
        held = list(parts)
        by_prompt: Counter[int] = Counter()
        for part in held:
            by_prompt.update(part.prompt_tokens)
        return cls(
            tokens=sum(part.tokens for part in held),
            sequences=sum(part.sequences for part in held),
            max_length=max((part.max_length for part in held), default=0),
            prompts=len(by_prompt),
            prompt_tokens=dict(by_prompt),
        )

    def then(self, batch: BatchTotals) -> BatchTotals:
        """Extend a step by another batch, whose groups are other prompts; `prompt_tokens` are that batch's."""
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
        checks.choice("aggregation", "mode", self.mode, MODES)
        if self.length is not None and (self.mode != "seq-mean-token-sum-norm" or self.length < 1):
            raise LossError(f"{self}: length, in tokens, is at least 1 and acts in seq-mean-token-sum-norm alone.")

    @classmethod
    def of(cls, mode: str | Aggregation) -> Aggregation:
        """Return the value that a mode's name stands for; a value is returned as it is."""
        return mode if isinstance(mode, Aggregation) else cls(mode)

    @classmethod
    def of_loss(cls, loss: object, mode: str | Aggregation | None = None) -> Aggregation:
        """Return what `mode` stands for; None: what the loss is meant for, `loss.aggregation`, else "token-mean"."""
        return cls.of(mode or getattr(loss, "aggregation", None) or "token-mean")

    def divisor(self, totals: BatchTotals) -> float:
        """Return what the whole step's sum is divided by: the part that is equal for all its tokens."""
        length = totals.max_length if self.length is None else self.length
        return {
            "token-mean": float(totals.tokens),
            "token-sum": 1.0,
            "prompt-mean": float(totals.prompts),
            "seq-mean-token-sum-norm": float(totals.sequences) * length,
        }.get(self.mode, float(totals.sequences))

    def weights(self, mask: Tensor, totals: BatchTotals, group: Tensor | None = None) -> Tensor:
        """Return (S, T) weights of one micro-batch: the step's loss is the sum of `per_token * weights`."""
        if totals.tokens < 1 or totals.sequences < 1:
            raise LossError(f"nothing to train on: {totals}. Check the mask, and that responses are not empty.")
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
    checks.shape("group", group, tuple(mask.shape[:1]))
    numbers = [int(n) for n in group.tolist()]
    trained = {n for n, own in zip(numbers, mask.any(dim=1).tolist(), strict=True) if own}
    if unknown := sorted(trained - set(totals.prompt_tokens)):
        raise LossError(f"group holds {unknown[:5]}, not in the totals: BatchTotals.of(mask, group) counts the same.")
    counts = [float(totals.prompt_tokens.get(number, 1)) for number in numbers]
    return torch.tensor(counts, device=mask.device)[:, None]
