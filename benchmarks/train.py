"""The train step alone: its fixed cost on a tiny batch, what packing gains on ragged lengths, and shared prompts.

Fixed cost: a whole `train_step` on 80 response tokens of the tiny model, where computing takes next to nothing.
Packing: the same batch of geometric lengths (mean 32, limit 256), packed and padded, in turns; padded micro-batches are
made of rows of like length already, and the ratio is held against the tokens that padding adds to them.
Shared prompts: 3 x 8 completions of 64 tokens behind prompts of 256 letters, each computed for every completion and
once for its eight, in turns; the ratio is held against that of the tokens.

    python -m benchmarks.train
"""

from __future__ import annotations

import argparse
import json

from benchmarks.harness import Experiment, Figure, Measuring, Round, Stage, main_of
from benchmarks.models import model_folder


def fixed(at: Stage) -> Measuring:
    """Yield milliseconds of a train step on 80 tokens."""
    side = at.side("benchmarks.session_side", json.dumps({"model": "tiny"}))
    side.ready()
    tokens = side.turn(verb="prepare", prompts=2, n=4, tokens=10)["trained"]
    for _ in range(3):
        side.turn(verb="train")
    while True:
        yield {"train_ms": 1e3 * side.turn(verb="train")["s"], "tokens": tokens}


def ragged(at: Stage) -> Measuring:
    """Yield seconds of a train step, packed and padded, and the share of padding in each."""
    side = at.side("benchmarks.session_side", json.dumps({"model": model_folder("bench-10m")}))
    side.ready()
    side.turn(verb="prepare", tokens=256, geometric=True)
    for packing in (True, False):
        side.turn(verb="train", packing=packing)
    while True:
        found = {name: side.turn(verb="train", packing=name == "packed") for name in ("packed", "padded")}
        yield {f"{name}_{key}": value for name, record in found.items() for key, value in record.items()}


def prompts(at: Stage) -> Measuring:
    """Yield seconds of a train step that computes prompts once, or for each completion, and the share that is saved."""
    side = at.side("benchmarks.session_side", json.dumps({"model": model_folder("bench-10m")}))
    side.ready()
    side.turn(verb="prepare", prompts=3, behind=256)
    for share in (True, False):
        side.turn(verb="train", share_prompts=share)
    while True:
        found = {name: side.turn(verb="train", share_prompts=name == "once") for name in ("once", "each")}
        yield {f"{name}_{key}": value for name, record in found.items() for key, value in record.items()}


def gain(found: Round) -> float:
    """Return how much of what padding costs in tokens packing gains in time."""
    return found["padded_s"] / found["packed_s"] * (1 - found["padded_padding"])


EXPERIMENTS = (
    Experiment("fixed", fixed, 20, 0.2),
    Experiment("ragged", ragged, 5, 0.5),
    Experiment("prompts", prompts, 4, 0.6),
)
FIGURES = (
    Figure(
        "fixed-cost",
        "train step on 80 tokens, tiny model",
        "fixed",
        lambda found: found["train_ms"],
        unit="ms",
        bar=40.0,
        better="less",
    ),
    Figure(
        "prompts",
        "train step, 3 × 8 × 64 tokens behind prompts of 256, 10 M: a prompt for each / once (`share_prompts=True`)",
        "prompts",
        lambda found: found["each_s"] / found["once_s"],
    ),
    Figure(
        "prompts-tokens",
        "… over the ratio of the tokens",
        "prompts",
        lambda found: found["each_s"] / found["once_s"] * (1 - found["once_shared"]),
        bar=0.9,
    ),
    Figure("ragged", "packed train step: padded / packed seconds, over padded / real tokens", "ragged", gain, bar=0.9),
)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, help="how often each side works, in turns")
    given = parser.parse_args()
    for experiment in EXPERIMENTS:
        main_of(experiment, FIGURES, given.rounds)


if __name__ == "__main__":
    main()
