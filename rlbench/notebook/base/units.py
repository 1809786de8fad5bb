"""What each metric is measured in; how its numbers are written is `rlbench.units`'s."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlbench.data.record.history import is_number
from rlbench.data.record.metric_names import BY_NAME
from rlbench.units import format_number, format_percent, format_rate, format_seconds

FORMATS: dict[str, Callable[[float], str]] = {"tok/s": format_rate, "s": format_seconds}
SHOWN = ("nats", "tokens", "tok/s", "s")
"""Units that stand behind a number."""


def unit_of(metric: str) -> str:
    """What the metric is measured in; "" for a number without one."""
    if metric.startswith("seconds/"):
        return "s"
    unit = BY_NAME[metric].unit if metric in BY_NAME and metric != "tokens" else ""
    return unit if unit in SHOWN else ""


def is_share(metric: str) -> bool:
    """Whether it lies between 0 and 1 and is read as a percentage."""
    return metric in BY_NAME and BY_NAME[metric].unit == "share"


def labelled(metric: str) -> str:
    """The metric's name with its unit, as a heading: `kl, nats`."""
    unit = unit_of(metric)
    return f"{metric}, {unit}" if unit else metric


def with_unit(metric: str, value: Any) -> str:
    """A metric's value for a reader: `12.3k tok/s`, `3.1 %`."""
    if not is_number(value):
        return str(value)
    if is_share(metric):
        return format_percent(float(value))
    unit = unit_of(metric)
    if unit in FORMATS:
        return FORMATS[unit](float(value))
    return format_number(value) + (f" {unit}" if unit else "")
