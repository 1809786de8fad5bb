"""What `GET /state` says of a session: plain values, bounded, without secrets. docs/monitor-api.md is its schema."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

from rlbench.monitor import lease
from rlbench.monitor.running import ProgressPoll, Running
from rlbench.monitor.state import State, history, history_length
from rlbench.monitor.telemetry import Telemetry
from rlbench.monitor.view import view_of

HISTORY_DEFAULT, HISTORY_MAX = 50, 500
SNAPSHOT_FIELDS = ("label", "step", "version", "bytes", "fresh", "disk", "time")
ENGINE_STATE = ("weights", "kv_cache", "optimizer", "version", "pending")


def session_report(
    state: State,
    running: Running,
    progress: ProgressPoll,
    telemetry: Telemetry,
    records: int,
    *,
    alive: bool,
    beat_age_s: float,
    silent_s: float,
    last_error: dict[str, Any] | None,
) -> dict[str, Any]:
    """The session as plain values with its `records` last step records, and the view of it."""
    driver, config = state["driver"], state["config"]
    report = {
        **{key: state[key] for key in ("name", "epoch", "step", "version", "rollouts", "branch", "paused", "lengths")},
        **{key: config.get(key) for key in ("model", "seed")},
        "engines": [engine_report(name, record, telemetry) for name, record in state["engines"].items()],
        "running": [
            {"id": i, "what": call.what, "engine": call.engine, "since": call.since, "progress": progress.of(i)}
            for i, call in running.calls.items()
        ],
        "verbs": [{"what": verb.what, "since": verb.since} for verb in running.verbs.values()],
        "driver": driver and {"pid": driver["pid"], "mode": driver["mode"], "alive": alive, "age_s": beat_age_s},
        "lease": lease_report(driver, alive, silent_s, bool(running.calls)) | {"parks": lease.parks(state)},
        "snapshots": [
            {"id": i} | {key: fields.get(key) for key in SNAPSHOT_FIELDS} for i, fields in state["snapshots"].items()
        ],
        "history": [step_report(record) for record in history(state, records)],
        "history_total": history_length(state),
        "splits": list(running.marks.steps.splits),
        "last_error": last_error,
    }
    return report | {"view": view_of(report, time.time())}


def step_report(record: Mapping[str, Any]) -> dict[str, Any]:
    """A step's record without the text of the code it used, which is long: who looks has the hashes."""
    return {name: value for name, value in record.items() if not name.endswith("_source")}


def engine_report(name: str, record: Mapping[str, Any], telemetry: Telemetry) -> dict[str, Any]:
    """One engine: what it is, where its parts are and what they take, and its worker processes."""
    info, state = record.get("info", {}), record.get("state", {})
    pids, resident = record.get("pids", {}), telemetry.resident()
    return {
        "name": name,
        "kind": record.get("kind"),
        "executor": info.get("executor", "fsdp2" if record.get("kind") == "train" else None),
        "ready": "info" in record,
        "state": {key: state[key] for key in ENGINE_STATE if key in state}
        | ({"optimizer": "none"} if info.get("optimizer") == [] else {}),
        "broken": record.get("broken"),
        **telemetry.engine(pids),
        "workers": [
            {"name": actor, "pid": pids.get(actor), "resident": resident.get(actor)}
            for actor in record.get("actors", [])
        ],
    }


def lease_report(driver: Mapping[str, Any] | None, alive: bool, silent_s: float, busy: bool) -> dict[str, Any]:
    """How long the session outlives its driver; `left_s` is None while it is held."""
    seconds = lease.lease_of(driver)
    left = None if lease.is_held(driver, alive, busy) else max(0.0, seconds - silent_s)
    return {"seconds": seconds, "silent_s": silent_s, "left_s": left}


def plain(value: Any) -> Any:
    """The value as strict JSON has it: a number that is not finite becomes null, what JSON lacks becomes text."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(inner) for inner in value]
    number = getattr(value, "item", None)
    return plain(number()) if number is not None and getattr(value, "ndim", 0) == 0 else str(value)
