"""What a session's report says to a reader: computed here, once, for every drawing of it. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlbench.monitor.schema import Condition, Control, EngineView, Failure, Part, Phase, SessionView, Text, plural, text
from rlbench.units import format_age, format_bytes, format_number

NAME_SHOWN, ERROR_SHOWN = 80, 300
LEAST_FRACTION = 0.05
"""Below it the time that is left is a guess nobody should see."""
PARTS = {"train": ("weights", "optimizer"), "inference": ("weights", "kv_cache")}
PART_NAMES: dict[str, Text] = {
    "weights": text("weights"),
    "gradients": text("gradients"),
    "optimizer": text("optimizer"),
    "kv_cache": text("KV cache"),
    "activations": text("activations"),
    "other": text("other"),
}
PLACES: dict[str, tuple[str, Text]] = {
    "cuda": ("●", text("resident")),
    "cpu": ("○", text("host")),
    "meta": ("◌", text("released")),
    "empty": ("◌", text("empty")),
    "torn": ("✕", text("torn")),
    "none": ("–", text("none")),
}
"""Where a part of an engine can be: its sign, and always the word."""

STATUS: dict[str, Text] = {"paused": text("paused"), "running": text("running"), "idle": text("idle")}

Json = Mapping[str, Any]


def view_of(report: Json, now: float) -> SessionView:
    """Return the view of a session; `report`: the rest of the answer of `GET /state`, `now`: Unix seconds."""
    condition, blocked = _condition(report), _blocked(report)
    gone = text("script ended") if (report.get("driver") or {}).get("mode") == "script" else text("kernel gone")
    return {
        "condition": condition,
        "status": gone if condition == "lost" else STATUS[condition],
        "facts": _facts(report, condition),
        "phase": _phase(report, now),
        "engines": [_engine(engine, int(report["version"]), blocked) for engine in report["engines"]],
        "controls": _controls(report, blocked),
        "failure": _failure(report.get("last_error")),
    }


def shortened(value: Any, most: int = NAME_SHOWN) -> str:
    """Text of somebody else's, cut to what one line can hold."""
    said = str(value)
    return said if len(said) <= most else said[: most - 1] + "…"


# -- the session


def _condition(report: Json) -> Condition:
    driver = report.get("driver")
    if driver is not None and not driver["alive"]:
        return "lost"
    if report["paused"]:
        return "paused"
    return "running" if report["running"] or report["verbs"] else "idle"


def _facts(report: Json, condition: Condition) -> list[Text]:
    """Name model, step, version; the branch where it is another, and how long a session nobody drives will last."""
    facts: list[Text] = [shortened(report["model"])] if report.get("model") else []
    facts += [text("step %1", report["step"]), f"v{report['version']}"]
    if report["branch"] != "main":
        facts.append(shortened(report["branch"]))
    lease = report.get("lease") or {}
    if lease.get("left_s") is not None and condition == "lost":
        left = format_age(lease["left_s"])
        facts.append(text("parked in %1", left) if lease.get("parks") else text("ends in %1", left))
    return facts


def _failure(last: Json | None) -> Failure | None:
    if not last:
        return None
    line = f"{last.get('what') or 'a call'}: {last.get('kind')}: {last.get('message')}"
    return {"time": last.get("time"), "text": shortened(line, ERROR_SHOWN)}


# -- what runs


def _phase(report: Json, now: float) -> Phase:
    verbs = list(dict.fromkeys(shortened(verb["what"]) for verb in report["verbs"]))
    if not report["running"]:
        return {"what": [", ".join(verbs)] if verbs else [], "busy": bool(verbs), "fraction": None, "left": ""}
    call = max(report["running"], key=lambda one: one.get("since") or 0.0)
    what = shortened(call["what"])
    progress, fraction = _progress(call.get("progress") or ())
    left: Text = ""
    if fraction is not None and fraction >= LEAST_FRACTION and call.get("since") and not report["paused"]:
        seconds = max(0.0, now - float(call["since"])) * (1 - fraction) / fraction
        left = text("%1 left", format_age(seconds))
    named = f"{verbs[0]}: {what}" if verbs and verbs[0] not in what else what
    return {"what": [named, *progress], "busy": True, "fraction": fraction, "left": left}


def _progress(workers: Sequence[Json]) -> tuple[list[Text], float | None]:
    """`3/64 samples · 512 tokens` or `backward 7/16`, and the share that is done."""
    ranks = [worker for worker in workers if worker.get("total") and worker.get("done") is not None]
    if ranks:  # they go through the same number: what counts is the slowest
        slowest = min(ranks, key=lambda worker: worker["done"] / worker["total"])
        done, total = int(slowest["done"]), int(slowest["total"])
        return [f"{shortened(slowest.get('phase', ''))} {done}/{total}".strip()], min(1.0, done / total)
    total, finished, tokens = (sum(int(w.get(key) or 0) for w in workers) for key in ("total", "finished", "tokens"))
    if not total:
        return [], None
    said = text("%1/%2 samples · %3 tokens", finished, total, format_number(tokens))
    return [said], min(1.0, finished / total)


# -- what can be done


