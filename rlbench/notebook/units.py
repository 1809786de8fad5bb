"""What each metric is measured in; how its numbers are written is `rlbench.units`'s."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlbench.data.history import is_number
from rlbench.units import format_number, format_percent, format_rate, format_seconds

NATS = ("kl", "ref_kl", "entropy", "ppo_kl", "logprob_gap", "logprob_gap_max", "mismatch/kl", "mismatch/k3_kl")
UNITS = dict.fromkeys(NATS, "nats") | {"tokens_per_s": "tok/s", "length": "tokens", "length_max": "tokens"}
FORMATS: dict[str, Callable[[float], str]] = {"tok/s": format_rate, "s": format_seconds}
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
    """A metric's value for a reader: `12.3k tok/s`, `3.1 %`."""
    if not is_number(value):
        return str(value)
    if metric in SHARES:
        return format_percent(float(value))
    unit = unit_of(metric)
    if unit in FORMATS:
        return FORMATS[unit](float(value))
    return format_number(value) + (f" {unit}" if unit else "")
