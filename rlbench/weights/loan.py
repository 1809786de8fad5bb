"""Weights that replicas draw with for one call: those of a kept version, with what proves them. Plain values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rlbench.weights.manifest import Manifest
from rlbench.weights.probe import Probe


@dataclass(frozen=True, eq=False)
class Loan:
    """`name`, `version`: of the weights; `manifest`: where they lie, whole or an adapter alone; `expected`: the
    trainer's log-probs of each sequence of `probe` under them; `allowed`: how many nats a replica's may differ."""

    name: str
    version: int
    manifest: Manifest
    probe: Probe
    expected: Sequence[np.ndarray]
    allowed: float

    @property
    def adapter(self) -> int:
        """Number of the adapter that is lent, 0 for whole weights."""
        return 0 if self.manifest.adapter is None else self.manifest.adapter.number
