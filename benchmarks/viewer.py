"""What the rollout viewer costs: time to open it, bytes sent, time per window and per change of order.

    python -m benchmarks.viewer                    # 10,000 rollouts of 1,000 tokens with eight channels
    python -m benchmarks.viewer --rollouts 1000 --tokens 200
    python -m benchmarks.viewer --notebook FILE    # writes a notebook that shows them, to scroll in a browser

Bars: open ≤ 1 s, ≤ 2 MB sent, a window ≤ 100 ms with what the page needs to draw it (the page's own share is measured
in tests/browser/test_rollout_viewer.py). "sent" counts every byte of the widgets' first messages, their code too.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import Experiment, Figure, Measuring, Stage, main_of
from benchmarks.turns import Requests, serve
from rlbench import tiny
from rlbench.data import FINISH_REASONS, Prompt, Ragged, Rollouts
from rlbench.data.record.metrics import Metrics

GROUP, ROLLOUTS, TOKENS = 8, 10_000, 1_000
NOTEBOOK = """import sys; sys.path.insert(0, {folder!r})
from benchmarks.viewer import made_up
import rlbench; rlbench.Rollouts
rollouts = made_up({rollouts}, {tokens})"""


def made_up(rollouts: int, tokens: int, seed: int = 0) -> Rollouts:
    """Rollouts of random words for the tiny model's tokenizer, scored, with the channels a step gives."""
    rng = np.random.default_rng(seed)
    lengths = np.full(rollouts, tokens)
    values = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz     \n", np.uint8)[rng.integers(0, 32, rollouts * tokens)]
    responses = Ragged(values.astype(np.int32), np.concatenate([[0], np.cumsum(lengths)]))
    raw = values.tobytes().decode()
    prompts = max(1, rollouts // GROUP)
    made = Rollouts(
        prompts=tuple(Prompt(f"prompt number {p}: continue") for p in range(prompts)),
        prompt_ids=Ragged.from_rows([[1, 2, 3]] * prompts, np.int32),
        responses=responses,
        logprobs=-rng.exponential(0.5, len(values)).astype(np.float32),
        group=np.minimum(np.arange(rollouts) // GROUP, prompts - 1).astype(np.int32),
        finish=np.full(rollouts, FINISH_REASONS.index("length"), np.int8),
        versions=np.zeros(rollouts, np.int64),
        texts=tuple(raw[i * tokens : (i + 1) * tokens] for i in range(rollouts)),
        sampling={"temperature": 1.0},
        tokenizer=str(tiny.ensure()),
    ).score(rng.integers(0, 2, rollouts))
    batch = made.batch(lambda rewards, group: rewards - rewards.mean())
    noise = rng.normal(0, 0.1, batch.tokens).astype(np.float32)
    entropy = rng.exponential(0.4, batch.tokens).astype(np.float32)
    step = {
        "logprobs": batch.sampler_logprobs + noise,
        "old_logprobs": batch.sampler_logprobs,
        "entropy": entropy,
    }
    return made.with_batch(batch, Metrics({}, step))


def timed(act: Callable[[], Any], rounds: int = 1) -> tuple[float, Any]:
    """Median seconds of `rounds` calls, and the last result."""
    seconds = []
    for _ in range(rounds):
        begin = time.perf_counter()
        result = act()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds), result


def state_bytes(widget: Any) -> int:
    """Bytes of a widget's state and of its children's, as they are sent when they open."""
    seen: dict[str, Any] = {}

    def walk(one: Any) -> None:
        if one.model_id in seen:
            return
        seen[one.model_id] = one
        for name in ("children",):
            for child in getattr(one, name, ()):
                walk(child)
        for name in ("layout", "style"):
            if getattr(one, name, None) is not None:
                walk(getattr(one, name))

    walk(widget)
    return sum(_size(one.get_state()) for one in seen.values())


def _size(value: Any) -> int:
    if isinstance(value, dict):
        return sum(len(str(k)) + _size(v) for k, v in value.items())
    if isinstance(value, list | tuple):
        return sum(map(_size, value))
    return len(value) if isinstance(value, bytes | memoryview) else len(json.dumps(value, default=str))


class Viewer:
    """Rollouts as a cell shows them; a turn opens them anew and asks for what a page would."""

    def __init__(self, rollouts: int, tokens: int) -> None:
        from rlbench.notebook.rollouts import static
        from rlbench.notebook.rollouts import viewer as rollout_viewer

        self.rollouts, self.random = made_up(rollouts, tokens), np.random.default_rng(1)
        self.make = lambda: rollout_viewer.viewer(self.rollouts)
        first_s, (_, page) = timed(lambda: (self.make(), static.rollouts_view(self.rollouts)))
        self.about = {"first_s": first_s, "static_kb": len(page) / 1e3}

    def turn(self) -> dict[str, float]:
        """Open, scroll, sort by each order, search."""
        open_s, viewer = timed(self.make)
        window_s, (content, buffers) = timed(lambda: viewer.drawing.answer(self._window()), rounds=20)
        orders = [timed(partial(viewer.drawing.answer, _order(sort)))[0] for sort in range(len(viewer.sort.options))]
        return {
            **self.about,
            "open_s": open_s,
            "sent_mb": state_bytes(viewer) / 1e6,
            "window_ms": 1e3 * window_s,
            "window_kb": (len(json.dumps(content)) + sum(map(len, buffers))) / 1e3,
            "order_ms": 1e3 * max(orders),
            "search_ms": 1e3 * timed(lambda: viewer.drawing.answer(_order(0, "needle")))[0],
        }

    def _window(self) -> dict[str, Any]:
        at = int(self.random.integers(0, self.rollouts.samples - 24))
        rows = [[i, 0, None] for i in range(at, at + 24)]
        return {"id": "", "kind": "rows", "heads": [at // GROUP], "rows": rows}


def _order(sort: int, search: str = "") -> dict[str, Any]:
    return {"id": "", "kind": "order", "sort": sort, "filter": 0, "search": search}


def views(at: Stage, rollouts: int = ROLLOUTS, tokens: int = TOKENS) -> Measuring:
    """Yield what it costs to open the viewer and to move in it."""
    side = at.side("benchmarks.viewer", "--serve", "--rollouts", str(rollouts), "--tokens", str(tokens))
    side.ready()
    while True:
        yield side.turn()


EXPERIMENTS = (Experiment("viewer", views, 5, 0.3),)
NAME = "rollout viewer, 10,000 × 1,000 tokens"
FIGURES = (
    Figure(
        "viewer-open",
        f"{NAME}: cell output, first time",
        "viewer",
        lambda found: found["first_s"],
        unit="s",
        bar=1.0,
        better="less",
    ),
    Figure("viewer-sent", "… sent with it", "viewer", lambda f: f["sent_mb"], unit="MB", bar=2.0, better="less"),
    Figure("viewer-window", "… 24 rows", "viewer", lambda f: f["window_ms"], unit="ms", bar=100.0, better="less"),
)


def main() -> None:
    """Print one line per figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=ROLLOUTS)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--rounds", type=int, help="how often it is opened")
    parser.add_argument("--notebook", type=Path)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(Requests(), partial(Viewer, args.rollouts, args.tokens))
    elif args.notebook:
        import nbformat

        first = NOTEBOOK.format(folder=str(Path(__file__).parents[1]), rollouts=args.rollouts, tokens=args.tokens)
        cells = [nbformat.v4.new_code_cell(source) for source in (first, "rollouts")]
        nbformat.write(nbformat.v4.new_notebook(cells=cells), args.notebook)
        print(args.notebook)
    else:
        measure = partial(views, rollouts=args.rollouts, tokens=args.tokens)
        main_of(Experiment("viewer", measure, 5, 5.0), FIGURES, args.rounds)


if __name__ == "__main__":
    main()
