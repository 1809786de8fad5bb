"""What an edited loss costs: seconds from the cell to its metrics, over the same step with a loss that was there.

Both sides run on one session, in turns: an edited loss (compiled, tried, sent, unpickled on the ranks), then the same
loss again. The bar: at most 1 s more. Also the time of a redefined method, and how many hashes the losses had.

    python -m benchmarks.hot_reload            # the tiny model, 20 edits
"""

from __future__ import annotations

import argparse
import json
from functools import partial

from benchmarks.harness import Experiment, Figure, Measuring, Stage, main_of
from benchmarks.models import model_folder

EDITS, TOKENS = 20, 16


def edits(at: Stage, model: str = "tiny") -> Measuring:
    """Yield seconds of a step with an edited loss, of the same step again, of an edited method, and losses seen."""
    named = model if model == "tiny" else model_folder(model)
    side = at.side("benchmarks.session_side", json.dumps({"model": named}))
    side.ready()
    side.turn(verb="prepare", tokens=TOKENS)
    side.turn(verb="edited_step")
    while True:
        fresh = side.turn(verb="edited_step")
        yield {
            "edited_s": fresh["s"],
            "same_s": side.turn(verb="same_step")["s"],
            "method_s": side.turn(verb="edited_method")["s"],
            "losses": fresh["losses"],
        }


EXPERIMENTS = (Experiment("hot-reload", edits, EDITS // 2, 0.2),)
FIGURES = (
    Figure(
        "edited-loss",
        "cell with an edited loss → metrics, over the step itself",
        "hot-reload",
        lambda found: found["edited_s"] - found["same_s"],
        unit="s",
        bar=1.0,
        better="less",
    ),
    Figure("edited-method", "edited method, called", "hot-reload", lambda found: found["method_s"], unit="s"),
)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--edits", type=int, default=EDITS)
    given = parser.parse_args()
    main_of(Experiment("hot-reload", partial(edits, model=given.model), given.edits, 2.0), FIGURES)


if __name__ == "__main__":
    main()
