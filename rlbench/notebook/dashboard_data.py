"""What the dashboard shows, as plain values: a pure function of what the monitor's endpoint said.

Keys that a monitor does not give (an older one, or nothing was measured yet) leave their panel in its empty state.
"""

from __future__ import annotations

import collections
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlbench.notebook.dashboard_memory import Memory, Sample, memory
from rlbench.notebook.markup import CHIPS
from rlbench.units import format_bytes

CURVES = (
    ("reward", "reward", ""),
    ("kl", "KL", "nats"),
    ("entropy", "entropy", "nats"),
    ("clip_fraction", "clipped", ""),
    ("grad_norm", "grad norm", ""),
)
STEPS_SHOWN, LENGTHS_SHOWN = 100, 9
NAME_SHOWN, ERROR_SHOWN = 80, 300
SPLIT_PARTS = ("rollout", "score", "train", "sync", "other", "idle")
LEAST_FRACTION = 0.05
"""Below it the time that is left is a guess nobody should see."""

Json = dict[str, Any]


@dataclass(frozen=True)
class Part:
    """A part of an engine that can be offloaded: where it is, measured, and what a press would do."""

    name: str
    state: str
    sign: str
    word: str
    resident: bool
    verb: str
    title: str


@dataclass(frozen=True)
class EngineRow:
    """One engine: `note` is a warning where `warns`, else its version."""

    name: str
    kind: str
    parts: tuple[Part, ...]
    bytes: int | None
    note: str
    warns: bool


@dataclass(frozen=True)
class Phase:
    """What runs. `fraction` 0 to 1 and `left_s` where they are known."""

    text: str
    busy: bool
    fraction: float | None = None
    left_s: float | None = None


@dataclass(frozen=True)
class Control:
    """One control: the monitor's verb with its arguments, and what it will do in words; `key` is stable.

    `label` is what stands on it, `name` what a screen reader says.
    """

    key: str
    label: str
    name: str
    verb: str
    args: Json
    enabled: bool
    title: str
    pressed: bool | None = None


@dataclass(frozen=True)
class Lengths:
    """Response lengths of one rollout, in tokens."""

    rollout: str
    samples: int
    truncated: float | None
    p50: float | None
    p90: float | None
    p99: float | None
    max: float | None
    edges: tuple[float, ...]
    counts: tuple[int, ...]


@dataclass(frozen=True)
class Curve:
    """One metric over the last steps: (step, value)."""

    label: str
    unit: str
    points: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Split:
    """What the last step's seconds went to."""

    step: int | None
    seconds: float
    parts: tuple[tuple[str, float], ...]
    tokens_per_s: float | None


@dataclass(frozen=True)
class View:
    """All that the dashboard shows of a session."""

    name: str
    model: str
    step: int
    version: int
    branch: str
    phase: Phase
    engines: tuple[EngineRow, ...]
    controls: tuple[Control, ...]
    memory: Memory
    lengths: tuple[Lengths, ...]
    curves: tuple[Curve, ...]
    split: Split | None
    error: str


def view(
    state: Mapping[str, Any],
    samples: Sequence[Sample] = (),
    marks: Iterable[Mapping[str, Any]] = (),
    *,
    now: float,
    gone: str = "",
) -> View:
    """The dashboard of a session.

    Args:
        state: the answer of `GET /state`.
        samples, marks: of `GET /samples`, oldest first.
        now: Unix seconds, for the time that is left.
        gone: why nothing can be done any more (the session is closed); disables the controls.
    """
    engines = tuple(_engine(engine, state) for engine in state.get("engines", ()))
    return View(
        name=str(state.get("name", "")),
        model=_short(state.get("model") or ""),
        step=int(state.get("step") or 0),
        version=int(state.get("version") or 0),
        branch=_short(state.get("branch") or "main"),
        phase=_phase(state, now),
        engines=engines,
        controls=_controls(state, engines, gone),
        memory=memory(samples, marks, state),
        lengths=(*map(_lengths, state.get("lengths", ())), *_growing(state.get("running", ())))[-LENGTHS_SHOWN:],
        curves=_curves(state.get("history", ())),
        split=_split(state.get("splits", ())),
        error=_error(state.get("last_error")),
    )


# -- engines and what can be done with them


