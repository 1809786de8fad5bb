"""An engine's call of an empty method against an empty method of bare Ray actors, on one rank and on two.

Both sides run in one process, in turns: a round is a block of calls of each. A rank counts its memory after a user's
method, but after one as short as this only when somebody asks for it.

    python -m benchmarks.call                 # also: python -m benchmarks.step --call
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

from benchmarks.harness import Experiment, Figure, Measuring, Stage, main_of
from benchmarks.turns import Record, Requests, serve, timed

CALLS, WARM = 60, 30


def calls(at: Stage) -> Measuring:
    """Yield the median milliseconds of a call, by side and ranks."""
    side = at.side("benchmarks.call", "--serve")
    side.ready()
    while True:
        yield side.turn()


class Calls:
    """Engines and bare actors of one rank and of two."""

    def __init__(self) -> None:
        import rlbench as rb
        from benchmarks.idle_module import IdleModule
        from rlbench import tiny

        rb.init()
        import ray  # only now: it reads the cluster's token at its import

        class Empty:
            def nothing(self) -> None:
                pass

        bare = ray.remote(num_cpus=0)(Empty)
        with rb.device("meta"):
            module = IdleModule.from_pretrained(tiny.ensure())
        self.engines, self.sides = [], {}
        for ranks in (1, 2):
            engine = rb.TrainEngine(module, name=f"calls{ranks}")
            engine.build(tensor_parallel_size=ranks, data_parallel_size=1)
            self.engines.append(engine)
            self.sides[f"bare_{ranks}"] = _bare([bare.remote() for _ in range(ranks)])
            self.sides[f"engine_{ranks}"] = engine.nothing
        for call in self.sides.values():
            for _ in range(WARM):
                call()

    def turn(self) -> Record:
        """Call each side some times."""
        return {
            f"{name}_ms": 1e3 * statistics.median(timed(call) for _ in range(CALLS))
            for name, call in self.sides.items()
        }

    def close(self) -> None:
        """End the engines."""
        for engine in self.engines:
            engine.close()


def _bare(actors: list[Any]) -> Callable[[], Any]:
    import ray

    return lambda: ray.get([actor.nothing.remote() for actor in actors])


EXPERIMENTS = (Experiment("call", calls, 8, 0.2),)
FIGURES = (
    Figure(
        "call-1",
        "engine call of an empty method / bare actor call, one rank",
        "call",
        lambda found: found["engine_1_ms"] / found["bare_1_ms"],
        bar=1.5,
        better="less",
    ),
    Figure(
        "call-2",
        "… two ranks, beyond a bare call of two actors",
        "call",
        lambda found: found["engine_2_ms"] - found["bare_2_ms"],
        unit="ms",
        bar=1.5,
        better="less",
    ),
)


def main() -> None:
    """Measure and print; with `--serve` be the side."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, help="how often each side works, in turns")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        return serve(Requests(), Calls)
    for experiment in EXPERIMENTS:
        main_of(experiment, FIGURES, given.rounds)
    return None


if __name__ == "__main__":
    main()
