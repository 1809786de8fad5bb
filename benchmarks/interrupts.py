"""Ctrl-C at random points of verbs: seconds until the prompt is back, and until the engines can be used again.

A round interrupts a rollout, a train step, a sync and a user's function once each, on the tiny model with two ranks,
and takes the slowest. `benchmarks/faults.py` has the other faults, and checks what became of the weights.

    python -m benchmarks.interrupts
"""

from __future__ import annotations

import argparse
import signal

from benchmarks.harness import Experiment, Figure, Measuring, Stage, main_of
from benchmarks.turns import Record, Requests, serve

VERBS = ("rollout", "train step", "sync", "user function")


def interrupts(at: Stage) -> Measuring:
    """Yield the slowest verb's seconds to the prompt and to usable engines."""
    side = at.side("benchmarks.interrupts", "--serve")
    side.ready()
    while True:
        yield side.turn()


class Interrupts:
    """A session whose verbs are interrupted."""

    def __init__(self) -> None:
        import rlbench as rb
        from benchmarks import faults

        # a process that a shell started in the background has it ignored
        signal.signal(signal.SIGINT, signal.default_int_handler)
        self.session = rb.Session("tiny", train=rb.Train(lr=1e-4, shards=2))
        self.trial, self.tally = faults.Trial(self.session, seed=0), faults.Tally

    def turn(self) -> Record:
        """Interrupt each verb once; an error where a session did not survive."""
        tally = self.tally("Ctrl-C")
        for verb in VERBS:
            self.trial.interrupt(verb, tally)
        if tally.lost:
            raise RuntimeError(f"lost: {tally.lost[0]}")
        return {"prompt_s": max(tally.prompt_s), "usable_s": max(tally.usable_s)}

    def close(self) -> None:
        """End the session."""
        self.session.close()


EXPERIMENTS = (Experiment("interrupts", interrupts, 3, 0.3),)
FIGURES = (
    Figure(
        "interrupt-prompt",
        "interrupt → prompt back",
        "interrupts",
        lambda found: found["prompt_s"],
        unit="s",
        bar=2.0,
        better="less",
    ),
    Figure(
        "interrupt-usable",
        "… engines usable",
        "interrupts",
        lambda found: found["usable_s"],
        unit="s",
        bar=2.0,
        better="less",
    ),
)


def main() -> None:
    """Measure and print; with `--serve` be the side."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, help="how often each verb is interrupted")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        return serve(Requests(), Interrupts)
    for experiment in EXPERIMENTS:
        main_of(experiment, FIGURES, given.rounds)
    return None


if __name__ == "__main__":
    main()