def _engine(engine: Mapping[str, Any], state: Mapping[str, Any]) -> EngineRow:
    known = [worker["resident"] for worker in engine.get("workers", ()) if worker.get("resident") is not None]
    note, warns = _note(engine, int(state.get("version") or 0))
    kinds = ("weights", "kv_cache") if engine.get("kind") == "inference" else ("weights", "optimizer")
    where, frees = engine.get("state", {}), engine.get("frees", {})
    held = engine.get("bytes", {})
    parts = tuple(
        _part(p, where[p], frees.get(p, held.get(p)), str(engine["name"]))
        for p in kinds
        if where.get(p, "none") != "none"
    )
    kind = f"{_short(engine.get('executor') or engine.get('kind') or '?')} ×{len(engine.get('workers', ()))}"
    return EngineRow(str(engine["name"]), kind, parts, sum(known) if known else None, note, warns)


def _note(engine: Mapping[str, Any], version: int) -> tuple[str, bool]:
    if engine.get("broken"):
        return f"{_short(engine['broken'])}: session.heal()", True
    if not engine.get("ready", True):
        return "being built", False
    held = engine.get("state", {}).get("version")
    if engine.get("kind") == "inference" and held is not None:
        behind = version - int(held)
        if behind:
            return f"v{held}, {behind} version{'s' if abs(behind) != 1 else ''} behind", True
        return f"v{held}", False
    return (f"v{version}" if engine.get("name") == "actor" else "frozen"), False


def _part(name: str, state: str, frees: int | None, engine: str) -> Part:
    sign, word = CHIPS.get(state, ("?", state))
    said, resident = part_name(name), state == "cuda"
    if not resident:
        title = f"Make {said} of {engine} resident again"
    elif name == "kv_cache":
        title = f"Release the {said} of {engine}" + (f": frees {format_bytes(frees)}" if frees else "")
    else:
        title = f"Offload {said} of {engine} to host" + (f": frees {format_bytes(frees)}" if frees else "")
        if frees == 0:
            title += ": here the device is host memory, nothing is freed"
    return Part(name, state, sign, word, resident, "offload" if resident else "onload", title)


def part_name(name: str) -> str:
    """`kv_cache` as a reader knows it: `KV cache`."""
    return name.replace("_", " ").replace("kv ", "KV ")


def _controls(state: Mapping[str, Any], engines: Sequence[EngineRow], gone: str) -> tuple[Control, ...]:
    """The buttons, then one toggle per engine and part."""
    running = [_short(call["what"]) for call in state.get("running", ())]
    names = list(dict.fromkeys([*(_short(verb["what"]) for verb in state.get("verbs", ())), *running]))
    busy = f"{', '.join(names)} runs: stop it first, or wait for it" if names else ""
    unbuilt = "" if all(e.get("ready", True) for e in state.get("engines", ())) else "the engines are being built"
    held = gone or busy or unbuilt
    paused = bool(state.get("paused"))

    def control(key: str, label: str, title: str, why_not: str, verb: str = "", **args: Any) -> Control:
        return Control(key, label, label, verb or key, args, not why_not, why_not or title)

    stop = f"Stop {', '.join(running)}: what is finished is kept"
    buttons = [
        control("stop", "stop", stop, gone or ("" if running else "nothing runs that could be stopped")),
        control("resume", "resume", "Let generation go on with the same tokens", gone)
        if paused
        else control("pause", "pause", "Hold generation after its current step; nothing is lost", gone),
        control("sync", "sync", f"Send the weights (v{state.get('version', 0)}) to the replicas, verified", held),
        control("snapshot", "snapshot", "Keep weights, optimizer, step and history in host memory", held),
    ]
    toggles = [
        Control(
            f"{row.name}/{part.name}",
            f"{part_name(part.name)} {part.sign} {part.word}",
            f"{part_name(part.name)} of {row.name}: {part.word}",
            part.verb,
            {"engine": row.name, "parts": [part.name]},
            not held,
            held or part.title,
            part.resident,
        )
        for row in engines
        for part in row.parts
    ]
    return (*buttons, *toggles)


# -- what runs


