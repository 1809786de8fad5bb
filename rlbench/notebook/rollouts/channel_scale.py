"""How strongly a channel colours a token: one scale per channel, for the widget, the static view and the page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from rlbench.data.rollouts.channels import kind_of
from rlbench.units import format_number

LEVELS = 8
LOOKED_AT = 200_000  # values from which the colour's bound is taken
OUTLIER = 3.0  # beyond this many times the 99th percentile, a maximum would leave all else pale


@dataclass(frozen=True)
class Scale:
    """A channel's scale.

    `kind`: "signed" (around 0), "ratio" (around 1, logarithmic), "size" (from 0) or "flag". `low`, `high`: the real
    ends (0, 0 where nothing is known). `bound`: distance from the middle that is drawn strongest.
    """

    name: str
    label: str
    unit: str
    kind: str
    about: str
    low: float
    high: float
    bound: float

    def share(self, values: np.ndarray) -> np.ndarray:
        """Strength of the colour, −1 to 1 (0 to 1 for kinds without a sign), 0 where not known."""
        return np.nan_to_num(np.clip(_from_middle(values, self.kind) / (self.bound or 1.0), -1, 1))

    def looks(self, values: np.ndarray) -> list[str]:
        """CSS classes: `p3` above the middle, `n3` below, `q3` without a sign, each 1 to LEVELS; "" in the middle."""
        above, below = ("q", "q") if self.kind in ("size", "flag") else ("p", "n")
        levels = np.rint(self.share(values) * LEVELS).astype(int).tolist()
        return ["" if not level else f"{above if level > 0 else below}{abs(level)}" for level in levels]

    @property
    def saturated(self) -> bool:
        """Whether some values lie beyond the bound."""
        ends = np.array([self.low, self.high], np.float64)
        return bool(np.abs(_from_middle(ends, self.kind)).max() > self.bound * 1.0001)

    def to_page(self) -> dict[str, Any]:
        """For JavaScript."""
        return asdict(self) | {"saturated": self.saturated}


def scale_of(name: str, values: np.ndarray) -> Scale:
    """The scale of a channel's values, flat float32."""
    kind = kind_of(name, values)
    finite = values if np.isfinite(np.sum(values, dtype=np.float64)) else values[np.isfinite(values)]
    named = (name, kind.label, kind.unit, kind.scale, kind.about)
    if not len(finite):
        return Scale(*named, 0.0, 0.0, 0.0)
    low, high = float(finite.min()), float(finite.max())
    step = max(1, len(finite) // LOOKED_AT)
    off = np.abs(_from_middle(np.append(finite[::step], [low, high]).astype(np.float64), kind.scale))
    off = off[np.isfinite(off)]  # a ratio of 0 is infinitely far from 1
    usual, most = (float(np.percentile(off, 99)), float(off.max())) if len(off) else (0.0, 0.0)
    bound = usual if kind.scale != "flag" and 0 < usual * OUTLIER < most else most
    return Scale(*named, low, high, bound)


def telling(channels: Mapping[str, np.ndarray], offsets: np.ndarray) -> str:
    """The channel that tells most of single tokens: advantages where they differ within a completion (else the reward
    says it), then sampler against trainer, entropy, and the sampler's own log-prob."""
    advantage = channels.get("advantage")
    if advantage is not None:
        steps = np.flatnonzero(np.nan_to_num(np.diff(advantage)) != 0) + 1
        if not np.isin(steps, offsets).all():
            return "advantage"
    return next(name for name in ("difference", "entropy", "sampler_logprob") if name in channels)


def number(value: float | None) -> str:
    """Three significant digits with a real minus sign; "–" where not known."""
    if value is None or not np.isfinite(value):
        return "–"
    text = format_number(float(value))
    return text.replace("-", "−", 1) if value < 0 else text


def _from_middle(values: np.ndarray, kind: str) -> np.ndarray:
    """Distance from the middle of the scale; the size alone where there is no sign."""
    if kind == "ratio":
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.log(values)
    return values if kind == "signed" else np.abs(values)
