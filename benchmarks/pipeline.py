"""A loop of `session.pipeline` one step ahead (lag 1) against the same without (lag 0), in turns in one session.

A ratio above 1 says that one step ahead is faster. On one GPU, or on a host whose cores rollout and training share, the
bar is 1; where each has devices of its own the time that may be hidden is that of the shorter of the two.

    python -m benchmarks.pipeline                    # 10 M parameters, 8 x 8 completions of 64 tokens
    python -m benchmarks.pipeline --score-s 0.02     # with a reward that waits so long for each completion
"""

from __future__ import annotations

import argparse
import json
from functools import partial

from benchmarks.harness import Experiment, Figure, Measuring, Stage, main_of
from benchmarks.models import model_folder

STEPS = 3


def lags(at: Stage, model: str = "bench-10m", score_s: float = 0.0) -> Measuring:
    """Yield seconds of a step with lag 0 and with lag 1; the first step of a turn, which hides nothing, counts too."""
    side = at.side("benchmarks.session_side", json.dumps({"model": model_folder(model), "train": {"lr": 1e-4}}))
    side.ready()
    side.turn(verb="pipeline", lag=0, steps=1)
    side.turn(verb="settle")
    while True:
        yield {f"lag_{lag}_s": side.turn(verb="pipeline", lag=lag, steps=STEPS, score_s=score_s)["s"] for lag in (0, 1)}


EXPERIMENTS = (Experiment("pipeline", lags, 4, 0.9),)
FIGURES = (
    Figure(
        "pipeline",
        "step with lag 0 / one step ahead: 10 M",
        "pipeline",
        lambda found: found["lag_0_s"] / found["lag_1_s"],
        bar=1.0,
    ),
)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--score-s", type=float, default=0.0, help="seconds that the reward waits for a completion")
    parser.add_argument("--model", default="bench-10m")
    given = parser.parse_args()
    measure = partial(lags, model=given.model, score_s=given.score_s)
    main_of(Experiment("pipeline", measure, given.rounds, 5.0), FIGURES)


if __name__ == "__main__":
    main()
