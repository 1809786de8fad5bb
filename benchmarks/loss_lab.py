"""A loss lab of four losses against one forward of the same batch: `session.loss_lab` / `session.logprobs`.

Both sides run on one session, in turns, so that the ratio holds on a machine whose speed drifts. The bar: below 1.3
without the gradients of the parameters.

    python -m benchmarks.loss_lab                  # 10 M parameters, 8 x 8 completions of 64 tokens
    python -m benchmarks.loss_lab --gradients      # also with the parameters' gradients, which cost a step per loss
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from typing import Any

from benchmarks.harness import Experiment, Figure, Measuring, Round, Stage, main_of
from benchmarks.models import model_folder

ROUNDS = 7


def mine(inputs: Any, beta: float = 0.1) -> Any:
    """A loss as a user writes it."""
    ratio = (inputs.logprobs - inputs.old_logprobs).exp()
    return -inputs.advantages * ratio + beta * (inputs.logprobs - inputs.old_logprobs).square(), {}


LOSSES = {"grpo": "grpo", "dapo": "dapo", "reinforce": "reinforce", "mine": mine}


def lab(at: Stage, model: str = "bench-10m", gradients: bool = False) -> Measuring:
    """Yield seconds of each side."""
    side = at.side("benchmarks.session_side", json.dumps({"model": model_folder(model)}))
    side.ready()
    side.turn(verb="prepare")
    sides: dict[str, dict[str, Any]] = {"logprobs": {"verb": "logprobs"}, "lab": {"verb": "lab"}}
    if gradients:
        sides |= {"lab_gradients": {"verb": "lab", "gradients": True}, "train_steps": {"verb": "four_backwards"}}

    def once() -> Round:
        return {f"{name}_s": side.turn(**request)["s"] for name, request in sides.items()}

    once()
    while True:
        yield once()


EXPERIMENTS = (Experiment("loss-lab", lab, ROUNDS, 0.3),)
FIGURES = (
    Figure(
        "loss-lab",
        "loss lab of four losses / one forward",
        "loss-lab",
        lambda found: found["lab_s"] / found["logprobs_s"],
        bar=1.3,
        better="less",
    ),
)
WITH_GRADIENTS = (
    Figure(
        "lab-gradients",
        "… with the parameters' gradients",
        "loss-lab",
        lambda found: found["lab_gradients_s"] / found["logprobs_s"],
    ),
    Figure(
        "four-backwards",
        "four plain `forward_backward` / one forward",
        "loss-lab",
        lambda found: found["train_steps_s"] / found["logprobs_s"],
    ),
)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="bench-10m")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--gradients", action="store_true")
    given = parser.parse_args()
    measure = partial(lab, model=given.model, gradients=given.gradients)
    figures = FIGURES + (WITH_GRADIENTS if given.gradients else ())
    main_of(Experiment("loss-lab", measure, given.rounds, 10.0), figures)


if __name__ == "__main__":
    main()
