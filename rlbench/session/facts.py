"""What the session card says, as plain values; views only lay it out."""

from __future__ import annotations

from typing import Any


def card_facts(state: dict[str, Any], samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Facts of a session from its monitor's state and memory samples."""
    resident = samples[-1]["resident"] if samples else {}
    config = state["config"]
    phase = [*state["running"].values(), *(["paused"] if state.get("paused") else [])]
    return {
        "name": state["name"], "model": config.get("model", ""), "seed": config.get("seed", 0), "step": state["step"],
        "version": state["version"], "phase": ", ".join(phase),
        "lease": _lease(state["lease_s"], state["driver"]),
        "engines": [_engine(name, e, state["version"], resident) for name, e in state["engines"].items()],
    }  # fmt: skip


def text_card(facts: dict[str, Any]) -> str:
    """The card as text."""
    where = f"step {facts['step']} · v{facts['version']} · seed {facts['seed']} · {facts['lease']}"
    phase = f" · {facts['phase']}" if facts["phase"] else ""
    lines = [f"rlbench · {facts['name']} ({facts['model']})   {where}{phase}"]
    for engine in facts["engines"]:
        parts = "   ".join(f"{part} {state}" for part, state in engine["state"].items())
        note = f"⚠ {engine['note']}" if engine["note"] else engine["version"]
        lines.append(
            f"{engine['name']:<10} {engine['kind']:<9} {parts}   {engine['bytes'] / 2**30:.3g} GiB   {note}"
        )
    return "\n".join(lines)


def _lease(seconds: float, driver: dict[str, Any] | None) -> str:
    shown = f"{seconds / 3600:g} h" if seconds >= 3600 else f"{seconds:g} s"
    script = driver is None or driver["mode"] == "script"
    return f"ends {shown} after its script" if script else f"ends after {shown} idle"


def _engine(name: str, record: dict[str, Any], version: int, resident: dict[str, int]) -> dict[str, Any]:
    info, state = record.get("info", {}), record.get("state", {})
    inference = record["kind"] == "inference"
    held = state.get("version")
    note = record.get("broken") or ""
    if not note and inference and held is not None and held != version:
        behind = version - held
        note = f"v{held}, {behind} version{'s' if behind != 1 else ''} behind: session.sync_weights()"
    parts = ("weights", "kv_cache") if inference else ("weights", "optimizer")
    return {
        "name": name,
        "kind": f"{info.get('executor', 'fsdp2')} ×{len(record.get('actors', []))}",
        "state": {part: state[part] for part in parts if part in state},
        "bytes": sum(resident.get(actor, 0) for actor in record.get("actors", [])),
        "version": f"v{held}"
        if inference and held is not None
        else "frozen"
        if name == "reference"
        else f"v{version}",
        "note": note,
    }
