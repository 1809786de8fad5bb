"""What a policy loss is: a pure function of `LossInputs`, written in a cell, or any callable; read if it has them:

* `needs_reference`: true where `ref_logprobs` must be there.
* `needs_sampler`: true where it takes `sampler_logprobs` as an importance weight; where a function does not say,
  reading them counts as that.
* `aggregation`: the mode (see `rlbench.rl.aggregate`) it is meant for, used where the caller names none.
* `needs`: names of `NEEDS`: inputs that are made on request, as they cost memory.
* `needs_plan` and `plan(whole) -> {name: (S, T) tensor}`: for a loss that looks at all tokens of the optimizer step,
  all ranks and micro-batches, without gradient; each call finds its part of the answer in `LossInputs.channels`.

A loss of pairs reads `inputs.chosen` and `inputs.rejected`: both responses of a pair are always in one micro-batch. It
gives each pair's loss to both of its rows (`of_pairs`), so that "seq-mean-token-mean" is the mean over pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rlbench.errors import LossError, nearest

NEEDS = ("hidden_states", "logits", "teacher")
"""What a loss may declare in `needs`: the fields of `LossInputs` of these names are None to all others."""


@dataclass(frozen=True)
class TeacherTokens:
    """What a teacher says of each token, float32 without gradient, and the policy of the teacher's tokens.

    Attributes:
        logprobs: (S, T), of the sampled token.
        ids: (S, T, K) int64, the tokens that the teacher finds likeliest there. None where it was not asked for any.
        top_logprobs: (S, T, K), theirs under the teacher.
        policy_logprobs: (S, T, K), theirs under the policy being trained; carries the gradient.
    """

    logprobs: Tensor
    ids: Tensor | None = None
    top_logprobs: Tensor | None = None
    policy_logprobs: Tensor | None = None


@dataclass(frozen=True)
class LossInputs:
    """One micro-batch of responses, padded to the longest; (sequences, tokens) float32 unless said otherwise.

    Attributes:
        logprobs: log-probability of each sampled token under the policy being trained; carries the gradient.
        old_logprobs: the same before this batch's first optimizer step, computed by the trainer.
        sampler_logprobs: the same as the sampler (the inference engine) reported it while generating.
        ref_logprobs: the same under the reference policy, or None where there is no reference.
        mask: bool; True for the tokens that are trained. Elsewhere values are arbitrary and must not reach the result.
        entropy: entropy of the policy's distribution at each token, in nats.
        group: (sequences,) int64; equal numbers mark responses to the same prompt. None where not known.
        channels: the batch's own columns (`batch.with_columns`), and what the loss's own `plan` said of these tokens.
        columns: which of these are the batch's own; None: none.
        preference: (sequences,) int64; 1 for a response that was preferred, -1 for one that was not, 0 for one that
            is judged neither way (`rb.data.labelled`). None where nothing was compared.
        pair: (sequences,) int64; equal numbers mark the two responses of a pair. None where there are no pairs.
        margin: (sequences,) float32; how much better its pair's chosen response is. None where not known.
        lengths: (sequences,) int64; tokens of the response, trained or not; behind them is padding. None where not
            known.
        scores: what a reward model says after each token, with gradient; that of the last trained one is the score.
            None of a policy; a reward model has no log-probs and no entropy: these are NaN.
        head_scores: (sequences, tokens, heads), the same of each of several heads, whose weighted sum `scores` are;
            `heads`: their names. None of a model with one.
        verdicts: (sequences, heads), what its pair says of each head: 1: the chosen response is the better one there,
            -1: the worse one, 0: a tie, NaN: nothing. None where pairs name no head.
        verdict_weights: (heads,), pairs of the step for each that says something of the head: with it a mean over all
            pairs is one over those that do.
        hidden_states: (sequences, tokens, H), the output layer's input at the position that predicts each token.
            Carries the gradient, as `logits` do.
        logits: (sequences, tokens, V), over the temperature: `log_softmax(logits, -1)` at a token is its log-prob.
        teacher: what a teacher said of the batch (`teacher.score(batch)`).
    """

    logprobs: Tensor
    old_logprobs: Tensor
    sampler_logprobs: Tensor
    ref_logprobs: Tensor | None
    advantages: Tensor
    mask: Tensor
    entropy: Tensor
    group: Tensor | None = None
    channels: Mapping[str, Tensor] = field(default_factory=dict)
    preference: Tensor | None = None
    pair: Tensor | None = None
    margin: Tensor | None = None
    lengths: Tensor | None = None
    scores: Tensor | None = None
    head_scores: Tensor | None = None
    heads: tuple[str, ...] | None = None
    verdicts: Tensor | None = None
    verdict_weights: Tensor | None = None
    columns: tuple[str, ...] | None = None
    hidden_states: Tensor | None = None
    logits: Tensor | None = None
    teacher: TeacherTokens | None = None

    @property
    def planned(self) -> bool:
        """Whether `channels` has a plan beside the batch's columns."""
        return len(self.channels) > len(self.columns or ())

    @property
    def chosen(self) -> Side:
        """The preferred responses of the pairs, one row per pair."""
        return Side(self, 1)

    @property
    def rejected(self) -> Side:
        """The others of the pairs, in the order of `chosen`."""
        return Side(self, -1)

    def of_pairs(self, values: Tensor) -> Tensor:
        """Give (pairs,) values to all tokens of both responses, (sequences, tokens); 0 for rows without a pair."""
        rows = torch.cat([self.chosen.rows, self.rejected.rows])
        spread = values.new_zeros(len(self.mask)).index_put((rows,), values.repeat(2))
        return spread[:, None].expand(-1, self.mask.shape[1])


