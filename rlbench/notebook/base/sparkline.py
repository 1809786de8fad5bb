"""Numbers as a row of block characters: pictures for terminals, diffs and saved text."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlbench.units import format_number

BLOCKS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], width: int = 60) -> str:
    """Values as block characters, with the first and the last in figures."""
    kept = values if len(values) <= width else [values[i] for i in np.linspace(0, len(values) - 1, width).astype(int)]
    return f"{format_number(values[0])} {blocks(kept)} {format_number(values[-1])}"


def blocks(values: Sequence[float] | np.ndarray, floor: float | None = None) -> str:
    """One block character per value, from the lowest (or `floor`: 0 for counts) to the highest; equal ones lie low."""
    low, high = min(values) if floor is None else floor, max(values)
    return "".join(BLOCKS[round(float(v - low) / float(high - low) * 7) if high > low else 0] for v in values)
