"""What the dashboard shows, as plain values: a pure function of what the monitor's endpoint said."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlbench.data.record.history import is_number
from rlbench.data.record.metric_names import is_evaluated_reward
from rlbench.monitor.schema import Control, EngineView, Phase, SessionView, english
from rlbench.monitor.view import shortened
from rlbench.notebook.live.progress import joined_histograms

CURVES = (
    ("reward", "reward", ""),
    ("kl", "KL", "nats"),
    ("entropy", "entropy", "nats"),
    ("clip_fraction", "clipped", ""),
    ("grad_norm", "grad norm", ""),
)
AT_TIMES = (("no_signal", "no signal", ""),)  # shown where a step has some of it
STEPS_SHOWN, LENGTHS_SHOWN, EVALUATED, LABEL_SHOWN = 100, 9, 4, 24
MEASURED = ("truncated", "p50", "p90", "p99", "max")
SPLIT_PARTS = ("rollout", "score", "train", "sync", "other", "idle")
Json = Mapping[str, Any]
IDLE: Phase = {"what": [], "busy": False, "fraction": None, "left": ""}
UNANSWERED = SessionView(condition="idle", status="idle", facts=[], phase=IDLE, engines=[], controls=[], failure=None)
"""The view of a session whose monitor has not answered yet."""


@dataclass(frozen=True)
class DashboardView:
    """What the dashboard shows of a session beside its memory; `said` is its monitor's view of it.

    JSON for the page: `lengths` of one rollout each, with tokens at the `edges` of bins; `curves` of metrics, their
    `points` (step, value); `split`, what the last step's seconds went to. `gone`: why nothing can be done any more.
    """

    name: str
    model: str
    step: int
    version: int
    branch: str
    said: SessionView
    lengths: list[Json]
    curves: list[Json]
    split: Json | None
    gone: str = ""

    @property
    def phase(self) -> str:
        """`rollout 5 · 16/64 samples`, with "paused" where it is; "idle" where nothing runs."""
        what = list(map(english, self.said["phase"]["what"]))
        held = ["paused"] if self.said["phase"]["busy"] and self.said["condition"] == "paused" else []
        return " · ".join([*what, *held]) or english(self.said["status"])

    @property
    def engines(self) -> Sequence[EngineView]:
        """The engines, in the order they were built."""
        return self.said["engines"]

    @property
    def buttons(self) -> Sequence[Control]:
        """The session's controls."""
        return self._offered(self.said["controls"])

    @property
    def toggles(self) -> Sequence[Control]:
        """One control for each part of each engine, in their order."""
        return self._offered([part["toggle"] for engine in self.engines for part in engine["parts"]])

    @property
    def error(self) -> str:
        """`14:02:31 train_step: ValueError: …`"""
        failure = self.said["failure"]
        if not failure:
            return ""
        at = time.strftime("%H:%M:%S ", time.localtime(failure["time"])) if failure["time"] else ""
        return at + failure["text"]

    def _offered(self, controls: Sequence[Control]) -> Sequence[Control]:
        return [{**control, "enabled": False, "title": self.gone} for control in controls] if self.gone else controls


def view(state: Json, gone: str = "") -> DashboardView:
    """The dashboard of a session; `state`: the answer of `GET /state`."""
    return DashboardView(
        name=str(state.get("name", "")),
        model=shortened(state.get("model") or ""),
        step=int(state.get("step") or 0),
        version=int(state.get("version") or 0),
        branch=shortened(state.get("branch") or "main"),
        said=state.get("view") or UNANSWERED,
        lengths=[*map(_lengths, state.get("lengths", ())), *_growing(state.get("running", ()))][-LENGTHS_SHOWN:],
        curves=_curves(state.get("history", ())[-STEPS_SHOWN:]),
        split=_split(state.get("splits", ())),
        gone=gone,
    )


def _lengths(told: Json) -> Json:
    counts, edges = list(map(int, told.get("counts", ()))), list(map(float, told.get("edges", ())))
    samples = int(told.get("samples") or sum(counts))
    shown = {"rollout": f"rollout {shortened(told.get('rollout'))}", "samples": samples, "edges": edges}
    return {**shown, "counts": counts, **{name: told.get(name) for name in MEASURED}}


def _growing(calls: Sequence[Json]) -> list[Json]:
    """Lengths of what a running rollout has finished so far, its replicas together; none before the first sample."""
    growing: list[Json] = []
    for call in calls:
        told = [w["lengths"] for w in call.get("progress") or () if any((w.get("lengths") or {}).get("counts", ()))]
        if told:
            width, counts = joined_histograms(told)
            edges = [float(i * width) for i in range(len(counts) + 1)]
            shown = {"rollout": f"{shortened(call['what'])} so far", "samples": sum(counts), "edges": edges}
            growing.append({**shown, "counts": counts, **dict.fromkeys(MEASURED)})
    return growing


def _curves(history: Sequence[Json]) -> list[Json]:
    """Those of training, then the rewards of evaluations there are."""
    evaluated = sorted({name for record in history for name in record if is_evaluated_reward(name)})[:EVALUATED]
    named = [(name, shortened(name.removesuffix("/reward"), LABEL_SHOWN), "") for name in evaluated]
    seen = [curve for curve in AT_TIMES if any(record.get(curve[0]) for record in history)]
    return [_curve(history, *curve) for curve in (*CURVES, *seen, *named)]


def _curve(history: Sequence[Json], key: str, label: str, unit: str) -> Json:
    """One metric; with no points, where no step has it."""
    values = [(int(record.get("step") or i + 1), record.get(key, "")) for i, record in enumerate(history)]
    points = [[step, float(f"{v:.4g}")] for step, v in values if is_number(v) and math.isfinite(v)]
    return {"label": label, "unit": unit, "points": points}


def _split(splits: Sequence[Json]) -> Json | None:
    if not splits:
        return None
    last = splits[-1]
    parts = [[part, float(last[part])] for part in SPLIT_PARTS if last.get(part) is not None]
    total = {"step": last.get("step"), "seconds": float(last.get("seconds") or 0.0)}
    return {**total, "parts": parts, "tokens_per_s": last.get("tokens_per_s")}
