"""Progress of a verb while a cell waits: a line redrawn in place, with what there is to see, then the cost line.

The line is an output that is updated in a notebook, carriage returns in a terminal. Everything shown is what the
workers report of themselves; what was not measured is left out.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlbench.data import Rollouts
from rlbench.data.record.metrics import NO_SIGNAL, shown_metric
from rlbench.dispatch.protocol import Progress
from rlbench.notebook.base.figures import blocks
from rlbench.notebook.base.markup import AS_WRITTEN, cut, escape, visible
from rlbench.runtime.starting import Start
from rlbench.traces import ipython
from rlbench.units import format_age, format_bytes, format_number, format_percent, format_rate, format_seconds

SHOWN_CHARACTERS = 120
FIT_SHOWN = ("reward", "loss", "reward_accuracy", "critic_loss", "kl", "length")
FIT_DRAWN = 60
"""Iterations in the drawing."""
REDRAW_S = 0.25
LOOK = "font-size:12px;color:var(--jp-ui-font-color2,gray);font-variant-numeric:tabular-nums"
BELOW_LOOK = (
    "font-family:var(--jp-code-font-family,monospace);white-space:pre;overflow:hidden;text-overflow:ellipsis;"
    "unicode-bidi:isolate"
)
BAR = 16


@dataclass
class _InCell:
    """What the ended lines of one kind take in a cell: one output, however often a loop runs the verb."""

    cell: int
    handle: Any = None
    ended: int = 0
    seconds: float = 0.0


_in_cells: dict[str, _InCell] = {}


class Line:
    """One line of text; those of one `kind` that end in the same cell share an output, so a loop leaves one line."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._last = 0.0
        self._width = 0
        self._place: _InCell | None = None

    def show(self, text: str, fraction: float | None = None, below: Sequence[str] = ()) -> None:
        """Draw `text`, at most four times a second, with a bar (0 to 1), and in a notebook the lines `below`."""
        now = time.monotonic()
        if now - self._last < REDRAW_S:
            return
        self._last = now
        if in_notebook():
            self._notebook(text, fraction, below)
        elif sys.stderr.isatty():
            full = 0 if fraction is None else round(fraction * BAR)
            bar = "" if fraction is None else "▓" * full + "░" * (BAR - full) + " "
            self._terminal(bar + text, "")

    def end(self, text: str, seconds: float) -> None:
        """Draw `text` as what stays; `seconds`: what the verb took."""
        if in_notebook():
            place = self._in_cell()
            place.ended, place.seconds = place.ended + 1, place.seconds + seconds
            several = f" · {place.ended} in this cell, {format_seconds(place.seconds)}" if place.ended > 1 else ""
            self._notebook(text + several, None, ())
        elif sys.stderr.isatty():
            self._terminal(text, "\n")

    def _terminal(self, line: str, end: str) -> None:
        sys.stderr.write("\r" + line.ljust(self._width) + end)
        sys.stderr.flush()
        self._width = len(line)

    def _notebook(self, text: str, fraction: float | None, below: Sequence[str]) -> None:
        data = {"text/plain": "\n".join([text, *below]), "text/html": _html(text, fraction, below)}
        place = self._in_cell()
        if place.handle is None:
            from IPython.display import DisplayHandle

            place.handle = DisplayHandle()
            place.handle.display(data, raw=True)
        else:
            place.handle.update(data, raw=True)

    def _in_cell(self) -> _InCell:
        """Where lines of this kind go in the cell that runs; this line stays where it began."""
        if self._place is None:
            cell, known = _cell(), _in_cells.get(self._kind)
            if known is None or known.cell != cell:
                known = _in_cells[self._kind] = _InCell(cell)
            self._place = known
        return self._place


def in_notebook() -> bool:
    """True in an IPython kernel, where outputs can be redrawn."""
    return hasattr(ipython(), "kernel")


def _cell() -> int:
    """Number of the cell that runs."""
    return int(ipython().execution_count)


def _html(text: str, fraction: float | None, below: Sequence[str]) -> str:
    bar = ""
    if fraction is not None:
        look = 'style="width:12em;height:8px" aria-label="progress"'
        bar = f'<progress max="1" value="{fraction:.3f}" {look}></progress> '
    more = "".join(f'\n<div style="{BELOW_LOOK}">{escape(line)}</div>' for line in below)
    return f'<div class="{AS_WRITTEN}" style="{LOOK}">{bar}{escape(text)}{more}</div>'


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
        self._line.end(_joined(*parts), self.seconds)


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
        """Draw what runs now; a replica that is done is not asked any more, and what it told still counts."""
        values = [p.values for p in progress]
        self._finished = max(self._finished, sum(int(v.get("finished", 0)) for v in values))
        self._tokens = max(self._tokens, sum(int(v.get("tokens", 0)) for v in values))
        joined = joined_histograms([v["lengths"] for v in values if v.get("lengths")])
        self._lengths = max(joined, self._lengths, key=lambda histogram: sum(histogram[1]))
        self._first = max([text for v in values for text in v.get("first", ())][:2], self._first, key=len)
        done, rate = f"{self._finished}/{self._total} samples", format_rate(self._tokens / self.seconds)
        held = "paused: session.resume() goes on" if any(v.get("paused") for v in values) else ""
        below = [*_lengths_line(self._lengths), *map(_sample_line, self._first)]
        self._line.show(_joined(done, f"{self._tokens:,} tokens", rate, held), self._finished / self._total, below)

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
    """Micro-batches, tokens/s and the loss so far of verb `what` over all ranks.

    `tokens`: of the batch, prompts and responses; `trained`: of those, the ones the loss is about.
    """

    def __init__(self, what: str, tokens: int, trained: int) -> None:
        super().__init__("train")
        self._what, self._tokens, self._trained, self._seen = what, tokens, trained, ""

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

    def close(self, result: Any) -> None:
        """Leave the cost line."""
        took = self.seconds
        self.end(f"sync ended · {format_seconds(took)}" if result is None else sync_cost_line(result, took))


