"""Numbers for a reader: with a metric's unit, as rows of blocks, in columns that meet at the decimal point."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rlbench.data.record.history import is_number
from rlbench.data.record.metric_names import BY_NAME
from rlbench.units import format_number, format_percent, format_rate, format_seconds

FORMATS: dict[str, Callable[[float], str]] = {"tok/s": format_rate, "s": format_seconds}
UNITS = ("nats", "tokens", *FORMATS)
"""Units that stand behind a number."""
BLOCKS = "▁▂▃▄▅▆▇█"
NUMBER = re.compile(r"(?P<whole>[~+−-]?[\d,]+)(?P<fraction>\.\d+)?(?P<unit> \S.*)?")
FIGURE, POINT = "\u2007", "\u2008"
"""Spaces as wide as a digit and as a decimal point, where digits are (`tabular-nums`); readers of text see spaces."""


def unit_of(metric: str) -> str:
    """What the metric is measured in; "" for a number without one."""
    if metric.startswith("seconds/"):
        return "s"
    unit = BY_NAME[metric].unit if metric in BY_NAME and metric != "tokens" else ""
    return unit if unit in UNITS else ""


def is_share(metric: str) -> bool:
    """Whether it lies between 0 and 1 and is read as a percentage."""
    return metric in BY_NAME and BY_NAME[metric].unit == "share"


def labelled(metric: str) -> str:
    """The metric's name with its unit, as a heading: `kl, nats`."""
    unit = unit_of(metric)
    return f"{metric}, {unit}" if unit else metric


def with_unit(metric: str, value: Any) -> str:
    """A metric's value: `12.3k tok/s`, `3.1 %`."""
    if not is_number(value):
        return str(value)
    if is_share(metric):
        return format_percent(float(value))
    unit = unit_of(metric)
    if unit in FORMATS:
        return FORMATS[unit](float(value))
    return f"{format_number(value)} {unit}".rstrip()


def sparkline(values: Sequence[float], width: int = 60) -> str:
    """Values as block characters, with the first and the last in figures."""
    some = values if len(values) <= width else [values[i] for i in np.linspace(0, len(values) - 1, width).astype(int)]
    return f"{format_number(values[0])} {blocks(some)} {format_number(values[-1])}"


def blocks(values: Sequence[float] | np.ndarray, floor: float | None = None) -> str:
    """One block character per value, from the lowest (or `floor`: 0 for counts) to the highest; equal ones lie low."""
    low, high = min(values) if floor is None else floor, max(values)
    return "".join(BLOCKS[round(float(v - low) / float(high - low) * 7) if high > low else 0] for v in values)


def aligned(cells: Sequence[str], html: bool = False) -> list[str]:
    """One right-aligned column, padded so that its decimal points meet; with spaces that stay, where it is `html`."""
    matches = [NUMBER.fullmatch(cell) for cell in cells]
    fractions, units = (max((len(m[part] or "") for m in matches if m), default=0) for part in ("fraction", "unit"))
    padded = []
    for cell, match in zip(cells, matches, strict=True):
        gap = ""
        if match is not None:
            missing = fractions - len(match["fraction"] or "")
            point = POINT if missing and not match["fraction"] else ""
            gap = point + FIGURE * (missing - len(point) + units - len(match["unit"] or ""))  # behind the unit
        padded.append(cell + (gap if html else " " * len(gap)))
    return padded
