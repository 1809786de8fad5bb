"""What the live dashboard costs a running step: the same steps with its feed and without, in turns, in one kernel.

A real kernel runs the cells and sends what the dashboard shows to a client, which reads it as a Jupyter server would;
no browser draws it, as that would share the cores with the engines. A ratio of 1.02 says that a step takes 2 % longer.

    python benchmarks/dashboard.py                  # 10 M parameters, 8 x 8 completions of 64 tokens
    python benchmarks/dashboard.py --model tiny     # steps of a fraction of a second
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from typing import Any

BEGIN = """
import json, random, statistics, time
import rlbench as rb
from rlbench.tiny import tasks
session = rb.Session({model!r}, train=rb.Train(lr=1e-4))
asked = tasks.prompts({prompts})

def step():
    begin = time.perf_counter()
    rollouts = session.rollout(asked, n={samples}, max_tokens={tokens}, ignore_eos=True, progress=False)
    scored = rollouts.score(lambda r: statistics.fmean(t % 2 for t in r.token_ids))
    session.train_step(scored.batch(advantage=rb.rl.group_normalized()))
    session.sync_weights()
    return time.perf_counter() - begin

for _ in range(3):
    step()
"""
SHOW = "dashboard = session.dashboard()\ndashboard"
MEASURE = """
rounds = []
for _ in range({rounds}):
    seconds = {{}}
    for shown in random.sample((True, False), 2):
        dashboard.follow() if shown else dashboard.rest()
        time.sleep(6)  # the monitor asks the workers for five seconds more after the last look
        seconds[shown] = sum(step() for _ in range({steps}))
    rounds.append((seconds[True], seconds[False]))
print(json.dumps(rounds))
"""
STOP = "import sys; from rlbench.cli import main; sys.exit(main(['stop', '--all']))"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="bench-10m")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=4)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rlb-bench-") as state:
        os.environ["XDG_STATE_HOME"] = state
        try:
            rounds = measured(given.model, given.rounds, given.steps)
        finally:
            subprocess.run([sys.executable, "-c", STOP], check=True, stdout=subprocess.DEVNULL)
    ratios = sorted(shown / hidden for shown, hidden in rounds)
    whole = sum(shown for shown, _ in rounds) / sum(hidden for _, hidden in rounds)
    middle = ratios[len(ratios) // 2]
    print(f"{given.model}: {len(rounds)} rounds of {given.steps} steps, with the dashboard against without it")
    print(f"  a step without it  {sum(hidden for _, hidden in rounds) / len(rounds) / given.steps:.3f} s")
    print(f"  time, all together {whole:.3f}x   median of rounds {middle:.3f}x   ({ratios[0]:.3f} to {ratios[-1]:.3f})")


def measured(model: str, rounds: int, steps: int) -> list[tuple[float, float]]:
    """Seconds of each round with and without the dashboard."""
    import nbformat
    from nbclient import NotebookClient

    begin = BEGIN.format(model=model, prompts=8, samples=8, tokens=64)
    cells = [begin, SHOW, MEASURE.format(rounds=rounds, steps=steps)]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    NotebookClient(notebook, timeout=3600, kernel_name="python3").execute()
    printed: Any = "".join(output.get("text", "") for output in notebook.cells[2].outputs)
    return [tuple(one) for one in json.loads(printed.strip().splitlines()[-1])]


if __name__ == "__main__":
    main()
