"""Which tokens keep their policy term: filters by what the policy knows of a token.

A `TokenFilter` is called with `LossInputs` and returns (S, T) bool. A token that is filtered out loses its policy
term, keeps its KL and entropy terms, and still counts in the normaliser.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from rlbench.rl.policy import LossPart
from rlbench.rl.reward_checks import one_of, within
from rlbench.rl.types import LossInputs

KEPT = "tokens/high_entropy"
"""The channel that holds 1 for the tokens kept out of the whole optimizer step, else 0."""


@dataclass(frozen=True)
class TokenFilter(LossPart):
    """Base of the filters."""

    def __call__(self, x: LossInputs) -> Tensor:
        """Return (S, T) bool: True for the tokens that keep their policy term, False outside the mask."""
        raise NotImplementedError


@dataclass(frozen=True)
class high_entropy(TokenFilter):
    """Keep the tokens where the policy was most undecided ("Beyond the 80/20 rule", arXiv 2506.01939).

    Of n tokens k = max(1, floor(n * fraction)) are kept: those whose entropy is at least the k-th largest. Where
    several tokens tie with the k-th, all of them are kept; so the order of the sequences does not matter.

    Attributes:
        fraction: share of tokens to keep, in (0, 1]; 1 keeps all.
        level: "batch": n counts the whole optimizer step (the paper, TRL); "sequence": each response by itself
            (LightRFT), so that every response keeps a token.
    """

    fraction: float = within(0.2, 0.0, 1.0, above=True)
    level: str = one_of("batch", ("batch", "sequence"))

    @property
    def needs_plan(self) -> bool:
        return self.level == "batch"

    def plan(self, x: LossInputs) -> dict[str, Tensor]:
        if self.level != "batch":
            return {}
        flat = self._kept(x.entropy.reshape(1, -1), x.mask.reshape(1, -1))
        return {KEPT: flat.reshape(x.mask.shape).float()}

    def __call__(self, x: LossInputs) -> Tensor:
        if self.level == "sequence":
            return self._kept(x.entropy, x.mask)
        kept = x.channels[KEPT] if KEPT in x.channels else self.plan(x)[KEPT]
        return (kept > 0.5) & x.mask

    def _kept(self, entropy: Tensor, mask: Tensor) -> Tensor:
        """Mark in each row the trained tokens at or above the row's own threshold."""
        value = torch.where(mask, entropy.detach().to(torch.float64), -math.inf)
        # a tiny bit more, so that 0.29 * 100 (28.999999999999996 in floating point) is 29
        wanted = (mask.sum(dim=1, keepdim=True).double() * self.fraction + 1e-9).floor().long().clamp(min=1)
        ordered = value.sort(dim=1, descending=True).values
        return (value >= ordered.gather(1, wanted - 1)) & mask if mask.shape[1] else mask
