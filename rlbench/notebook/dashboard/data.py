"""What the dashboard shows, as plain values: a pure function of what the monitor's endpoint said.

Keys that a monitor does not give (an older one, or nothing was measured yet) leave their panel in its empty state.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlbench.data.record.history import is_number
from rlbench.monitor.schema import Control, EngineView, SessionView, english
from rlbench.monitor.view import shortened
from rlbench.notebook.dashboard.memory import Memory, Sample, memory
from rlbench.notebook.live.progress import joined_histograms

CURVES = (
    ("reward", "reward", ""),
    ("kl", "KL", "nats"),
    ("entropy", "entropy", "nats"),
    ("clip_fraction", "clipped", ""),
    ("grad_norm", "grad norm", ""),
)
STEPS_SHOWN, LENGTHS_SHOWN = 100, 9
SPLIT_PARTS = ("rollout", "score", "train", "sync", "other", "idle")
UNANSWERED: SessionView = {
    "condition": "idle",
    "status": "idle",
    "facts": [],
    "phase": {"what": [], "busy": False, "fraction": None, "left": ""},
    "engines": [],
    "controls": [],
    "failure": None,
}
"""The view of a session whose monitor has not answered yet."""


@dataclass(frozen=True)
class Lengths:
    """Response lengths of one rollout, in tokens."""

    rollout: str
    samples: int
    edges: tuple[float, ...]
    counts: tuple[int, ...]
    truncated: float | None = None
    p50: float | None = None
    p90: float | None = None
    p99: float | None = None
    max: float | None = None


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
    """All that the dashboard shows of a session; `said` is its monitor's view of it."""

    name: str
    model: str
    step: int
    version: int
    branch: str
    said: SessionView
    memory: Memory
    lengths: tuple[Lengths, ...]
    curves: tuple[Curve, ...]
    split: Split | None
    gone: str = ""

    @property
    def phase(self) -> str:
        """`rollout 5 · 16/64 samples`, with "paused" where it is; "idle" where nothing runs."""
        what = list(map(english, self.said["phase"]["what"]))
        held = ["paused"] if self.busy and self.said["condition"] == "paused" else []
        return " · ".join([*what, *held]) or english(self.said["status"])

    @property
    def busy(self) -> bool:
        """Whether something runs."""
        return self.said["phase"]["busy"]

    @property
    def engines(self) -> Sequence[EngineView]:
        """The engines, in the order they were built."""
        return self.said["engines"]

    @property
    def buttons(self) -> Sequence[Control]:
        """The session's controls."""
        return [self._offered(control) for control in self.said["controls"]]

    @property
    def toggles(self) -> Sequence[Control]:
        """One control for each part of each engine, in their order."""
        return [self._offered(part["toggle"]) for engine in self.engines for part in engine["parts"]]

    @property
    def error(self) -> str:
        """`14:02:31 train_step: ValueError: …`"""
        failure = self.said["failure"]
        if not failure:
            return ""
        at = time.strftime("%H:%M:%S ", time.localtime(failure["time"])) if failure["time"] else ""
        return at + failure["text"]

    def _offered(self, control: Control) -> Control:
        """Of a session that is gone nothing can be pressed."""
        return {**control, "enabled": False, "title": self.gone} if self.gone else control


def view(
    state: Mapping[str, Any], samples: Sequence[Sample] = (), marks: Iterable[Mapping[str, Any]] = (), gone: str = ""
) -> View:
    """The dashboard of a session.

    Args:
        state: the answer of `GET /state`.
        samples, marks: of `GET /samples`, oldest first.
        gone: why nothing can be done any more (the session is closed); disables the controls.
    """
    return View(
        name=str(state.get("name", "")),
        model=shortened(state.get("model") or ""),
        step=int(state.get("step") or 0),
        version=int(state.get("version") or 0),
        branch=shortened(state.get("branch") or "main"),
        said=state.get("view") or UNANSWERED,
        memory=memory(samples, marks, state),
        lengths=(*map(_lengths, state.get("lengths", ())), *_growing(state.get("running", ())))[-LENGTHS_SHOWN:],
        curves=_curves(state.get("history", ())),
        split=_split(state.get("splits", ())),
        gone=gone,
    )


# -- lengths, metrics, time


def _lengths(found: Mapping[str, Any]) -> Lengths:
    counts = tuple(int(count) for count in found.get("counts", ()))
    edges = tuple(float(edge) for edge in found.get("edges", ()))
    measured = {name: found.get(name) for name in ("truncated", "p50", "p90", "p99", "max")}
    name = f"rollout {shortened(found.get('rollout'))}"
    return Lengths(name, int(found.get("samples") or sum(counts)), edges, counts, **measured)


def _growing(calls: Sequence[Mapping[str, Any]]) -> list[Lengths]:
    """Lengths of what a running rollout has finished so far, its replicas together; none before the first sample."""
    found = []
    for call in calls:
        told = [w["lengths"] for w in call.get("progress") or () if any((w.get("lengths") or {}).get("counts", ()))]
        if told:
            width, counts = joined_histograms(told)
            edges = tuple(float(i * width) for i in range(len(counts) + 1))
            found.append(Lengths(f"{shortened(call['what'])} so far", sum(counts), edges, tuple(counts)))
    return found


def _curves(history: Sequence[Mapping[str, Any]]) -> tuple[Curve, ...]:
    """Every metric of the panel, those that no step has with no points."""
    steps = [(int(record.get("step") or i + 1), record) for i, record in enumerate(history[-STEPS_SHOWN:])]
    return tuple(
        Curve(label, unit, tuple((step, float(f"{r[key]:.4g}")) for step, r in steps if _finite(r.get(key))))
        for key, label, unit in CURVES
    )


def _split(splits: Sequence[Mapping[str, Any]]) -> Split | None:
    if not splits:
        return None
    last = splits[-1]
    parts = tuple((part, float(last[part])) for part in SPLIT_PARTS if last.get(part) is not None)
    return Split(last.get("step"), float(last.get("seconds") or 0.0), parts, last.get("tokens_per_s"))


def _finite(value: Any) -> bool:
    return is_number(value) and math.isfinite(value)
