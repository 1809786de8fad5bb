"""The factor on the loss of a model that computes in float16, so that small gradients do not vanish in it."""

from __future__ import annotations

from rlbench.strategies.optim.mp_optimizer import BACKOFF, GROWTH, GROWTH_INTERVAL, INITIAL, LEAST, MOST


class LossScale:
    """Of one model. Halved after gradients that were not finite, doubled after 1000 steps without such, between 1 and
    2**24 (Micikevicius et al., 2018, §3.2).

    It is a power of two, by which numbers are multiplied and divided exactly: gradients are the same whatever it is,
    unless one overflows or vanishes. So `undo`, snapshots and checkpoints do not keep it; it is found again.
    """

    def __init__(self) -> None:
        self.value = INITIAL
        self._good_steps = 0

    def update(self, finite: bool) -> None:
        """Take note of a step, whose gradients were finite or not."""
        if not finite:
            self.value, self._good_steps = max(LEAST, self.value * BACKOFF), 0
            return
        self._good_steps += 1
        if self._good_steps == GROWTH_INTERVAL:
            self.value, self._good_steps = min(MOST, self.value * GROWTH), 0
