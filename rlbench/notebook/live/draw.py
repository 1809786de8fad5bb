"""What a live view needs beside running cells: a draw that can be stopped, a thread, the name of what it shows."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlbench.data import Prompt, Rollouts
from rlbench.dispatch.protocol import Progress
from rlbench.traces import ipython
from rlbench.units import format_age

TELL_S, PATIENCE_S = 0.25, 1.0
"""Progress is told so often at most; an engine that does not begin in this time is called busy."""
OUTPUT = re.compile(r"_\d+")
Texts = Mapping[tuple[int, int], str]
"""What is drawn so far, by prompt and completion."""


class Draw:
    """A sampler whose draws another thread can stop; `tell` hears in words how far it is, of `count` things `what`.

    `show`: hears the texts so far, where they are wanted.
    """

    def __init__(
        self,
        sampler: Any,
        count: int,
        what: str,
        tell: Callable[[str], None],
        show: Callable[[Texts], None] | None = None,
    ) -> None:
        self._sampler, self._count, self._what, self._tell, self._show = sampler, count, what, tell, show
        self._lock, self._call, self._stop_wanted = threading.Lock(), None, False
        self._begin = time.monotonic()
        self._told = 0.0
        self._drawn = 0

    def continued(
        self, prompts: Sequence[Prompt], n: int, sampling: dict[str, Any], number: int, under: str | None
    ) -> Rollouts:
        """See `rlbench.data.forking.Sampler`."""
        options = {"view": self, "told": self._show is not None}
        call = self._sampler.submit_continued(prompts, n, sampling, number, under, **options)
        with self._lock:
            self._call, stop = call, self._stop_wanted
        if stop:
            call.stop()
        drawn: Rollouts = call.result()
        self._drawn += drawn.samples
        return drawn

    def encoded(self, text: str) -> list[int]:
        """See `rlbench.data.forking.Sampler`."""
        return list(self._sampler.encoded(text))

    def decoded(self, ids: Sequence[int]) -> str:
        """See `rlbench.data.forking.Sampler`."""
        return str(self._sampler.decoded(ids))

    def stop(self) -> None:
        """Stop what is drawn, also what has not begun."""
        with self._lock:
            self._stop_wanted, call = True, self._call
        if call is not None:
            call.stop()

    def __call__(self, progress: list[Progress]) -> None:
        """Tell how far the draw is."""
        now = time.monotonic()
        if now - self._told < TELL_S or self._stop_wanted:
            return
        self._told, seconds = now, now - self._begin
        values = [one.values for one in progress if one.values]
        texts = {(p, k): text for value in values for p, k, text in value.get("texts", ())}
        if self._show is not None and texts:  # a replica that is done tells none any more
            self._show(texts)
        if any(value.get("paused") for value in values):
            self._tell("paused: session.resume() goes on")
        elif values:
            done = self._drawn + sum(int(value.get("finished", 0)) for value in values)
            self._tell(f"{done}/{self._count} {self._what} · {format_age(seconds)}")
        elif seconds > PATIENCE_S:
            self._tell(f"waits for the engine, which is busy · {format_age(seconds)}")

    def close(self, result: Any) -> None:
        """The draw is over; what came of it is told by whoever waited for it."""


def name_in_cells(value: Any, default: str) -> str:
    """Return what stands for a value in a cell: a variable, else a cell's output."""
    names = getattr(ipython(), "user_ns", {})
    bound = [name for name, other in list(names.items()) if other is value]
    own = [name for name in bound if not name.startswith("_")] + [name for name in bound if OUTPUT.fullmatch(name)]
    return next(iter(own), default)


def beside(work: Callable[..., None], *args: Any) -> None:
    """Do work beside the cells that run."""
    threading.Thread(target=work, args=args, name="rlbench view", daemon=True).start()
