"""Numbers with their units: what each metric is measured in, shares as percentages, times and counts for a reader."""

from __future__ import annotations

from typing import Any

from rlbench.data.history import is_number
from rlbench.data.metrics import format_number

NATS = ("kl", "ref_kl", "entropy", "ppo_kl", "logprob_gap", "logprob_gap_max", "mismatch/kl", "mismatch/k3_kl")
UNITS = dict.fromkeys(NATS, "nats") | {"tokens_per_s": "tok/s", "length": "tokens", "length_max": "tokens"}
SHARES = ("clip_fraction", "clip_fraction_low", "clip_fraction_high", "truncated", "mismatch/ess")
"""Metrics between 0 and 1 that are read as percentages."""


def unit_of(metric: str) -> str:
    """What the metric is measured in; "" for a number without one."""
    return "s" if metric.startswith("seconds/") else UNITS.get(metric, "")


def labelled(metric: str) -> str:
    """The metric's name with its unit, as a heading: `kl, nats`."""
    unit = unit_of(metric)
    return f"{metric}, {unit}" if unit else metric


def with_unit(metric: str, value: Any) -> str:
    """A metric's value for a reader: `12,346 tok/s`, `3.1 %`."""
    if metric in SHARES and is_number(value):
        return f"{format_number(100.0 * float(value))} %"
    unit = unit_of(metric)
    return format_number(value) + (f" {unit}" if unit else "")


def percent(part: float, whole: float) -> str:
    """A share for a reader: `97 %`."""
    return f"{format_number(100.0 * part / whole)} %" if whole else "0 %"


def duration(seconds: float) -> str:
    """`3 s`, `12 min`, `3.5 h`, `2 d`."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 6000:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.3g} h" if seconds < 48 * 3600 else f"{seconds / 86400:.3g} d"


def short(count: float) -> str:
    """A count for a reader: 329600 is `330 k`, 7.6e9 is `7.6 B`."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.3g} {letter}"
    return f"{count:.3g}"
