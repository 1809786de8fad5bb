"""When a session ends by itself: how long it outlives its driver."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

LEASE_S = {"script": 30.0, "notebook": 8 * 3600.0}
"""Seconds that a session outlives its driver, by the driver's mode; a driver's `lease_s` overrides them."""


def lease_of(driver: Mapping[str, Any] | None) -> float:
    """The lease in force, seconds."""
    return LEASE_S["script"] if driver is None else float(driver.get("lease_s", LEASE_S[driver["mode"]]))


def is_held(driver: Mapping[str, Any] | None, alive: bool, busy: bool) -> bool:
    """Whether the session lasts for as long as it is like this.

    A process that lives keeps its session, however long it makes no call: somebody may come back to the notebook, and
    what it trained is nowhere else. A notebook's kernel may be restarted, so what still runs keeps its session too; of
    a script that died, nobody would fetch it.

    Args:
        driver: the driver's record; None before there was one.
        alive: its process lives.
        busy: a call runs.
    """
    return driver is not None and (alive or (driver["mode"] == "notebook" and busy))


def is_over(driver: Mapping[str, Any] | None, alive: bool, silent_s: float, busy: bool) -> bool:
    """True when nobody will come back to the session: nothing holds it, and its lease has run out.

    Args:
        driver, alive, busy: as of `is_held`.
        silent_s: seconds since the last call, or since the driver was last seen alive.
    """
    return not is_held(driver, alive, busy) and silent_s > lease_of(driver)