class FitProgress(VerbProgress):
    """Iterations of one `fit` of `total`; below the line the rewards so far, on texts the losses."""

    def __init__(self, total: int) -> None:
        super().__init__("fit")
        self._total = total
        self._done: list[Mapping[str, Any]] = []

    def __call__(self, progress: list[Progress]) -> None:
        phases = [str(p.values["phase"]) for p in progress if p.values.get("phase")]
        self._draw(phases[0] if phases else "")

    def iterated(self, values: Mapping[str, Any]) -> None:
        """An iteration is over, with these metrics."""
        self._done.append(values)
        self._draw()

    def close(self, result: Sequence[Mapping[str, Any]] | None) -> None:
        """Leave a line that says what came of it."""
        self.end(f"fit {len(self._done)}/{self._total} iterations", format_seconds(self.seconds), *self._last())

    def _draw(self, phase: str = "") -> None:
        done = len(self._done)
        at = f"iteration {min(done + 1, self._total)}/{self._total}"
        drawn = "reward" if self._done and self._done[-1].get("reward") is not None else "loss"
        curve = [float(values[drawn]) for values in self._done if values.get(drawn) is not None][-FIT_DRAWN:]
        below = [f"{drawn}  {blocks(curve)}"] if len(curve) > 1 else []
        self._line.show(_joined(at, phase.replace("_", " "), *self._last()), done / self._total, below)

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
        below = []
        for name, part in parts:
            at = f"… {name}  {part.doing}" if part.seconds is None else f"✓ {name}  {format_seconds(part.seconds)}"
            below.append(at + _usually(start.usual(name)))
        self._line.show(text, None if not usual else min(0.99, start.seconds / usual), below)

    def end(self, start: Start, done: bool) -> None:
        """Leave one line: what it took, by part; where it failed, what it was at."""
        took = [f"{name} {format_seconds(part.seconds)}" for name, part in start.parts.items() if part.seconds]
        at = [f"{name}: {part.doing}" for name, part in start.parts.items() if part.seconds is None]
        lead = f"{start.what} {'ready' if done else 'did not start'}"
        self._line.end(_joined(lead, format_seconds(start.seconds), *(took if done else at)), start.seconds)


def cost_line(rollouts: Rollouts, seconds: float) -> str:
    """`rollout 64 × ≤512 · 2.1 s · 3.1k tok/s · peak 6.4 GiB · v41`"""
    lengths = rollouts.lengths
    what = f"rollout {rollouts.samples} × ≤{int(lengths.max()) if len(lengths) else 0}"
    versions = "/".join(f"v{v}" for v in sorted({int(v) for v in rollouts.versions}))
    rate = format_rate(int(lengths.sum()) / max(seconds, 1e-6))
    return _joined(what, format_seconds(seconds), rate, _peak(rollouts.stats.get("peak_bytes")), versions)


def train_cost_line(what: str, values: Mapping[str, Any], tokens: int, seconds: float) -> str:
    """`train_step · token-mean · 16 micro-batches · 1.9 s · 3.1k tok/s · padding 0 % · peak 1.2 GiB · v42`"""
    count, padding, shared = (values.get(name) for name in ("micro_batches", "padding", "shared"))
    return _joined(
        what,
        values.get("aggregation") or "",
        "" if count is None else f"{count} micro-batch{'' if count == 1 else 'es'}",
        format_seconds(seconds),
        format_rate(values.get("tokens_per_s") or tokens / max(seconds, 1e-6)),
        "" if padding is None else f"padding {format_percent(padding)}",
        f"shared {format_percent(shared)}" if shared else "",
        _peak(values.get("peak_bytes")),
        f"v{values['version']}" if "version" in values else "",
        NO_SIGNAL if values.get("no_signal") == 1 else "",
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


def _usually(seconds: float | None) -> str:
    return "" if seconds is None else f", usually {format_age(seconds)}"


def _peak(nbytes: float | None) -> str:
    return "" if not nbytes else f"peak {format_bytes(nbytes)}"


def _joined(*parts: str) -> str:
    return " · ".join(part for part in parts if part)
