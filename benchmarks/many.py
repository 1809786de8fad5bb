"""Large work: what the notebook's process spends on 2,000 prompts x 8 completions, and on a history of 10,000 rows.

Processor time of the whole process, its Ray threads and garbage collector too, on a real session of the tiny model. Of
waiting it has a part: every fifth of a second a running call is asked how far it is. Of each part of a step it is told
by completion; `record_us` is what the session's record takes of the others, and `shown_us` what the viewer sends as a
cell's output, and the page that a saved notebook holds. A step's batch is joined of two halves and cut to 200,000
tokens; packing is the ranks' work, and so not in it.

Of a history: a row added, `session.history` read after it, the frame of a dashboard after it; kernel and monitor
together, in turns with a short history.

    python -m benchmarks.many
    python -m benchmarks.many --prompts 200 --tokens 20000     # a tenth of it
"""

from __future__ import annotations

import argparse
import itertools
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from benchmarks.harness import Experiment, Figure, Measuring, Round, Stage, main_of
from benchmarks.turns import Record, Requests, serve

PROMPTS, SAMPLES, DRAWN, TOKENS, WARM = 2_000, 8, 4, 200_000, 50
ROWS, FEW, TIMES = 10_000, 100, 40
PARTS = ("asked_us", "drawn_us", "score_us", "batch_us", "joined_us", "step_us", "shown_us")


class Clock:
    """Processor seconds of this process by part of the work, and of one thread within it."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def run(self, part: str, work: Callable[[], Any]) -> Any:
        """Do a part."""
        begin = time.process_time()
        done = work()
        self.seconds[part] = self.seconds.get(part, 0.0) + time.process_time() - begin
        return done

    def within(self, part: str, work: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that also counts what it takes of the thread that calls it."""

        def counted(*args: Any, **options: Any) -> Any:
            begin = time.thread_time()
            try:
                return work(*args, **options)
            finally:
                self.seconds[part] = self.seconds.get(part, 0.0) + time.thread_time() - begin

        return counted


class LargeStep:
    """One step of many prompts; a turn takes it."""

    def __init__(self, prompts: int, tokens: int) -> None:
        import rlbench as rb
        from rlbench.tiny import tasks

        warnings.simplefilter("ignore")
        self.session = rb.Session("tiny", train={"lr": 1e-6})
        self.prompts = [tasks.message(one) for one in itertools.islice(tasks.stream("train", 0), prompts)]
        self.tokens, self.clock = tokens, Clock()
        recorder: Any = self.session.core.recorder
        for name in ("begin", "end"):
            setattr(recorder, name, self.clock.within("record_us", getattr(recorder, name)))
        self._step(self.prompts[:WARM])

    def turn(self) -> Record:
        """Draw, score, batch, step and show; microseconds by completion."""
        return self._step(self.prompts)

    def close(self) -> None:
        """End the session."""
        self.session.close()

    def _step(self, prompts: list[Any]) -> Record:
        import rlbench as rb
        from rlbench.data import join
        from rlbench.notebook.rollouts import static, viewer

        self.clock.seconds.clear()
        run, options = self.clock.run, {"n": SAMPLES, "max_tokens": DRAWN, "ignore_eos": True, "progress": False}
        drawing = run("asked_us", lambda: self.session.rollout(prompts, block=False, **options))
        drawn = run("drawn_us", drawing.result)
        scored = run("score_us", lambda: drawn.score(lambda rollout: float(len(set(rollout.token_ids)))))
        batch = run("batch_us", lambda: scored.batch(advantage=rb.rl.group_normalized()))
        half = len(batch) // 2
        joined = run("joined_us", lambda: self._cut(join(batch[:half], batch[half:])))
        run("step_us", lambda: self.session.train_step(joined))
        run("shown_us", lambda: (viewer.viewer(scored), static.rollouts_view(scored), repr(scored)))
        sequences = dict.fromkeys(self.clock.seconds, scored.samples) | {"step_us": len(joined)}
        found = {part: 1e6 * seconds / sequences[part] for part, seconds in self.clock.seconds.items()}
        return {"rollout_us": sum(found[part] for part in PARTS), **found, "tokens": int(joined.lengths.sum())}

    def _cut(self, batch: Any) -> Any:
        return batch[: int(np.searchsorted(batch.lengths.cumsum(), self.tokens, side="right"))]