def _phase(state: Mapping[str, Any], now: float) -> Phase:
    calls = state.get("running", ())
    verbs = [_short(verb["what"]) for verb in state.get("verbs", ())]
    if not calls:
        if verbs:
            return Phase(", ".join(dict.fromkeys(verbs)), busy=True)
        return Phase("paused" if state.get("paused") else "idle", busy=False)
    call = max(calls, key=lambda one: one.get("since") or 0.0)
    text, fraction = _progress(call.get("progress") or ())
    what = _short(call["what"])
    if verbs and verbs[0] not in what:
        what = f"{verbs[0]}: {what}"
    if state.get("paused"):
        text = f"{text} · paused" if text else "paused"
    left = None
    if fraction is not None and fraction >= LEAST_FRACTION and call.get("since") and not state.get("paused"):
        left = (now - float(call["since"])) * (1 - fraction) / fraction
    return Phase(f"{what} · {text}" if text else what, True, fraction, left)


def _progress(workers: Sequence[Mapping[str, Any]]) -> tuple[str, float | None]:
    """`3/64 samples · 512 tokens` or `backward 7/16`, and the share that is done."""
    if any(worker.get("total") and "done" in worker for worker in workers):  # ranks go through the same number
        slowest = min((w for w in workers if w.get("total")), key=lambda w: w.get("done", 0) / w["total"])
        done, total = int(slowest.get("done", 0)), int(slowest["total"])
        return f"{slowest.get('phase', '')} {done}/{total}".strip(), done / total
    total = sum(int(worker.get("total") or 0) for worker in workers)
    if not total:
        return "", None
    finished = sum(int(worker.get("finished") or 0) for worker in workers)
    tokens = sum(int(worker.get("tokens") or 0) for worker in workers)
    return f"{finished}/{total} samples · {tokens:,} tokens", finished / total


# -- lengths, metrics, time


def _lengths(found: Mapping[str, Any]) -> Lengths:
    counts = tuple(int(count) for count in found.get("counts", ()))
    return Lengths(
        f"rollout {_short(found.get('rollout'))}",
        int(found.get("samples") or sum(counts)),
        found.get("truncated"),
        found.get("p50"),
        found.get("p90"),
        found.get("p99"),
        found.get("max"),
        tuple(float(edge) for edge in found.get("edges", ())),
        counts,
    )


def _growing(calls: Sequence[Mapping[str, Any]]) -> list[Lengths]:
    """Lengths of what a running rollout has finished so far, its replicas together; none before the first sample."""
    found = []
    for call in calls:
        told = [w["lengths"] for w in call.get("progress") or () if any((w.get("lengths") or {}).get("counts", ()))]
        if not told:
            continue
        width, counts = max(one["width"] for one in told), collections.Counter[int]()
        for one in told:  # widths are powers of two: narrow bins fit into wide ones
            for i, count in enumerate(one["counts"]):
                counts[i * one["width"] // width] += count
        bins = max(counts) + 1
        found.append(
            Lengths(
                f"{_short(call['what'])} so far",
                counts.total(),
                None,
                None,
                None,
                None,
                None,
                tuple(float(i * width) for i in range(bins + 1)),
                tuple(counts[i] for i in range(bins)),
            )
        )
    return found


def _curves(history: Sequence[Mapping[str, Any]]) -> tuple[Curve, ...]:
    """Every metric of the panel, those that no step has with no points."""
    return tuple(
        Curve(
            label,
            unit,
            tuple(
                (int(record.get("step") or i + 1), _rounded(record[key]))
                for i, record in enumerate(history[-STEPS_SHOWN:])
                if _finite(record.get(key))
            ),
        )
        for key, label, unit in CURVES
    )


def _split(splits: Sequence[Mapping[str, Any]]) -> Split | None:
    if not splits:
        return None
    last = splits[-1]
    parts = tuple((part, float(last[part])) for part in SPLIT_PARTS if last.get(part) is not None)
    return Split(last.get("step"), float(last.get("seconds") or 0.0), parts, last.get("tokens_per_s"))


def _error(last: Mapping[str, Any] | None) -> str:
    """`14:02:31 train_step: ValueError: …`"""
    if not last:
        return ""
    at = time.strftime("%H:%M:%S", time.localtime(last["time"])) if last.get("time") else ""
    said = f"{last.get('what') or 'a call'}: {last.get('kind')}: {last.get('message')}"
    return _short(f"{at} {said}".strip(), ERROR_SHOWN)


def _short(text: Any, most: int = NAME_SHOWN) -> str:
    said = str(text)
    return said if len(said) <= most else said[: most - 1] + "…"


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")
