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

from rlbench.monitor.schema import Control, EngineView, SessionView, english
from rlbench.monitor.view import shortened
from rlbench.notebook.dashboard_memory import Memory, Sample, memory

CURVES = (
    ("reward", "reward", ""),
    ("kl", "KL", "nats"),
    ("entropy", "entropy", "nats"),
    ("clip_fraction", "clipped", ""),
    ("grad_norm", "grad norm", ""),
)
STEPS_SHOWN, LENGTHS_SHOWN = 100, 9
SPLIT_PARTS = ("rollout", "score", "train", "sync", "other", "idle")


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
    """All that the dashboard shows of a session; `said` is what its monitor says of it, None before it answered."""

    name: str
    model: str
    step: int
    version: int
    branch: str
    said: SessionView | None
    memory: Memory
    lengths: tuple[Lengths, ...]
    curves: tuple[Curve, ...]
    split: Split | None
    gone: str = ""

    @property
    def phase(self) -> str:
        """`rollout 5 · 16/64 samples`, with "paused" where it is; "idle" where nothing runs."""
        if self.said is None:
            return "idle"
        what = list(map(english, self.said["phase"]["what"]))
        return " · ".join([*what, "paused"] if self.paused else what) or english(self.said["status"])

    @property
    def paused(self) -> bool:
        """Whether generation is held while something runs."""
        return self.said is not None and self.busy and self.said["condition"] == "paused"

    @property
    def busy(self) -> bool:
        """Whether something runs."""
        return self.said is not None and self.said["phase"]["busy"]

    @property
    def engines(self) -> Sequence[EngineView]:
        """The engines, in the order they were built."""
        return () if self.said is None else self.said["engines"]

    @property
    def buttons(self) -> Sequence[Control]:
        """The session's controls."""
        return [] if self.said is None else [self._offered(control) for control in self.said["controls"]]

    @property
    def toggles(self) -> Sequence[Control]:
        """One control for each part of each engine, in their order."""
        return [self._offered(part["toggle"]) for engine in self.engines for part in engine["parts"]]

    @property
    def error(self) -> str:
        """`14:02:31 train_step: ValueError: …`"""
        failure = self.said and self.said["failure"]
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
        said=state.get("view"),
        memory=memory(samples, marks, state),
        lengths=(*map(_lengths, state.get("lengths", ())), *_growing(state.get("running", ())))[-LENGTHS_SHOWN:],
        curves=_curves(state.get("history", ())),
        split=_split(state.get("splits", ())),
        gone=gone,
    )


# -- lengths, metrics, time


def _lengths(found: Mapping[str, Any]) -> Lengths:
    counts = tuple(int(count) for count in found.get("counts", ()))
    return Lengths(
        f"rollout {shortened(found.get('rollout'))}",
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
                f"{shortened(call['what'])} so far",
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


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")