class LongHistory:
    """Two sessions' records without engines, one long and one short; a turn adds to each and looks at it."""

    def __init__(self, rows: int) -> None:
        import rlbench as rb
        from rlbench.session.core import SessionCore
        from rlbench.session.options import Inference, SessionOptions, Train

        rb.init()
        from rlbench.dispatch.link import Link
        from rlbench.notebook.dashboard.feed import Feed
        from rlbench.session.session import Session

        self.sessions, self.feeds = {}, {}
        for name, count in (("long", rows), ("short", FEW)):
            options = SessionOptions("tiny", "tiny", 0, Train(), Inference(), None, 1)
            core = SessionCore(Link.create(f"many-{name}"), options)
            core.link.set(config=options.to_json())
            self.sessions[name], self.feeds[name] = Session._of(core), Feed.of(core.name)
            for first in range(0, count, 500):
                core.link.apply(*(row(i) for i in range(first, min(count, first + 500))))
            for warm in (self._adding, self._reading, self._looking):
                warm(name)

    def turn(self) -> Record:
        """Add rows one by one, read the history after each, draw a frame after each; milliseconds of processor time."""
        acts = {"add": self._adding, "read": self._reading, "look": self._looking}
        return {
            f"{name}_{act}_ms": self._spent(name, partial(work, name), also=None if act == "add" else self._adding)
            for act, work in acts.items()
            for name in self.sessions
        }

    def close(self) -> None:
        """End the monitors."""
        for session in self.sessions.values():
            session.close()

    def _spent(self, name: str, work: Callable[[], Any], also: Callable[[str], None] | None) -> float:
        """Return the milliseconds of one call in kernel and monitor, without those of adding a row before it."""
        monitor, seconds = monitor_of(self.sessions[name]), 0.0
        for _ in range(TIMES):
            if also is not None:
                also(name)
            kernel, other = time.process_time(), cpu_seconds(monitor)
            work()
            seconds += time.process_time() - kernel + cpu_seconds(monitor) - other
        return 1e3 * seconds / TIMES

    def _adding(self, name: str) -> None:
        link = self.sessions[name].core.link
        link.apply(row(int(link.state("step")["step"]) + 1))

    def _reading(self, name: str) -> None:
        assert self.sessions[name].history[-1]["loss_name"] == "grpo"

    def _looking(self, name: str) -> None:
        frame = self.feeds[name].look()
        assert frame.state["history"] and not frame.trouble, frame.trouble


def row(step: int) -> dict[str, Any]:
    """Return the event of a step's record, with the names and the texts that a real one has."""
    numbers = {f"metric_{i}": step * 0.001 + i for i in range(40)}
    record = {"step": step, "loss_name": "grpo", "loss_source": LOSS_TEXT, "reward_source": LOSS_TEXT, **numbers}
    return {"do": "record", "record": record | {"seconds": {"total": 0.1, "forward_backward": 0.05}}}


LOSS_TEXT = "\n".join(f"    term_{i} = inputs.advantages * ratio.clamp(0.{i}, 1.{i})" for i in range(30))


def monitor_of(session: Any) -> int:
    """Return the process of a session's monitor."""
    from rlbench.monitor import client

    return int(client.find(session.name)["pid"])


def cpu_seconds(pid: int) -> float:
    """Return the processor time of another process, by the clock that Linux gives each (clock_getcpuclockid)."""
    return time.clock_gettime((~pid << 3) | 2)


def step(at: Stage, prompts: int = PROMPTS, tokens: int = TOKENS) -> Measuring:
    """Yield the microseconds of a step by completion and part."""
    side = at.side("benchmarks.many", "--serve", "step", "--prompts", str(prompts), "--tokens", str(tokens))
    side.ready()
    while True:
        yield side.turn()


def history(at: Stage, rows: int = ROWS) -> Measuring:
    """Yield what rows, reads and frames cost with a long history and with a short one."""
    side = at.side("benchmarks.many", "--serve", "history", "--rows", str(rows))
    side.ready()
    while True:
        yield side.turn()


def times(act: str) -> Callable[[Round], float]:
    """Return how many times as much something costs with the long history."""
    return lambda found: found[f"long_{act}_ms"] / found[f"short_{act}_ms"]


def part(*names: str) -> Callable[[Round], float]:
    """Return the microseconds of these parts."""
    return lambda found: sum(found[name] for name in names)


EXPERIMENTS = (Experiment("many", step, 3, 0.7), Experiment("history", history, 5, 0.3))
FIGURES = (
    Figure(
        "many",
        "2,000 prompts × 8, a step of 200,000 tokens: the notebook's process, by completion",
        "many",
        part("rollout_us"),
        unit="µs",
        bar=50.0,
        better="less",
    ),
    Figure("many-drawn", "… asked for and taken in", "many", part("asked_us", "drawn_us"), unit="µs"),
    Figure("many-scored", "… scored, made a batch", "many", part("score_us", "batch_us"), unit="µs"),
    Figure("many-step", "… joined, sent, stepped on", "many", part("joined_us", "step_us"), unit="µs"),
    Figure("many-shown", "… shown in a cell", "many", part("shown_us"), unit="µs"),
    Figure("many-record", "… of all that, on record", "many", part("record_us"), unit="µs"),
    Figure(
        "history-add", "history of 10,000 steps / of 100: one more", "history", times("add"), bar=1.5, better="less"
    ),
    Figure("history-read", "… `session.history` after it", "history", times("read"), bar=1.5, better="less"),
    Figure("history-look", "… the dashboard's frame after it", "history", times("look"), bar=1.5, better="less"),
)


def main() -> None:
    """Measure and print; with `--serve` be the side."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=PROMPTS)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--rounds", type=int, help="how often each is done")
    parser.add_argument("--serve", choices=("step", "history"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        made: dict[str, Callable[[], Any]] = {
            "step": partial(LargeStep, given.prompts, given.tokens),
            "history": partial(LongHistory, given.rows),
        }
        return serve(Requests(), made[given.serve])
    measures = {"many": partial(step, prompts=given.prompts, tokens=given.tokens)}
    measures["history"] = partial(history, rows=given.rows)
    for experiment in EXPERIMENTS:
        main_of(Experiment(experiment.name, measures[experiment.name], experiment.rounds, 10.0), FIGURES, given.rounds)
    return None


if __name__ == "__main__":
    main()
