"""The cards of a session and its engines, from what the monitor knows of them: no worker is asked."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rlbench.errors import SessionError
from rlbench.monitor.schema import english
from rlbench.monitor.view import PARTS, PLACES
from rlbench.notebook.base.palette import OWNERS
from rlbench.notebook.cards.card import WARNING, Card, Cell, Grid, counted
from rlbench.units import format_age, format_bytes, format_count, format_number

METHODS_SHOWN = 12
ORDER = ("actor", "inference", "reference")
"""Engines as a reader looks for them; others follow as they were built."""
WORKERS = {"train": "rank", "inference": "replica"}
SHOWN = (
    *("name", "config", "engines", "step", "version", "branch", "driver", "paused", "running", "idle_s", "lease_s"),
    "defaults",
)
"""What of a session's state its card says."""


def session_card(state: Mapping[str, Any], samples: Sequence[Mapping[str, Any]]) -> Card:
    """The card of a session, from `SHOWN` of its monitor's state and its memory samples."""
    config, idle, branch = state["config"], state.get("idle_s"), state.get("branch", "main")
    doing = [*state["running"].values(), *(["paused"] if state.get("paused") else [])]
    facts = (
        config.get("model", ""),
        "reward model" if config.get("kind") == "reward" else "",
        f"step {state['step']}",
        f"v{state['version']}",
        f"seed {config.get('seed', 0)}",
        "" if branch == "main" else f"branch {branch}",
        ", ".join(doing) or ("" if idle is None else f"idle {format_age(idle)}"),
        _lease(state["lease_s"], state["driver"], state.get("park", False)),
    )
    engines = sorted(state["engines"].items(), key=lambda item: (*ORDER, item[0]).index(item[0]))
    parts = max((len(_parts(record)) for _, record in engines), default=0)
    rows: list[tuple[Cell, ...]] = []
    for name, record in engines:
        chips = chip_texts(_parts(record))
        nbytes, note = sum(_told(record, samples, "resident")), _note(record, state["version"])
        memory, version = format_bytes(nbytes) if nbytes else "", _version(name, record, state["version"])
        rows.append((name, _kind(record), *chips, *[""] * (parts - len(chips)), memory, version, note))
    chosen = [f"{option}={value} ({reason})" for option, value, reason in state.get("defaults", [])]
    notes = [f"by default: {'; '.join(chosen)}"] if chosen else []
    return Card(f"rlbench · {state['name']}", facts, [Grid(rows, numeric=frozenset({2 + parts}))], notes)


def engine_card(engine: Any) -> Card:
    """The card of one engine; a busy or dead worker does not matter."""
    if not engine.built:
        return Card(engine.name, ("not built",), notes=[f"{engine.name}.build(…) starts its workers"])
    try:
        state, samples = engine.link.state("engines", "version"), engine.link.samples(last=1)
    except SessionError as gone:
        return Card(engine.name, notes=[f"{WARNING}{gone}"])
    record = state["engines"].get(engine.name)
    if record is None:
        return Card(engine.name, notes=[f"{WARNING}its session has no engine {engine.name!r} any more"])
    nbytes, owners = sum(_told(record, samples, "resident")), _owners(record, samples)
    memory = (f"{format_bytes(nbytes)} resident" if nbytes else "not sampled yet") + (f": {owners}" if owners else "")
    rows = [("state", " · ".join(chip_texts(_parts(record)))), ("memory", memory), *_built_as(record)]
    methods = [str(method["name"]) for method in record.get("methods", [])]
    if methods:
        rows.append(("methods", shortened_list(methods, METHODS_SHOWN)))
    note, role = _note(record, state["version"]), str(record["kind"])
    facts = ("" if role == engine.name else role, _kind(record), _version(engine.name, record, state["version"]))
    return Card(engine.name, facts, [Grid(rows, labels=True)], [note] if note else [])


def sessions_card(records: Sequence[Mapping[str, Any]]) -> Card:
    """The sessions on a cluster, and those that are parked."""
    if not records:
        return Card("no sessions yet", notes=['rb.Session("tiny") starts one'])
    parked = [r for r in records if r.get("state") == "parked"]
    live = [(str(r["name"]), str(r.get("pid", "")), f"rb.attach({r['name']!r})") for r in records if r not in parked]
    grids = [Grid(live, ("name", "monitor's pid", "drive it from here"), frozenset({1}))] if live else []
    facts = []
    if parked:
        rows = [(str(r["name"]), *_parked_facts(r), f"rb.attach({r['name']!r})") for r in parked]
        grids.append(Grid(rows, ("parked", "model", "step", "on disk", "since", "bring it back"), frozenset({2, 3})))
        facts = [f"{len(parked)} parked, {format_bytes(sum(int(r.get('bytes', 0)) for r in parked))}"]
    return Card(counted(len(live), "session"), facts, grids)


def parked_card(record: Mapping[str, Any]) -> Card:
    """The card of a session that is parked, from what a list says of it."""
    name, (model, step, size, since) = str(record["name"]), _parked_facts(record)
    rows = [("on disk", f"{size}, {record['path']}"), ("bring it back", f"rb.attach({name!r})")]
    rows += [("not kept", "; ".join(map(str, record["lost"])))] if record.get("lost") else []
    facts = (model, f"step {step}", f"v{record.get('version', '?')}", f"parked {since}")
    return Card(f"rlbench · {name}", facts, [Grid(rows, labels=True)])


