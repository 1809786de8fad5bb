"""A loss lab of four losses against one forward of the same batch: `session.loss_lab` / `session.logprobs`.

Both sides run in this one invocation, in turns, on one session, so that the ratio holds on a machine whose speed
drifts. The bar: below 1.3 without the gradients of the parameters.

    python benchmarks/loss_lab.py                  # 10 M parameters, 8 x 8 completions of 64 tokens
    python benchmarks/loss_lab.py --gradients      # also with the parameters' gradients, which cost a step per loss
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import rlbench as rb
from rlbench.tiny import tasks

ROUNDS, PROMPTS, SAMPLES, TOKENS = 7, 8, 8, 64


def mine(inputs: Any, beta: float = 0.1) -> Any:
    """A loss as a user writes it."""
    ratio = (inputs.logprobs - inputs.old_logprobs).exp()
    return -inputs.advantages * ratio + beta * (inputs.logprobs - inputs.old_logprobs).square(), {}


LOSSES = {"grpo": "grpo", "dapo": "dapo", "reinforce": "reinforce", "mine": mine}


def main() -> None:
    """Print the medians of both sides and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="bench-10m")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--gradients", action="store_true")
    given = parser.parse_args()
    with rb.Session(given.model) as session:
        rollouts = session.rollout(
            tasks.prompts(PROMPTS), n=SAMPLES, max_tokens=TOKENS, ignore_eos=True, progress=False
        )
        scored = rollouts.score([i % 2 for i in range(rollouts.samples)])
        batch = scored.batch(advantage=rb.rl.group_normalized())
        sides: dict[str, Callable[[], Any]] = {
            "logprobs": lambda: session.logprobs(batch),
            "lab": lambda: session.loss_lab(batch, LOSSES),
        }
        if given.gradients:
            sides["lab with gradients"] = lambda: session.loss_lab(batch, LOSSES, parameter_gradients=True)
            sides["train steps"] = lambda: [
                session.forward_backward(batch, loss) and session.zero_grad() for loss in LOSSES.values()
            ]
        seconds = measured(sides, given.rounds)
    for name, found in seconds.items():
        print(f"{name:<20} {statistics.median(found):7.3f} s   / logprobs {ratio(seconds, name):.2f}")
    rb.shutdown()


def measured(sides: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each side in each round, after one round that does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(rounds + 1):
        for name, work in sides.items():
            begin = time.perf_counter()
            work()
            if turn:
                seconds[name].append(time.perf_counter() - begin)
    return seconds


def ratio(seconds: dict[str, list[float]], name: str) -> float:
    """Median over the rounds of this side's time over that of the forward in the same round."""
    return statistics.median(a / b for a, b in zip(seconds[name], seconds["logprobs"], strict=True))


if __name__ == "__main__":
    main()
