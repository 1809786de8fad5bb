"""What the session card says, as plain values; `rlbench.notebook` lays it out."""

from __future__ import annotations

from typing import Any

from rlbench.notebook.cards.engine_facts import engine_facts
from rlbench.notebook.cards.views import sessions_card

ORDER = {"actor": 0, "inference": 1, "reference": 2}
"""Engines as a reader looks for them; others follow as they were built."""


class Sessions(list[dict[str, Any]]):
    """The sessions on a cluster, one dict each; shown as a table."""

    def __repr__(self) -> str:
        return sessions_card(self).text()


def card_facts(state: dict[str, Any], samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Facts of a session from its monitor's state and memory samples.

    `engines` holds an `EngineFacts` each; `phase` is what runs, "" where nothing does, and `idle_s` since when.
    """
    config = state["config"]
    phase = [*state["running"].values(), *(["paused"] if state.get("paused") else [])]
    sample = samples[-1] if samples else None
    return {
        "name": state["name"],
        "model": config.get("model", ""),
        "seed": config.get("seed", 0),
        "step": state["step"],
        "version": state["version"],
        "phase": ", ".join(phase),
        "branch": state.get("branch", "main"),
        "idle_s": state.get("idle_s"),
        "lease": _lease(state["lease_s"], state["driver"]),
        "engines": [
            engine_facts(name, record, state["version"], sample)
            for name, record in sorted(state["engines"].items(), key=lambda item: ORDER.get(item[0], len(ORDER)))
        ],
    }


def _lease(seconds: float, driver: dict[str, Any] | None) -> str:
    shown = f"{seconds / 3600:g} h" if seconds >= 3600 else f"{seconds:g} s"
    notebook = driver is not None and driver["mode"] == "notebook"
    return f"ends {shown} after its {'kernel' if notebook else 'script'}"
