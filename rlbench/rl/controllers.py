"""Coefficients that follow what was observed: immutable values, `new = controller.update(observed, …)`."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, replace

from rlbench.errors import LossError
from rlbench.rl import checks
from rlbench.rl.checks import Checked, within

LARGEST = sys.float_info.max
ADAPTIVE_CLIP = 0.2
"""How much of the relative error one update of `AdaptiveKL` acts on (Ziegler et al.)."""


@dataclass(frozen=True)
class FixedKL(Checked):
    """A KL coefficient that stays."""

    coef: float = within(0.001, 0.0)

    def update(self, observed: float, samples: int) -> FixedKL:
        """Return itself, whatever was observed."""
        return self


@dataclass(frozen=True)
class AdaptiveKL(Checked):
    """A KL coefficient steered towards a target KL per response, in nats (Ziegler et al., arXiv 1909.08593).

    coef <- coef * (1 + clip(observed / target - 1, -0.2, 0.2) * samples / horizon)
    """

    target: float = within(6.0, 0.0, LARGEST, above=True)
    horizon: float = within(10000.0, 0.0, LARGEST, above=True)
    coef: float = within(0.2, 0.0, LARGEST, above=True)

    def update(self, observed: float, samples: int) -> AdaptiveKL:
        """Return the controller after a step of `samples` responses (fewer than 5 horizons) with that mean KL."""
        _check_observed("AdaptiveKL", observed)
        checks.number("AdaptiveKL.update", "samples", samples, 0)
        if ADAPTIVE_CLIP * samples >= self.horizon:
            raise LossError(
                f"AdaptiveKL.update: samples={samples} with horizon={self.horizon:g} could make the coefficient "
                f"negative; wanted fewer than {self.horizon / ADAPTIVE_CLIP:g}. Raise the horizon."
            )
        error = min(max(observed / self.target - 1.0, -ADAPTIVE_CLIP), ADAPTIVE_CLIP)
        return replace(self, coef=self.coef * (1.0 + error * samples / self.horizon))


@dataclass(frozen=True)
class AdaptiveEntropy(Checked):
    """An entropy coefficient that holds a lower bound on the entropy (Skywork-OR1, arXiv 2505.22312).

    Each update adds `delta` to `level` at or below the target (nats per token), and takes it away above, in [low,
    high].
    """

    target: float = within(0.2, 0.0)
    delta: float = within(0.005, 0.0)
    low: float = 0.0
    high: float = 1.0
    level: float = 0.0
    observed: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.number("AdaptiveEntropy", "high", self.high, self.low)
        checks.number("AdaptiveEntropy", "level", self.level, self.low, self.high)

    @property
    def coef(self) -> float:
        """The coefficient to use in the next step: 0 while the entropy is above the target."""
        idle = self.observed is not None and self.observed > self.target
        return 0.0 if idle else self.level

    def update(self, observed: float) -> AdaptiveEntropy:
        """Return the controller after a step whose trained tokens, over all ranks, had that mean entropy in nats."""
        _check_observed("AdaptiveEntropy", observed)
        step = self.delta if observed <= self.target else -self.delta
        return replace(self, level=min(max(self.level + step, self.low), self.high), observed=observed)


def _check_observed(owner: str, observed: float) -> None:
    if not math.isfinite(observed):
        raise LossError(f"{owner}.update: observed={observed!r} is not finite; the step that gave it is broken.")