@dataclass(frozen=True)
class Side:
    """One response of each pair of a micro-batch: P rows, sorted by the pair's number; (P,) each."""

    inputs: LossInputs
    sign: int

    @property
    def rows(self) -> Tensor:
        """Where they are in the micro-batch, int64. Raises LossError where a pair is not whole."""
        preference, pair = self.inputs.preference, self.inputs.pair
        if preference is None or pair is None:
            raise LossError(
                "the loss compares pairs, and the batch has none: rb.data.pairs(rows, tokenizer), or rollouts.pairs()."
            )
        sides = [torch.nonzero((preference == sign) & (pair >= 0))[:, 0] for sign in (self.sign, -self.sign)]
        mine, others = (rows[torch.argsort(pair[rows], stable=True)] for rows in sides)
        numbers = pair[mine]
        if not torch.equal(numbers, pair[others]) or bool((numbers[1:] == numbers[:-1]).any()):
            raise LossError(
                f"a pair is not whole: the rows hold {len(mine)} chosen and {len(others)} rejected responses that do "
                "not match; give both of every pair, each once."
            )
        return mine

    @property
    def tokens(self) -> Tensor:
        """Trained tokens, float32."""
        return self.inputs.mask[self.rows].sum(1).float()

    @property
    def logprobs(self) -> Tensor:
        """Log-probability of the whole response under the policy: the sum over trained tokens, with gradient."""
        return self._summed(self.inputs.logprobs)

    @property
    def mean_logprobs(self) -> Tensor:
        """The same per token, with gradient."""
        return self.logprobs / self.tokens.clamp(min=1)

    @property
    def ref_logprobs(self) -> Tensor:
        """Log-probability of the whole response under the reference policy. Raises LossError where there is none."""
        if self.inputs.ref_logprobs is None:
            raise LossError("the loss needs ref_logprobs, and the batch has none: use a reference.")
        return self._summed(self.inputs.ref_logprobs).detach()

    @property
    def scores(self) -> Tensor:
        """What a reward model says of each response after its last trained token, with gradient. Raises LossError where
        a policy is trained."""
        return self._at_the_end(self.inputs.scores)

    @property
    def head_scores(self) -> Tensor:
        """The same of each head, (P, heads). Raises LossError of a model with one."""
        if self.inputs.scores is not None and self.inputs.head_scores is None:
            raise LossError(
                "the loss reads the scores of heads, and the reward model has one: rb.RewardModel(…, heads=…)."
            )
        return self._at_the_end(self.inputs.head_scores)

    @property
    def verdicts(self) -> Tensor | None:
        """What the pairs say of each head, (P, heads) float32; None where they name none."""
        return None if self.inputs.verdicts is None else self.inputs.verdicts[self.rows]

    @property
    def margin(self) -> Tensor | None:
        """How much better the chosen response is, float32; None where not known."""
        return None if self.inputs.margin is None else self.inputs.margin[self.rows]

    def _at_the_end(self, scores: Tensor | None) -> Tensor:
        """Take what stands at each response's last trained token."""
        if scores is None:
            raise LossError("the loss compares scores, which a policy does not give: train an rb.RewardModel with it.")
        rows, mask = self.rows, self.inputs.mask
        last = mask.shape[1] - 1 - mask[rows].int().flip(1).argmax(1)
        return scores[rows, last]

    def _summed(self, values: Tensor) -> Tensor:
        rows = self.rows
        kept = torch.where(self.inputs.mask[rows], values[rows], 0.0)
        return kept.to(torch.float64 if values.dtype == torch.float64 else torch.float32).sum(1)


Loss = Callable[[LossInputs], tuple[Tensor, dict[str, Tensor | float]]]
"""A loss returns a (sequences, tokens) loss per token, not aggregated, and metrics by name.

A (sequences, tokens) metric is averaged over the trained tokens, a (sequences, 1) one over the sequences that have any,
but for those where it is NaN, a scalar over micro-batches by their tokens.
"""


def needs_of(loss: object) -> tuple[str, ...]:
    """Return what a loss declares in `needs`; refuse names that mean nothing."""
    declared = getattr(loss, "needs", ())
    names = (declared,) if isinstance(declared, str) else tuple(declared)
    for name in names:
        if name not in NEEDS:
            raise LossError(f"needs={names!r}: {name!r} is unknown{nearest(name, NEEDS)}; known: {', '.join(NEEDS)}.")
    return names
