"""What an edited loss costs: seconds from the cell to its metrics, over the same step with a loss that was there.

Both sides run in this one invocation, in turns, on one session: an edited loss (compiled, tried, sent, unpickled on the
ranks), then the same loss again. The bar: at most 1 s more. Also the time of a redefined method.

    python benchmarks/hot_reload.py            # the tiny model, 20 edits
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import rlbench as rb
from rlbench.tiny import tasks

EDITS, PROMPTS, SAMPLES, TOKENS = 20, 8, 8, 16

CELL = """
def helper(x):
    return {n} * x

def edited(inputs):
    ratio = (inputs.logprobs - inputs.old_logprobs).exp()
    return helper(-inputs.advantages * ratio), {{"edit": {n}.0}}
"""
METHOD = """
def probe(self):
    return {n}
"""


def cell(source: str, name: str, n: int) -> Any:
    """Run a cell's text, as a notebook does, and return what it defines."""
    space: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(source.format(n=n), f"<cell {n}>", "exec"), space)
    return space[name]


def main() -> None:
    """Print the medians of both sides, what the edit costs over the step, and the number of hashes seen."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--edits", type=int, default=EDITS)
    given = parser.parse_args()
    fresh, again, methods = [], [], []
    with rb.Session(given.model) as session:
        rollouts = session.rollout(tasks.prompts(PROMPTS), n=SAMPLES, max_tokens=TOKENS, progress=False)
        scored = rollouts.score([i % 2 for i in range(rollouts.samples)])
        batch = scored.batch(advantage=rb.rl.group_normalized())
        session.train_step(batch, cell(CELL, "edited", 0))
        for n in range(1, given.edits + 1):
            begin = time.perf_counter()
            loss = cell(CELL, "edited", n)
            assert session.train_step(batch, loss).edit == n
            middle = time.perf_counter()
            session.train_step(batch, loss)
            fresh.append(middle - begin)
            again.append(time.perf_counter() - middle)
            begin = time.perf_counter()
            session.method(cell(METHOD, "probe", n))
            assert session.train.probe()[0] == n
            methods.append(time.perf_counter() - begin)
        hashes = len(set(session.history["loss_hash"]))
    over = [a - b for a, b in zip(fresh, again, strict=True)]
    print(f"edited loss    {statistics.median(fresh):.3f} s")
    print(f"the same again {statistics.median(again):.3f} s")
    print(f"over the step  {statistics.median(over):.3f} s, at most {max(over):.3f} s (the bar: 1 s)")
    print(f"edited method, called  {statistics.median(methods):.3f} s")
    print(f"{hashes} hashes of {given.edits + 1} losses")
    rb.shutdown()


if __name__ == "__main__":
    main()
