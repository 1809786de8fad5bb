"""What the rollout viewer costs: time to open it, bytes sent, time per window and per change of order.

    python benchmarks/viewer.py                    # 10,000 rollouts of 1,000 tokens with eight channels
    python benchmarks/viewer.py --rollouts 1000 --tokens 200
    python benchmarks/viewer.py --notebook FILE    # writes a notebook that shows them, to scroll in a browser

Bars: open ≤ 1 s, ≤ 2 MB sent, a window ≤ 100 ms with what the page needs to draw it (the page's own share is measured
in tests/browser/test_rollout_viewer.py). "sent" counts every byte of the widgets' first messages, their code too.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from rlbench import tiny
from rlbench.data import FINISH_REASONS, Prompt, Ragged, Rollouts
from rlbench.data.record.metrics import Metrics

GROUP = 8
NOTEBOOK = """import sys; sys.path.insert(0, {folder!r})
from viewer import made_up
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


def main() -> None:
    """Print one line per figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=10_000)
    parser.add_argument("--tokens", type=int, default=1_000)
    parser.add_argument("--notebook", type=Path)
    args = parser.parse_args()
    if args.notebook:
        import nbformat

        first = NOTEBOOK.format(folder=str(Path(__file__).parent), rollouts=args.rollouts, tokens=args.tokens)
        cells = [nbformat.v4.new_code_cell(source) for source in (first, "rollouts")]
        nbformat.write(nbformat.v4.new_notebook(cells=cells), args.notebook)
        print(args.notebook)
        return
    from rlbench.notebook.rollouts import viewer as rollout_viewer

    rollouts = made_up(args.rollouts, args.tokens)
    print(f"{args.rollouts:,} rollouts × {args.tokens:,} tokens, {len(rollouts.channels) + 1} channels")
    first_s, bundle = timed(lambda: rollout_viewer.mimebundle(rollouts))
    open_s, viewer = timed(lambda: rollout_viewer.viewer(rollouts), rounds=5)
    print(f"cell output, first time            {first_s:6.3f} s")
    print(f"viewer alone, median of 5          {open_s:6.3f} s")
    print(f"sent with it                       {state_bytes(viewer) / 1e6:6.3f} MB")
    print(f"static view in the saved notebook  {len(bundle['text/html']) / 1e3:6.1f} kB")
    drawing = viewer.drawing
    rng = np.random.default_rng(1)

    def window() -> Any:
        at = int(rng.integers(0, args.rollouts - 24))
        rows = [[i, 0, None] for i in range(at, at + 24)]
        return drawing.answer({"id": "", "kind": "rows", "heads": [at // GROUP], "rows": rows})

    window_s, (content, buffers) = timed(window, rounds=50)
    sent = len(json.dumps(content)) + sum(map(len, buffers))
    print(f"window of 24 rows, median of 50    {window_s * 1e3:6.1f} ms, {sent / 1e3:.0f} kB")
    for sort in range(len(viewer.sort.options)):
        order = {"id": "", "kind": "order", "sort": sort, "filter": 0, "search": ""}
        order_s, _ = timed(lambda asked=order: drawing.answer(asked), rounds=5)
        print(f"order: {viewer.sort.options[sort][0]:<28}{order_s * 1e3:6.1f} ms")
    asked = {"id": "", "kind": "order", "sort": 0, "filter": 0, "search": "needle"}
    print(f"search, median of 5                {timed(lambda: drawing.answer(asked), rounds=5)[0] * 1e3:6.1f} ms")


if __name__ == "__main__":
    main()
