"""When a session ends by itself: how long it outlives its driver."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

LEASE_S = {"script": 30.0, "notebook": 8 * 3600.0}
"""Seconds without a sign of the driver, by its mode; a driver's `lease_s` overrides them."""


def lease_of(driver: Mapping[str, Any] | None) -> float:
    """The lease in force, seconds."""
    return LEASE_S["script"] if driver is None else float(driver.get("lease_s", LEASE_S[driver["mode"]]))


def is_over(driver: Mapping[str, Any] | None, alive: bool, idle_s: float, busy: bool) -> bool:
    """True when nobody will come back to the session.

    A script's session ends some time after the script did, whatever still runs: nobody would fetch it. A notebook's
    kernel may restart, so its session stays until it has been idle for long; a running call is not idle.

    Args:
        driver: the driver's record; None before there was one.
        alive: its process lives.
        idle_s: seconds since its last sign (a script's heartbeat, a notebook's last call).
        busy: a call runs.
    """
    if driver is None:
        return idle_s > LEASE_S["script"]
    held = idle_s <= lease_of(driver)
    return not held and not (alive if driver["mode"] == "script" else busy)
