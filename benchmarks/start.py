"""The start of a session against vLLM's, further sessions, heals, and attaching from a new kernel.

A start counts from a new process to its first completion on the tiny model, which is cached; no cluster runs. The other
side is `LLM(...)` in process, the fastest way vLLM itself starts. A heal counts from when the death is known; attaching
counts from a new Python process to a session that can be driven.

    python -m benchmarks.start                # also: python -m benchmarks.step --start
    python -m benchmarks.start --default      # with vLLM's default mode, in processes of its own, as a third side
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from functools import partial
from typing import Any

from benchmarks.harness import Experiment, Figure, Measuring, Stage, main_of
from benchmarks.turns import Record, Requests, seconds_to_end, serve, timed

SESSION = """
import time
import rlbench as rb
session = rb.Session("tiny")
session.rollout(["sort 52143"], max_tokens=16, progress=False)
print("ended at", time.time(), flush=True)
"""
VLLM = """
import time
from rlbench import tiny
if __name__ == "__main__":
    from vllm import LLM, SamplingParams
    LLM(str(tiny.ensure()), dtype={dtype!r}, enforce_eager=True, kv_cache_memory_bytes=1 << 30).generate(
        ["sort 52143"], SamplingParams(max_tokens=16))
    print("ended at", time.time(), flush=True)
"""
ATTACH = """
import sys, time
import rlbench as rb
session = rb.attach(sys.argv[1], take_over=True)
print("ended at", time.time(), flush=True)
"""
IMPORT = "import time, ray; print('ended at', time.time(), flush=True)"


def cold(at: Stage, default: bool = False) -> Measuring:
    """Yield seconds of a session from nothing, and of vLLM alone."""
    script = at.folder / "start.py"  # vLLM's default mode starts processes that import the main module
    script.write_text(VLLM.format(dtype="float32" if at.device == "cpu" else "auto"))
    in_process = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    while True:
        at.end_cluster()
        found = {"vllm": seconds_to_end([str(script)], at.log("vllm"), at.environment | in_process)}
        if default:
            found["vllm_default"] = seconds_to_end([str(script)], at.log("vllm"), at.environment)
        found["session"] = seconds_to_end(["-c", SESSION], at.log("session"), at.environment)
        yield found


def on_a_cluster(at: Stage) -> Measuring:
    """Yield seconds of a further session and of heals, one after the other."""
    side = at.side("benchmarks.start", "--serve")
    side.ready()
    while True:
        yield {name: side.turn(what=name)["s"] for name in ("further", "replica", "rank")}


def attach(at: Stage) -> Measuring:
    """Yield seconds of new processes that take a running session over, beside those of `import ray`."""
    side = at.side("benchmarks.session_side", json.dumps({"model": "tiny", "keep": True, "lease_s": 600}))
    side.ready()
    name = side.turn(verb="where")["name"]
    at.end_sides()  # that kernel is gone
    while True:
        yield {
            "attach": seconds_to_end(["-c", ATTACH, name], at.log("attach"), at.environment),
            "import_ray": seconds_to_end(["-c", IMPORT], at.log("ray"), at.environment),
        }


class OnACluster:
    """The side of `on_a_cluster`: a session that loses workers, and others beside it."""

    def __init__(self) -> None:
        import rlbench as rb

        self.rb, self.session = rb, rb.Session("tiny")

    def turn(self, what: str) -> Record:
        """Time one start or heal."""
        if what == "further":
            return {"s": self._further()}
        self._kill("inference" if what == "replica" else "actor")
        return {"s": timed(self.session.heal)}

    def close(self) -> None:
        """End the session."""
        self.session.close()

    def _further(self) -> float:
        begin = time.perf_counter()
        other = self.rb.Session("tiny")
        other.rollout(["sort 52143"], max_tokens=16, progress=False)
        seconds = time.perf_counter() - begin
        other.close()
        return seconds

    def _kill(self, engine: str) -> None:
        def state() -> Any:
            return self.session.core.link.state("engines")["engines"][engine]

        os.kill(next(iter(state()["pids"].values())), signal.SIGKILL)
        while state()["broken"] is None:
            time.sleep(0.05)


EXPERIMENTS = (
    Experiment("cold", cold, 2, 0.8),
    Experiment("cluster", on_a_cluster, 3, 0.3),
    Experiment("attach", attach, 3, 0.2),
)
FIGURES = (
    Figure(
        "start-cold",
        "cell → first rollout: no cluster running, model cached",
        "cold",
        lambda found: found["session"],
        unit="s",
        bar=12.0,
        better="less",
    ),
    Figure("start-vllm", "… `LLM(…)` in process / session", "cold", lambda found: found["vllm"] / found["session"]),
    Figure("start-further", "… further session", "cluster", lambda f: f["further"], unit="s", bar=4.0, better="less"),
    Figure("heal-replica", "… heal of a replica", "cluster", lambda f: f["replica"], unit="s", bar=6.0, better="less"),
    Figure("heal-rank", "… heal of a rank", "cluster", lambda found: found["rank"], unit="s"),
    Figure(
        "attach",
        "attach to a running session from a new kernel",
        "attach",
        lambda found: found["attach"],
        unit="s",
        bar=3.0,
        better="less",
    ),
)


def main() -> None:
    """Run all of it and print the figures; with `--serve` be the side of `on_a_cluster`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--default", action="store_true", help="also vLLM's default mode")
    parser.add_argument("--rounds", type=int, help="how often each side works, in turns")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        return serve(Requests(), OnACluster)
    figures = list(FIGURES)
    experiments = list(EXPERIMENTS)
    if given.default:
        experiments[0] = Experiment("cold", partial(cold, default=True), 2, 2.0)
        ratio = "`LLM(…)`, default mode / session"
        figures.append(Figure("start-default", ratio, "cold", lambda f: f["vllm_default"] / f["session"]))
    for experiment in experiments:
        main_of(experiment, figures, given.rounds)
    return None


if __name__ == "__main__":
    main()
