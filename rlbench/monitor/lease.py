"""When a session ends by itself, or is parked: how long it outlives its driver."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

LEASE_S = {"script": 30.0, "notebook": 8 * 3600.0}
"""Seconds that a session outlives its driver, by the driver's mode; a driver's `lease_s` overrides them."""


def lease_of(driver: Mapping[str, Any] | None) -> float:
    """Return the lease in force, seconds."""
    return LEASE_S["script"] if driver is None else float(driver.get("lease_s", LEASE_S[driver["mode"]]))


def is_held(driver: Mapping[str, Any] | None, alive: bool, busy: bool) -> bool:
    """Tell whether the session lasts for as long as its driver's process lives (`alive`) or a call runs (`busy`).

    A notebook's kernel may be restarted, so what still runs keeps its session; what a dead script runs nobody fetches.
    """
    return driver is not None and (alive or (driver["mode"] == "notebook" and busy))


def is_over(driver: Mapping[str, Any] | None, alive: bool, silent_s: float, busy: bool) -> bool:
    """Tell whether nothing holds the session and its driver has been silent for longer than its lease."""
    return not is_held(driver, alive, busy) and silent_s > lease_of(driver)


def parks(state: Mapping[str, Any]) -> bool:
    """Tell whether the session then goes to disk, not away: one that asked for it, and has all its engines."""
    built = bool(state["config"]) and all("info" in engine for engine in state["engines"].values())
    return built and bool(state["park"])
