"""Numbers as a reader sees them, with their units: the one place that formats bytes, tokens, seconds and shares.

A module that all rooms may import; standard library alone. Three significant digits; bytes in powers of 1024.
"""

from __future__ import annotations

from numbers import Integral, Real
from typing import Any

KIB, MIB, GIB = 2**10, 2**20, 2**30


def format_number(value: Any) -> str:
    """Three significant digits for a reader; text and whole numbers as they are: `0.0123`, `12,346`."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return str(value)
    if isinstance(value, Integral):
        return f"{int(value):,}"
    number = float(value)
    return f"{number:,.0f}" if abs(number) >= 1000 else f"{number:.3g}"


def format_bytes(nbytes: float) -> str:
    """`640 B`, `12.3 KiB`, `900 MiB`, `6.4 GiB`."""
    for size, unit in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if abs(nbytes) >= 1000 * size / 1024:
            return f"{format_number(nbytes / size)} {unit}"
    return f"{nbytes:.0f} B"


def format_seconds(seconds: float) -> str:
    """What something took: `0.0123 s`, `41.3 s`, `16.7 min`, `2.5 h`."""
    if seconds < 600:
        return f"{format_number(float(seconds))} s"
    return f"{format_number(seconds / 60)} min" if seconds < 6000 else f"{format_number(seconds / 3600)} h"


def format_age(seconds: float) -> str:
    """How long ago or how long to go, no finer than a reader asks: `3 s`, `12 min`, `3.5 h`, `2 d`."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 6000:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.3g} h" if seconds < 48 * 3600 else f"{seconds / 86400:.3g} d"


def format_count(count: float) -> str:
    """A count where its size is what matters: `512`, `3.1k`, `330k`, `7.6B`."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= 0.9995 * size:
            return f"{count / size:.3g}{letter}"
    return f"{count:.3g}"


def format_rate(tokens_per_second: float) -> str:
    """`3.1k tok/s`."""
    return f"{format_count(tokens_per_second)} tok/s"


def format_percent(share: float) -> str:
    """A share of 0 to 1: `3.1 %`."""
    return f"{format_number(100.0 * share)} %"


def format_share(part: float, whole: float) -> str:
    """`part` of `whole` as a percentage; nothing of nothing is `0 %`."""
    return format_percent(part / whole) if whole else "0 %"
