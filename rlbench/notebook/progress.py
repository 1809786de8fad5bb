"""Progress of a call while a cell waits: one line, redrawn in place, then the cost line that stays."""

from __future__ import annotations

import html
import sys
import time
from typing import Any

from rlbench.data import Rollouts
from rlbench.dispatch.protocol import Progress

REDRAW_S = 0.25


class Line:
    """One line of text redrawn in place: an updating HTML output in a notebook, carriage returns in a terminal."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._last = 0.0
        self._width = 0

    def show(self, text: str, fraction: float | None = None, final: bool = False) -> None:
        """Draw `text`, with a bar for `fraction` (0 to 1); at most four times a second unless final."""
        now = time.monotonic()
        if not final and now - self._last < REDRAW_S:
            return
        self._last = now
        if in_notebook():
            self._notebook(text, None if final else fraction)
        elif sys.stderr.isatty():
            bar = "" if fraction is None or final else _text_bar(fraction) + " "
            line = f"{bar}{text}"
            sys.stderr.write("\r" + line.ljust(self._width) + ("\n" if final else ""))
            sys.stderr.flush()
            self._width = len(line)

    def _notebook(self, text: str, fraction: float | None) -> None:
        from IPython.display import DisplayHandle

        bar = (
            ""
            if fraction is None
            else f'<progress max="1" value="{fraction:.3f}" style="width:12em;height:8px" aria-label="progress">'
            "</progress> "
        )
        data = {
            "text/plain": text,
            "text/html": '<div style="font-size:12px;color:var(--jp-ui-font-color2,gray);'
            f'font-variant-numeric:tabular-nums">{bar}{html.escape(text)}</div>',
        }
        if self._handle is None:
            self._handle = DisplayHandle()
            self._handle.display(data, raw=True)
        else:
            self._handle.update(data, raw=True)


class GenerateProgress:
    """Finished samples, tokens and tokens/s of a generate call over all replicas."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._line = Line()
        self._begin = time.monotonic()

    def __call__(self, progress: list[Progress]) -> None:
        finished = sum(int(p.values.get("finished", 0)) for p in progress)
        tokens = sum(int(p.values.get("tokens", 0)) for p in progress)
        rate = tokens / max(1e-6, time.monotonic() - self._begin)
        held = " · paused: session.resume() goes on" if any(p.values.get("paused") for p in progress) else ""
        self._line.show(
            f"{finished}/{self._total} samples · {tokens:,} tokens · {rate:,.0f} tok/s{held}",
            finished / self._total,
        )

    def report(self, done: int, total: int) -> None:
        """`done` of `total` samples are finished."""
        self._line.show(f"{done}/{total} samples", done / max(1, total))

    def close(self, result: Any) -> None:
        """Leave the cost line."""
        if isinstance(result, Rollouts):
            self._line.show(cost_line(result, time.monotonic() - self._begin), final=True)


class PrepareProgress:
    """Something that is made once before a session can start."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._line = Line()
        self._begin = time.monotonic()
        self._shown = False

    def __call__(self, progress: list[Progress]) -> None:
        """Nothing runs on a worker yet."""

    def report(self, done: int, total: int) -> None:
        """`done` of `total` parts are made."""
        self._shown = True
        self._line.show(f"{self._what}: {done}/{total}", done / max(1, total))

    def close(self, result: Any) -> None:
        """Leave the cost line where there was a cost."""
        if self._shown:
            self._line.show(f"{self._what} · {time.monotonic() - self._begin:.0f} s", final=True)


def cost_line(rollouts: Rollouts, seconds: float) -> str:
    """`rollout 64 × ≤512 · 2.1 s · 3.1k tok/s · v41`"""
    lengths = rollouts.lengths
    tokens = int(lengths.sum())
    longest = int(lengths.max()) if len(lengths) else 0
    versions = "/".join(f"v{v}" for v in sorted({int(v) for v in rollouts.versions}))
    return (
        f"rollout {rollouts.samples} × ≤{longest} · {seconds:.1f} s · {tokens / max(seconds, 1e-6):,.0f} tok/s"
        f"{' · ' + versions if versions else ''}"
    )


def in_notebook() -> bool:
    """True in an IPython kernel, where outputs can be redrawn."""
    from rlbench.dispatch.link import driver_mode

    return driver_mode() == "notebook"


def _text_bar(fraction: float, width: int = 16) -> str:
    full = round(fraction * width)
    return "▓" * full + "░" * (width - full)
