"""Columns of numbers aligned at the decimal point, with their units; what is no number stays as it is."""

from __future__ import annotations

import re
from collections.abc import Sequence

NUMBER = re.compile(r"(?P<whole>[~+−-]?[\d,]+)(?P<fraction>\.\d+)?(?P<unit> \S.*)?")
FIGURE, POINT = "\u2007", "\u2008"
"""Spaces as wide as a digit and as a decimal point, where digits are (`tabular-nums`); readers of text see spaces."""


def aligned(cells: Sequence[str], html: bool = False) -> list[str]:
    """The cells of one right-aligned column, padded so that their decimal points meet.

    Args:
        html: pad with spaces that HTML keeps.
    """
    found = [NUMBER.fullmatch(cell) for cell in cells]
    fractions = max((len(match["fraction"] or "") for match in found if match), default=0)
    units = max((len(match["unit"] or "") for match in found if match), default=0)
    return [
        cell if match is None else _padded(match, fractions, units, html)
        for cell, match in zip(cells, found, strict=True)
    ]


def _padded(match: re.Match[str], fractions: int, units: int, html: bool) -> str:
    fraction, unit = match["fraction"] or "", match["unit"] or ""
    missing = fractions - len(fraction)
    point = 1 if missing and not fraction else 0
    gap = POINT * point + FIGURE * (missing - point + units - len(unit))  # behind the unit: it stays at its number
    return match[0] + (gap if html else " " * len(gap))
