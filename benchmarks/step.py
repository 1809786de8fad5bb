"""A whole RL step of a session against the hand-written single-process loop, and the start of a session against vLLM's.

Both sides run in this one invocation, in turns, each in processes of its own, so that the ratio holds on a machine
whose speed drifts. A ratio above 1 says that rlbench is faster.

    python benchmarks/step.py                 # the step: 10 M parameters, 8 x 8 completions of 64 tokens
    python benchmarks/step.py --start         # from a new process to the first rollout, no cluster running
    python benchmarks/step.py --call          # an engine call of an empty method against a bare Ray actor call
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROUNDS = 3
STEPS = 6
PROMPTS, SAMPLES, TOKENS = 8, 8, 64

SESSION = """
import json, statistics, sys, time
import rlbench as rb
from rlbench.tiny import tasks
steps, prompts, samples, tokens = map(int, sys.argv[2:6])
session = rb.Session("bench-10m", train=rb.Train(lr=1e-4))
asked = tasks.prompts(prompts * steps)
records = []
for step in range(steps):
    clock = [time.perf_counter()]
    rollouts = session.rollout(asked[step * prompts:(step + 1) * prompts], n=samples, max_tokens=tokens,
                               ignore_eos=True, progress=False)
    clock.append(time.perf_counter())
    scored = rollouts.score(lambda r: statistics.fmean(t % 2 for t in r.token_ids))
    session.train_step(scored.batch(advantage=rb.rl.group_normalized()))
    clock.append(time.perf_counter())
    session.sync_weights()
    clock.append(time.perf_counter())
    records.append({"rollout_s": clock[1] - clock[0], "train_s": clock[2] - clock[1], "sync_s": clock[3] - clock[2],
                    "step_s": clock[3] - clock[0]})
session.close()
rb.shutdown()
later = records[1:]
json.dump({"median": {k: statistics.median(r[k] for r in later) for k in later[0]}}, open(sys.argv[1], "w"))
"""

START_SESSION = """
import rlbench as rb
session = rb.Session("tiny")
session.rollout(["sort 52143"], max_tokens=16)
"""

START_VLLM = """
import sys
from rlbench import tiny
if __name__ == "__main__":
    from vllm import LLM, SamplingParams
    LLM(str(tiny.ensure()), dtype="float32", enforce_eager=True, kv_cache_memory_bytes=1 << 30).generate(
        ["sort 52143"], SamplingParams(max_tokens=16))
"""

CALLS = """
import json, statistics, sys, time
import rlbench as rb
from rlbench.trainers.models.policy_spec import PolicySpec
from rlbench import tiny

rb.init(devices=2)
import ray

@ray.remote(num_cpus=0)
class Bare:
    def nothing(self): pass

def median_of(call, count=400):
    for _ in range(50): call()
    times = []
    for _ in range(count):
        begin = time.perf_counter(); call(); times.append(time.perf_counter() - begin)
    return statistics.median(times)

found = {}
for ranks in (1, 2):
    engine = rb.TrainEngine(PolicySpec(str(tiny.ensure())), name=f"calls{ranks}")
    engine.build(tensor_parallel_size=ranks, data_parallel_size=1)
    bare = [Bare.remote() for _ in range(ranks)]
    found[str(ranks)] = {"bare_s": median_of(lambda: ray.get([b.nothing.remote() for b in bare])),
                         "engine_s": median_of(engine.eval)}
    engine.close()
rb.shutdown()
json.dump(found, open(sys.argv[1], "w"))
"""


def main() -> None:
    """Run what was asked for and print seconds and ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--start", action="store_true", help="start-up instead of steps")
    parser.add_argument("--call", action="store_true", help="empty calls instead of steps")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="how often both sides run, in turns")
    arguments = parser.parse_args()
    from rlbench import tiny

    tiny.ensure("tiny")
    tiny.ensure("bench-10m")
    with tempfile.TemporaryDirectory() as folder:
        if arguments.start:
            compare_start(Path(folder), arguments.rounds)
        elif arguments.call:
            compare_calls(Path(folder))
        else:
            compare_steps(Path(folder), arguments.rounds)


def compare_steps(folder: Path, rounds: int) -> None:
    """Medians of the steps of both sides, and their ratio by phase."""
    ours, theirs = [], []
    hand = Path(__file__).with_name("handwritten_loop.py")
    for turn in range(rounds):
        out = folder / "hand.json"
        python(
            folder,
            str(hand),
            "--steps",
            str(STEPS),
            "--prompts",
            str(PROMPTS),
            "--n",
            str(SAMPLES),
            "--max-tokens",
            str(TOKENS),
            "--json",
            str(out),
        )
        theirs.append(json.loads(out.read_text())["median"])
        out = folder / "session.json"
        python(folder, "-c", SESSION, str(out), str(STEPS), str(PROMPTS), str(SAMPLES), str(TOKENS))
        ours.append(json.loads(out.read_text())["median"])
        print(
            f"round {turn + 1}: by hand {theirs[-1]['step_s']:.2f} s, session {ours[-1]['step_s']:.2f} s",
            flush=True,
        )
    for phase in ("rollout_s", "train_s", "sync_s", "step_s"):
        hand_s, our_s = (statistics.median(r[phase] for r in side) for side in (theirs, ours))
        print(f"{phase:<10} by hand {hand_s:7.3f}   session {our_s:7.3f}   by hand / session {hand_s / our_s:.2f}")


def compare_start(folder: Path, rounds: int) -> None:
    """Seconds from a new process to its first completion."""
    sides = {"LLM(), default mode": {}, "LLM(), in process": {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}}
    script = folder / "start.py"  # vLLM's default mode starts processes that import the main module
    script.write_text(START_VLLM)
    seconds: dict[str, list[float]] = {name: [] for name in [*sides, "session"]}
    for _ in range(rounds):
        for name, extra in sides.items():
            seconds[name].append(python(folder, str(script), **extra))
        seconds["session"].append(python(folder, "-c", START_SESSION))
        python(
            folder,
            "-c",
            "import rlbench as rb; [rb.attach(s['name']).close() for s in rb.sessions()]; rb.shutdown()",
        )
    ours = statistics.median(seconds["session"])
    print(f"{'session':<22} {ours:6.1f} s")
    for name in sides:
        theirs = statistics.median(seconds[name])
        print(f"{name:<22} {theirs:6.1f} s   session / this {ours / theirs:.2f}")


def compare_calls(folder: Path) -> None:
    """Milliseconds of an empty call, one rank and two."""
    out = folder / "calls.json"
    python(folder, "-c", CALLS, str(out))
    for ranks, found in json.loads(out.read_text()).items():
        bare, engine = found["bare_s"] * 1e3, found["engine_s"] * 1e3
        print(
            f"{ranks} rank(s): bare {bare:.2f} ms   engine {engine:.2f} ms   ratio {engine / bare:.2f}   "
            f"difference {engine - bare:.2f} ms"
        )


def python(folder: Path, *arguments: str, **extra: str) -> float:
    """Run this Python with a state folder of its own (so a cluster of its own); return the seconds it took."""
    begin = time.perf_counter()
    done = subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | {"XDG_STATE_HOME": str(folder)} | extra,
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        sys.exit(f"benchmark failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()
