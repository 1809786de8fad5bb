"""Progress of a trainer's iterations while a cell waits: where it is, and how the reward went."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from rlbench.data.metrics import shown_metric
from rlbench.dispatch.protocol import Progress
from rlbench.notebook.progress_line import Line
from rlbench.notebook.sparkline import blocks
from rlbench.units import format_seconds

SHOWN = ("reward", "loss", "critic_loss", "kl", "ref_kl", "length")
DRAWN = 60
"""Iterations in the drawing."""


class FitProgress:
    """A line for all iterations of one `fit`, redrawn; below it the rewards so far.

    Args:
        total: iterations.
    """

    def __init__(self, total: int) -> None:
        self._total = total
        self._line = Line("fit")
        self._begin = time.monotonic()
        self._number = 0
        self._done: list[Mapping[str, Any]] = []

    def __call__(self, progress: list[Progress]) -> None:
        phases = [str(p.values["phase"]) for p in progress if p.values.get("phase")]
        self._draw(phases[0] if phases else "")

    def report(self, done: int, total: int) -> None:
        """`done` iterations are over."""
        self._number = done
        self._draw("")

    def iterated(self, values: Mapping[str, Any]) -> None:
        """An iteration is over, with these metrics."""
        self._done.append(values)
        self._number = len(self._done)
        self._draw("")

    def close(self, result: Sequence[Mapping[str, Any]] | None) -> None:
        """Leave a line that says what came of it."""
        seconds = time.monotonic() - self._begin
        done = f"fit {len(self._done)}/{self._total} iterations · {format_seconds(seconds)}"
        self._line.end(" · ".join([done, *self._last()]), seconds)

    def _draw(self, phase: str) -> None:
        at = f"iteration {min(self._number + 1, self._total)}/{self._total}"
        text = " · ".join(filter(None, [at, phase.replace("_", " "), *self._last()]))
        self._line.show(text, self._number / self._total, self._below())

    def _last(self) -> list[str]:
        last = self._done[-1] if self._done else {}
        return [shown_metric(name, last) for name in SHOWN if last.get(name) is not None]

    def _below(self) -> list[str]:
        rewards = [float(values["reward"]) for values in self._done if values.get("reward") is not None][-DRAWN:]
        return [f"reward  {blocks(rewards)}"] if len(rewards) > 1 else []