def _blocked(report: Json) -> Text:
    """Why nothing that drives the session can be done now; empty where it can."""
    if names := dict.fromkeys(shortened(one["what"]) for one in (*report["verbs"], *report["running"])):
        return text("%1 runs: stop it first, or wait for it", ", ".join(names))
    built = all(engine.get("ready", True) for engine in report["engines"])
    return "" if built else text("the engines are being built")


def _controls(report: Json, blocked: Text) -> list[Control]:
    running = ", ".join(shortened(call["what"]) for call in report["running"])
    idle: Text = "" if running else text("nothing runs that could be stopped")
    hold = ("resume", text("resume"), text("Let generation go on with the same tokens"))
    if not report["paused"]:
        hold = ("pause", text("pause"), text("Hold generation after its current step; nothing is lost"))
    sync = text("Send the weights (v%1) to the replicas, verified", report["version"])
    snapshot = text("Keep weights, optimizer, step and history in host memory")
    return [
        _control("stop", text("stop"), text("Stop %1: what is finished is kept", running), idle),
        _control(*hold),
        _control("sync", text("sync"), sync, blocked) | {"drives": True},
        _control("snapshot", text("snapshot"), snapshot, blocked) | {"drives": True},
    ]


def _control(verb: str, label: Text, title: Text, why_not: Text = "") -> Control:
    """Describe a button of the session; `why_not` disables it and is said in place of what it does."""
    named: Any = {"key": verb, "verb": verb, "args": {}, "label": label, "name": label, "command": label}
    return named | {"title": why_not or title, "enabled": not why_not, "drives": False, "pressed": None}


# -- engines


def _engine(engine: Json, version: int, blocked: Text) -> EngineView:
    where = engine.get("state", {})
    parts = [part for part in PARTS.get(str(engine["kind"]), PARTS["train"]) if where.get(part, "none") != "none"]
    known = [worker["resident"] for worker in engine["workers"] if worker.get("resident") is not None]
    note, warns = _note(engine, version)
    return {
        "name": shortened(engine["name"]),
        "kind": f"{shortened(engine.get('executor') or engine['kind'])} ×{len(engine['workers'])}",
        "parts": [_part(engine, part, blocked) for part in parts],
        "toggle": _toggle_all(engine, parts, blocked) if parts else None,
        "bytes": sum(known) if known else None,
        "note": note,
        "warns": warns,
    }


def _note(engine: Json, version: int) -> tuple[Text, bool]:
    if engine.get("broken"):
        return text("%1: session.heal()", shortened(engine["broken"])), True
    if not engine.get("ready", True):
        return text("being built"), False
    own = engine.get("state", {}).get("version")
    if engine["kind"] == "inference" and own is not None:
        behind = version - int(own)
        if behind:
            return plural("%2, %1 version behind", "%2, %1 versions behind", behind, f"v{own}"), True
        return f"v{own}", False
    return (f"v{version}" if engine["name"] == "actor" else text("frozen")), False


def _part(engine: Json, part: str, blocked: Text) -> Part:
    state = engine["state"][part]
    sign, word = PLACES.get(state, ("?", shortened(state)))
    shown = PART_NAMES[part]
    label, name = text("%1 %2 %3", shown, sign, word), text("%1 of %2: %3", shown, shortened(engine["name"]), word)
    toggle = _toggle(engine, f"{engine['name']}/{part}", [part], blocked, label, name)
    return {"name": part, "shown": shown, "sign": sign, "word": word, "resident": state == "cuda", "toggle": toggle}


def _toggle_all(engine: Json, parts: Sequence[str], blocked: Text) -> Control:
    """Away with all that is resident; where nothing is, back with all of it."""
    resident = [part for part in parts if engine["state"][part] == "cuda"]
    label = text("offload") if resident else text("onload")
    return _toggle(engine, str(engine["name"]), resident or parts, blocked, label, label)


def _toggle(engine: Json, key: str, parts: Sequence[str], blocked: Text, label: Text, name: Text) -> Control:
    """Moves parts that are all resident, or all away."""
    resident = engine["state"][parts[0]] == "cuda"
    owner = shortened(engine["name"])
    shown = PART_NAMES[parts[0]]
    for part in parts[1:]:
        shown = text("%1, %2", shown, PART_NAMES[part])
    command = text("offload %1 of %2", shown, owner) if resident else text("onload %1 of %2", shown, owner)
    button = _control("offload" if resident else "onload", label, _move_title(engine, parts, shown, resident), blocked)
    args = {"engine": engine["name"], "parts": list(parts)}
    return button | {"key": key, "args": args, "name": name, "command": command, "drives": True, "pressed": resident}


def _move_title(engine: Json, parts: Sequence[str], shown: Text, resident: bool) -> Text:
    owner = shortened(engine["name"])
    if not resident:
        return text("Make %1 of %2 resident again", shown, owner)
    if "kv_cache" not in parts:
        away = text("Offload %1 of %2 to host", shown, owner)
    elif len(parts) == 1:
        away = text("Release the %1 of %2", shown, owner)
    else:
        away = text("Offload %1 of %2", shown, owner)
    frees = [engine.get("frees", {}).get(part, engine.get("bytes", {}).get(part)) for part in parts]
    known = [nbytes for nbytes in frees if nbytes is not None]
    if not known:
        return away
    if not sum(known):
        return text("%1: here the device is host memory, nothing is freed", away)
    return text("%1: frees %2", away, format_bytes(sum(known)))
