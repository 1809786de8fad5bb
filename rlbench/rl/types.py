"""What a policy loss is: a pure function of `LossInputs`.

A loss may be a plain function, written in a notebook cell, or any callable. These attributes are read if it has
them:

* `needs_reference`: true where `ref_logprobs` must be there (a KL penalty against a reference policy);
* `needs_sampler`: true where it takes `sampler_logprobs` for those of the policy that is trained, as an importance
  weight against the sampler does; where a function does not say, reading them counts as that;
* `aggregation`: the mode (see `rlbench.rl.aggregate`) it is meant for, used where the caller names none;
* `needs_plan` and `plan(whole) -> {name: (S, T) tensor}`: for a loss that looks at all tokens of the optimizer
  step (a quantile, a top fraction, a batch mean). `plan` gets the whole step, all ranks and micro-batches, without
  gradient; each call then finds its sequences' part of the answer in `LossInputs.channels`. The result does
  not depend on how the step was split.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True)
class LossInputs:
    """One micro-batch of responses, padded to the longest; (sequences, tokens) float32, but for `mask`.

    Values where `mask` is False (padding, tool output) are arbitrary and must not reach the result.

    Attributes:
        logprobs: log-probability of each sampled token under the policy being trained; carries the gradient.
        old_logprobs: the same under the policy before this batch's first optimizer step, computed by the trainer.
        sampler_logprobs: the same as the sampler (the inference engine) reported it while generating.
        ref_logprobs: the same under the reference policy, or None where there is no reference.
        advantages: advantage of each token.
        mask: bool; True for the tokens that are trained.
        entropy: entropy of the policy's distribution at each token, in nats.
        group: (sequences,) int64; equal numbers mark responses to the same prompt. None where not known.
        channels: what the loss's own `plan` said of these tokens; empty for a loss without one, or called by hand.
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


Loss = Callable[[LossInputs], tuple[Tensor, dict[str, Tensor | float]]]
"""A loss returns a (sequences, tokens) loss per token, not aggregated, and metrics by name.

A (sequences, tokens) metric is averaged over the trained tokens, a scalar over micro-batches by their tokens.
"""