def _parked_facts(record: Mapping[str, Any]) -> tuple[str, str, str, str]:
    """Model, step, size and age, as far as they are known."""
    age = f"{format_age(max(0.0, time.time() - record['time']))} ago" if "time" in record else "?"
    known = (str(record.get("model", "?")), str(record.get("step", "?")))
    return (*known, format_bytes(record["bytes"]) if "bytes" in record else "?", age)


def chip_texts(states: Mapping[str, str]) -> list[str]:
    """`weights ● resident` for each part of an engine."""
    places = {part: PLACES.get(state, ("?", state)) for part, state in states.items()}
    return [f"{part.replace('_', ' ')} {sign} {english(word)}" for part, (sign, word) in places.items()]


def shortened_list(names: Sequence[str], most: int) -> str:
    """The first `most` names, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _lease(seconds: float, driver: Mapping[str, Any] | None, parks: bool) -> str:
    shown = f"{seconds / 3600:g} h" if seconds >= 3600 else f"{seconds:g} s"
    notebook = driver is not None and driver["mode"] == "notebook"
    return f"{'parked' if parks else 'ends'} {shown} after its {'kernel' if notebook else 'script'}"


def _kind(record: Mapping[str, Any]) -> str:
    return f"{record.get('info', {}).get('executor', 'fsdp2')} ×{len(record.get('actors', []))}"


def _parts(record: Mapping[str, Any]) -> dict[str, str]:
    """Where its parts are: cuda, cpu, meta, …"""
    state = record.get("state", {})
    parts = {part: str(state[part]) for part in PARTS.get(str(record["kind"]), ()) if part in state}
    if "optimizer" in parts and record.get("info", {}).get("optimizer") == []:
        parts["optimizer"] = "none"
    return parts


def _held(record: Mapping[str, Any], version: int) -> int | None:
    """The version of its weights; `version` is the trainer's."""
    own: int | None = record.get("state", {}).get("version")
    return own if record["kind"] == "inference" else version


def _version(name: str, record: Mapping[str, Any], version: int) -> str:
    if record.get("info", {}).get("trainable") == 0 or name == "reference":
        return "frozen"
    held = _held(record, version)
    return "" if held is None else f"v{held}"


def _note(record: Mapping[str, Any], version: int) -> str:
    """What a person has to act on."""
    if record.get("broken"):
        return f"{WARNING}{record['broken']}"
    held = _held(record, version)
    if held is None or held == version:
        return ""
    count = "one version" if version - held == 1 else f"{version - held} versions"
    return f"{WARNING}{count} behind: session.sync_weights()"


def _told(record: Mapping[str, Any], samples: Sequence[Mapping[str, Any]], what: str) -> Iterable[Any]:
    """What the last sample says of each worker."""
    sample = samples[-1].get(what, {}) if samples else {}
    return [sample[actor] for actor in record.get("actors", []) if sample.get(actor)]


def _owners(record: Mapping[str, Any], samples: Sequence[Mapping[str, Any]]) -> str:
    """Bytes by owner; empty where nobody asked the workers lately."""
    told = _told(record, samples, "owners")
    totals = {owner: sum(int(one.get(owner) or 0) for one in told) for owner in OWNERS}
    return " · ".join(f"{owner.replace('_', ' ')} {format_bytes(total)}" for owner, total in totals.items() if total)


def _built_as(record: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Names and values of what the engine was built as."""
    info, state = record.get("info", {}), record.get("state", {})
    rows = []
    if "parameters" in info:
        trained = info.get("trainable", info["parameters"])
        share = {0: "frozen", info["parameters"]: "all trained"}.get(trained, f"{format_count(trained)} trained")
        rows.append(("parameters", f"{format_count(info['parameters'])}, {share}"))
    if "dtype" in info:
        rows.append(("dtype", str(info["dtype"])))
    rows.append(("workers", _workers(record)))
    if info.get("optimizer"):
        rate = "" if state.get("lr") is None else f", lr {format_number(state['lr'])}"
        rows.append(("optimizer", ", ".join(map(str, info["optimizer"])) + rate))
    if "max_model_len" in info:
        rows.append(("longest", f"{format_number(info['max_model_len'])} tokens"))
    if info.get("kv_cache_bytes"):
        rows.append(("KV cache", format_bytes(info["kv_cache_bytes"])))
    if info.get("path") or info.get("source"):
        rows.append(("model", str(info.get("path") or info["source"])))
    return rows


def _workers(record: Mapping[str, Any]) -> str:
    """`2 ranks on cpu, sharded over 2`, `1 replica on cuda, 2 devices each`."""
    info, trains = record.get("info", {}), record["kind"] == "train"
    device = str(info.get("device", "")).partition(":")[0]
    said = counted(len(record.get("actors", [])), WORKERS.get(record["kind"], "worker"))
    said += f" on {device}" if device else ""
    spread = int(info.get("shard_size" if trains else "tensor_parallel_size") or 1)
    if spread > 1:
        said += f", sharded over {spread}" if trains else f", {spread} devices each"
    return said
