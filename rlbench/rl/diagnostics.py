"""How far the sampler's probabilities are from the trainer's, in numbers that can be added up.

With x = old_logprobs - sampler_logprobs per trained token, w = exp(x), and X the sum of x over a sequence (log-weights
clamped to ± 20 where they are exponentiated):

* `kl`: mean of -x, which estimates KL(sampler || trainer) in nats; `k3_kl`: mean of exp(x) - 1 - x.
* `sampler_ppl`, `trainer_ppl`: mean over sequences of exp(-mean log-probability); `ppl_ratio`: of exp(mean of -x).
* `chi2_token`: mean of w² - 1; `chi2_seq`: mean over sequences of exp(2 X) - 1.
* `ess`: (sum of w)² / (n * sum of w²), in (0, 1]: the share of the tokens that the weighted batch is worth.
* `max_gap`: largest |x|; `prob_gap_mean`, `prob_gap_max`: mean and largest |p_trainer - p_sampler|.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from rlbench.errors import LossError
from rlbench.rl import checks
from rlbench.rl.kl import LOG_RATIO_BOUND
from rlbench.rl.policy import masked, sequence_mean

MAXIMA = ("max_gap", "max_prob_gap")


@dataclass(frozen=True)
class MismatchMoments:
    """Sums over trained tokens and over sequences that have one; those of micro-batches and ranks add up.

    `gap` sums -x, `k3` exp(x) - 1 - x, `weight` w; `sequence_weight_squared` exp(2 X), and so on.
    """

    tokens: float = 0.0
    sequences: float = 0.0
    gap: float = 0.0
    k3: float = 0.0
    weight: float = 0.0
    weight_squared: float = 0.0
    sequence_weight_squared: float = 0.0
    sampler_ppl: float = 0.0
    trainer_ppl: float = 0.0
    ppl_ratio: float = 0.0
    prob_gap: float = 0.0
    max_gap: float = 0.0
    max_prob_gap: float = 0.0

    @classmethod
    def of(cls, old_logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor) -> MismatchMoments:
        """Sum one micro-batch, in float64; reads the device once."""
        checks.mask(mask)
        for name, value in (("old_logprobs", old_logprobs), ("sampler_logprobs", sampler_logprobs)):
            checks.shape(name, value, tuple(mask.shape))
        old = masked(old_logprobs.detach().double(), mask)
        sampler = masked(sampler_logprobs.detach().double(), mask)
        x = old - sampler
        bounded, whole = (gap.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND) for gap in (x, x.sum(dim=1, keepdim=True)))
        rows = mask.any(dim=1, keepdim=True)
        prob_gap = (old.exp() - sampler.exp()).abs()
        sums = {
            "tokens": mask.double(),
            "sequences": rows.double(),
            "gap": -x,
            "k3": torch.expm1(bounded) - bounded,
            "weight": masked(bounded.exp(), mask),
            "weight_squared": masked((2 * bounded).exp(), mask),
            "sequence_weight_squared": masked((2 * whole).exp(), rows),
            "sampler_ppl": masked((-sequence_mean(sampler, mask)).exp(), rows),
            "trainer_ppl": masked((-sequence_mean(old, mask)).exp(), rows),
            "ppl_ratio": masked((-sequence_mean(x, mask)).exp(), rows),
            "prob_gap": prob_gap,
        }
        numbers = [values.sum() for values in sums.values()] + [x.abs().max(), prob_gap.max()]
        return cls(**dict(zip([*sums, *MAXIMA], torch.stack(numbers).tolist(), strict=True)))

    def __add__(self, other: MismatchMoments) -> MismatchMoments:
        """Return the moments of both parts together."""
        both = {f.name: (getattr(self, f.name), getattr(other, f.name)) for f in fields(self)}
        # numpy's max, unlike Python's, does not pass over a NaN
        return MismatchMoments(**{n: float(np.max(two)) if n in MAXIMA else sum(two) for n, two in both.items()})

    def result(self) -> dict[str, float]:
        """Return the statistics by name; see the top of this file."""
        if not self.tokens:
            raise LossError("no trained token to compare the sampler and the trainer on: check the mask.")
        n, rows = self.tokens, self.sequences
        return {
            "kl": self.gap / n,
            "k3_kl": self.k3 / n,
            "sampler_ppl": self.sampler_ppl / rows,
            "trainer_ppl": self.trainer_ppl / rows,
            "ppl_ratio": self.ppl_ratio / rows,
            "chi2_token": self.weight_squared / n - 1.0,
            "chi2_seq": self.sequence_weight_squared / rows - 1.0,
            "ess": min(self.weight**2 / (n * self.weight_squared), 1.0),
            "max_gap": self.max_gap,
            "prob_gap_mean": self.prob_gap / n,
            "prob_gap_max": self.max_prob_gap,
        }


def mismatch_diagnostics(old_logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor) -> dict[str, float]:
    """Return the statistics of one whole batch by name; see the top of this file."""
    return MismatchMoments.of(old_logprobs, sampler_logprobs, mask).result()
