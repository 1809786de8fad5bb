"""Numbers as a row of block characters: pictures for terminals, diffs and saved text."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

BLOCKS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], width: int = 60) -> str:
    """Values as block characters, with the first and the last in figures."""
    kept = values if len(values) <= width else [values[i] for i in np.linspace(0, len(values) - 1, width).astype(int)]
    return f"{values[0]:.3g} {blocks(kept)} {values[-1]:.3g}"


def blocks(values: Sequence[float] | np.ndarray, floor: float | None = None) -> str:
    """One block character per value, from the lowest (or `floor`: 0 for counts) to the highest; equal ones lie low."""
    low, high = min(values) if floor is None else floor, max(values)
    return "".join(BLOCKS[round(float(v - low) / float(high - low) * 7) if high > low else 0] for v in values)
