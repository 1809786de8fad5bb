"""Progress of a verb while a cell waits: a line redrawn in place, with what there is to see, then the cost line.

Everything shown is what the workers report of themselves; what was not measured is left out.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rlbench.data import Rollouts
from rlbench.data.record.metrics import shown_metric
from rlbench.dispatch.protocol import Progress
from rlbench.notebook.base.inert import cut, visible
from rlbench.notebook.base.sparkline import blocks
from rlbench.notebook.live.progress_line import Line
from rlbench.runtime.starting import Part, Start
from rlbench.units import format_age, format_bytes, format_number, format_percent, format_rate, format_seconds

SHOWN_CHARACTERS = 120
FIT_SHOWN = ("reward", "loss", "critic_loss", "kl", "length")
FIT_DRAWN = 60
"""Iterations in the drawing."""


class VerbProgress:
    """One live line for a verb; `kind`: verbs of one kind share a line in a cell."""

    def __init__(self, kind: str) -> None:
        self._line = Line(kind)
        self._begin = time.monotonic()

    @property
    def seconds(self) -> float:
        """Since the verb began."""
        return max(1e-6, time.monotonic() - self._begin)

    def end(self, *parts: str) -> None:
        """Leave a line of these parts."""
        seconds = self.seconds
        self._line.end(_joined(*parts), seconds)


class GenerateProgress(VerbProgress):
    """Finished samples, tokens/s, lengths and first texts of a generate call over all replicas."""

    def __init__(self, total: int) -> None:
        super().__init__("rollout")
        self._total = total
        self._finished = self._tokens = 0
        self._lengths: Histogram = (1, [])
        self._first: list[str] = []
        self._ended = False

    def __call__(self, progress: list[Progress]) -> None:
        values = [p.values for p in progress]
        self._see(values)
        rate = self._tokens / self.seconds
        held = " · paused: session.resume() goes on" if any(v.get("paused") for v in values) else ""
        self._line.show(
            f"{self._finished}/{self._total} samples · {self._tokens:,} tokens · {format_rate(rate)}{held}",
            self._finished / self._total,
            [*_lengths_line(self._lengths), *map(_sample_line, self._first)],
        )

    def _see(self, values: Sequence[Mapping[str, Any]]) -> None:
        """Take what runs now; a replica that is done is not asked any more, and what it told still counts."""
        self._finished = max(self._finished, sum(int(v.get("finished", 0)) for v in values))
        self._tokens = max(self._tokens, sum(int(v.get("tokens", 0)) for v in values))
        joined = joined_histograms([v["lengths"] for v in values if v.get("lengths")])
        if sum(joined[1]) >= sum(self._lengths[1]):
            self._lengths = joined
        first = [text for v in values for text in v.get("first", ())][:2]
        self._first = first if len(first) >= len(self._first) else self._first

    def report(self, done: int, total: int) -> None:
        """`done` of `total` samples are finished."""
        self._line.show(f"{done}/{total} samples", done / max(1, total))

    def close(self, result: Any) -> None:
        """Leave the cost line; where it failed, how far it was."""
        if self._ended:
            return
        self._ended = True
        if isinstance(result, Rollouts):
            self.end(cost_line(result, self.seconds))
        else:
            self.end("rollout ended", f"{self._finished}/{self._total} samples", format_seconds(self.seconds))


class TrainProgress(VerbProgress):
    """Micro-batches, tokens/s and the loss so far of a training verb over all ranks.

    Args:
        what: the verb.
        tokens: of the batch, prompts and responses.
        trained: of those, the ones the loss is about.
    """

    def __init__(self, what: str, tokens: int, trained: int) -> None:
        super().__init__("train")
        self._what, self._tokens, self._trained = what, tokens, trained
        self._seen = ""

    def __call__(self, progress: list[Progress]) -> None:
        ranks = [p.values for p in progress if p.values.get("total")]
        if not ranks:
            return
        done, total = min(int(v["done"]) for v in ranks), int(ranks[0]["total"])
        self._seen = f"micro-batch {done}/{total}"
        parts = [self._what, self._seen if ranks[0].get("phase") == "backward" else f"scoring {done}/{total}"]
        tokens, trained = (sum(float(v.get(name, 0)) for v in ranks) for name in ("tokens", "trained"))
        if tokens:
            parts.append(format_rate(tokens / self.seconds))
        if trained:  # each rank tells its part of the batch's loss; for the tokens done so far that is
            loss = sum(float(v.get("loss", 0)) for v in ranks) * self._trained / trained
            parts.append(f"loss ~{format_number(loss)}")
        self._line.show(" · ".join(parts), done / total)

    def report(self, done: int, total: int) -> None:
        """`done` of `total` micro-batches are done."""
        self._line.show(f"{self._what} · micro-batch {done}/{total}", done / max(1, total))

    def close(self, result: Any) -> None:
        """Leave the cost line; where it failed or was stopped, how far it was."""
        if result is None:
            self.end(self._what, "ended", self._seen, format_seconds(self.seconds))
        else:
            self.end(train_cost_line(self._what, result, self._tokens, self.seconds))


class SyncProgress(VerbProgress):
    """Bytes gathered by a weight sync."""

    def __init__(self) -> None:
        super().__init__("sync")

    def __call__(self, progress: list[Progress]) -> None:
        gathered = max((int(p.values.get("bytes", 0)) for p in progress), default=0)
        if gathered:
            self._line.show(f"sync · {format_bytes(gathered)} gathered · {format_seconds(self.seconds)}")

    def report(self, done: int, total: int) -> None:
        """`done` of `total` bytes are gathered."""
        self._line.show(f"sync · {format_bytes(done)} of {format_bytes(total)} gathered", done / max(1, total))

    def close(self, result: Any) -> None:
        """Leave the cost line."""
        took = self.seconds
        self.end(f"sync ended · {format_seconds(took)}" if result is None else sync_cost_line(result, took))


class FitProgress(VerbProgress):
    """Iterations of one `fit` of `total`; below the line the rewards so far."""

    def __init__(self, total: int) -> None:
        super().__init__("fit")
        self._total = total
        self._number = 0
        self._done: list[Mapping[str, Any]] = []

    def __call__(self, progress: list[Progress]) -> None:
        phases = [str(p.values["phase"]) for p in progress if p.values.get("phase")]
        self._draw(phases[0] if phases else "")

    def report(self, done: int, total: int) -> None:
        """`done` iterations are over."""
        self._number = done
        self._draw()

    def iterated(self, values: Mapping[str, Any]) -> None:
        """An iteration is over, with these metrics."""
        self._done.append(values)
        self._number = len(self._done)
        self._draw()

    def close(self, result: Sequence[Mapping[str, Any]] | None) -> None:
        """Leave a line that says what came of it."""
        self.end(f"fit {len(self._done)}/{self._total} iterations", format_seconds(self.seconds), *self._last())

    def _draw(self, phase: str = "") -> None:
        at = f"iteration {min(self._number + 1, self._total)}/{self._total}"
        rewards = [float(values["reward"]) for values in self._done if values.get("reward") is not None][-FIT_DRAWN:]
        below = [f"reward  {blocks(rewards)}"] if len(rewards) > 1 else []
        self._line.show(_joined(at, phase.replace("_", " "), *self._last()), self._number / self._total, below)

    def _last(self) -> list[str]:
        last = self._done[-1] if self._done else {}
        return [shown_metric(name, last) for name in FIT_SHOWN if last.get(name) is not None]


class StartProgress:
    """What goes on in a start, for how long, and how long it usually takes; in a cell the parts below it."""

    def __init__(self) -> None:
        self._line = Line("start")

    def show(self, start: Start) -> None:
        """Draw where it is."""
        usual, parts = start.usual(), list(start.parts.items())
        going = [f"{name}: {part.doing}" for name, part in parts if part.seconds is None]
        text = _joined(f"starting {start.what}", format_age(start.seconds) + _usually(usual), *going)
        below = [_part_line(name, part, start.usual(name)) for name, part in parts]
        self._line.show(text, None if not usual else min(0.99, start.seconds / usual), below)

    def end(self, start: Start, done: bool) -> None:
        """Leave one line: what it took, by part; where it failed, what it was at."""
        if done:
            took = [f"{name} {format_seconds(part.seconds)}" for name, part in start.parts.items() if part.seconds]
        else:
            took = [f"{name}: {part.doing}" for name, part in start.parts.items() if part.seconds is None]
        lead = f"{start.what} {'ready' if done else 'did not start'}"
        self._line.end(_joined(lead, format_seconds(start.seconds), *took), start.seconds)


# -- what they say


def cost_line(rollouts: Rollouts, seconds: float) -> str:
    """`rollout 64 × ≤512 · 2.1 s · 3.1k tok/s · peak 6.4 GiB · v41`"""
    lengths = rollouts.lengths
    longest = int(lengths.max()) if len(lengths) else 0
    versions = "/".join(f"v{v}" for v in sorted({int(v) for v in rollouts.versions}))
    rate = int(lengths.sum()) / max(seconds, 1e-6)
    return _joined(
        f"rollout {rollouts.samples} × ≤{longest}",
        format_seconds(seconds),
        format_rate(rate),
        _peak(rollouts.stats.get("peak_bytes")),
        versions,
    )


def train_cost_line(what: str, values: Mapping[str, Any], tokens: int, seconds: float) -> str:
    """`train_step · token-mean · 16 micro-batches · 1.9 s · 3.1k tok/s · padding 0 % · peak 1.2 GiB · v42`"""
    count, padding = values.get("micro_batches"), values.get("padding")
    return _joined(
        what,
        values.get("aggregation") or "",
        "" if count is None else f"{count} micro-batch{'' if count == 1 else 'es'}",
        format_seconds(seconds),
        format_rate(values.get("tokens_per_s") or tokens / max(seconds, 1e-6)),
        "" if padding is None else f"padding {format_percent(padding)}",
        _peak(values.get("peak_bytes")),
        f"v{values['version']}" if "version" in values else "",
        f"step skipped: {values['skipped']}" if values.get("skipped") else "",
    )


def sync_cost_line(done: Mapping[str, Any], seconds: float) -> str:
    """`sync v42 · 48.2 MiB · 0.03 s · shm · gap 1e-06`"""
    gap = "proof waits for the KV cache" if done["gap"] is None else f"gap {done['gap']:.1g}"
    sent = format_bytes(done["bytes"])
    return _joined(f"sync v{done['version']}", sent, format_seconds(seconds), done["transport"], gap)


Histogram = tuple[int, list[int]]
"""Width of a bin in tokens, and the counts."""


def joined_histograms(told: Iterable[Mapping[str, Any]]) -> Histogram:
    """One histogram of what several replicas tell; their widths are powers of two, so bins fall into each other."""
    parts = [(int(one["width"]), list(one["counts"])) for one in told]
    width = max((w for w, _ in parts), default=1)
    counts: list[int] = []
    for own, values in parts:
        for i, count in enumerate(values):
            at = i * own // width
            counts += [0] * (at + 1 - len(counts))
            counts[at] += count
    return width, counts


def _lengths_line(histogram: Histogram) -> list[str]:
    width, counts = histogram
    if not any(counts):
        return []
    drawn = "".join(block if count else "·" for block, count in zip(blocks([0, *counts])[1:], counts, strict=True))
    return [f"lengths 0–{width * len(counts) - 1} tok  {drawn}"]


def _sample_line(text: str) -> str:
    """A finished sample on one line, inert."""
    return "“" + cut(visible(text).replace("\n", "⏎").replace("\t", "⇥"), SHOWN_CHARACTERS) + "”"


def _part_line(name: str, part: Part, usual: float | None) -> str:
    if part.seconds is not None:
        return f"✓ {name}  {format_seconds(part.seconds)}{_usually(usual)}"
    return f"… {name}  {part.doing}{_usually(usual)}"


def _usually(seconds: float | None) -> str:
    return "" if seconds is None else f", usually {format_age(seconds)}"


def _peak(nbytes: float | None) -> str:
    return "" if not nbytes else f"peak {format_bytes(nbytes)}"


def _joined(*parts: str) -> str:
    return " · ".join(part for part in parts if part)
