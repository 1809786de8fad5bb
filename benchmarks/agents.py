"""The endpoint against a rollout of the same completions, and continuations from a token.

python -m benchmarks.agents                      # 64 concurrent chats of 256 tokens on the tiny model
python -m benchmarks.agents --calls 16
"""

from __future__ import annotations

import argparse
import json
from functools import partial

from benchmarks.harness import Experiment, Figure, Measuring, Stage, main_of
from benchmarks.models import model_folder


def endpoint(at: Stage, model: str = "tiny", calls: int = 64, tokens: int = 256) -> Measuring:
    """Yield tokens per second of a rollout and of as many clients at once, whose process shares the machine."""
    side = at.side("benchmarks.session_side", json.dumps({"model": model_folder(model)}))
    side.ready()
    size = {"calls": calls, "tokens": tokens}
    for verb in ("sampled", "served"):
        side.turn(verb=verb, **size)
    while True:
        yield {f"{verb}_tps": side.turn(verb=verb, **size)["tps"] for verb in ("sampled", "served")}


def continuations(at: Stage, model: str = "bench-10m") -> Measuring:
    """Yield seconds from asking for continuations of a completion at a token to having them."""
    side = at.side("benchmarks.session_side", json.dumps({"model": model_folder(model)}))
    side.ready()
    side.turn(verb="continued")
    while True:
        yield {"continued_s": side.turn(verb="continued")["s"]}


EXPERIMENTS = (
    Experiment("endpoint", endpoint, 6, 0.5),
    Experiment("endpoint-10m", partial(endpoint, model="bench-10m"), 4, 0.8),
    Experiment("continuations", continuations, 6, 0.3),
)
FIGURES = (
    Figure(
        "endpoint",
        "endpoint / `rollout`, tokens per second, 64 concurrent calls of 256 tokens",
        "endpoint",
        lambda found: found["served_tps"] / found["sampled_tps"],
        bar=0.9,
    ),
    Figure(
        "endpoint-10m",
        "… 10 M",
        "endpoint-10m",
        lambda found: found["served_tps"] / found["sampled_tps"],
        bar=0.9,
    ),
    Figure(
        "continuations",
        "16 continuations × 64 tokens from a token, 10 M",
        "continuations",
        lambda found: found["continued_s"],
        unit="s",
        bar=1.0,
        better="less",
    ),
)


def main() -> None:
    """Measure the endpoint and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--calls", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--model", default="tiny")
    given = parser.parse_args()
    measure = partial(endpoint, model=given.model, calls=given.calls, tokens=given.tokens)
    main_of(Experiment("endpoint", measure, given.rounds, 5.0), FIGURES)


if __name__ == "__main__":
    main()
