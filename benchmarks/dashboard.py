"""What the live dashboard costs a running step: the same steps with its feed and without, in turns, in one kernel.

A real kernel runs the cells and sends what the dashboard shows to a client, which reads it as a Jupyter server would;
no browser draws it, as that would share the cores with the engines. 2 % says that a step takes 1.02 times as long.

    python -m benchmarks.dashboard                  # 10 M parameters, 8 x 8 completions of 64 tokens
    python -m benchmarks.dashboard --model tiny     # steps of a fraction of a second
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from benchmarks.harness import Experiment, Figure, Measuring, Stage, main_of
from benchmarks.models import model_folder
from benchmarks.turns import SideError

ROUNDS, STEPS = 4, 2
BEGIN = """
import json, random, time, warnings
warnings.simplefilter("ignore")
import rlbench as rb
from benchmarks.session_side import SessionSide
side = SessionSide(rb.Session({model!r}, train=rb.Train(lr=1e-4)))
side.step()
side.settle()
"""
SHOW = "dashboard = side.session.dashboard()\ndashboard"
MEASURE = """
seconds = {{}}
for shown in random.sample((True, False), 2):
    dashboard.follow() if shown else dashboard.rest()
    if not shown:
        time.sleep(6)  # the monitor asks the workers for five seconds more after the last look
    seconds["shown_s" if shown else "hidden_s"] = sum(side.step()["step_s"] for _ in range({steps})) / {steps}
print(json.dumps(seconds))
"""
CLOSE = "side.session.close()"


def shown_and_hidden(at: Stage, model: str = "bench-10m", steps: int = STEPS) -> Measuring:
    """Yield seconds of a step with the dashboard and without."""
    begin = BEGIN.format(model=model if model == "tiny" else model_folder(model))
    with _kernel(at.environment) as cell:
        cell(begin)
        cell(SHOW)
        try:
            while True:
                yield json.loads(cell(MEASURE.format(steps=steps)).strip().splitlines()[-1])
        finally:
            cell(CLOSE)


@contextmanager
def _kernel(environment: dict[str, str]) -> Iterator[Any]:
    """Give a function that runs a cell in a kernel of its own and returns what it printed."""
    import nbformat
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError

    from benchmarks.turns import search_path

    notebook = nbformat.v4.new_notebook()
    client = NotebookClient(notebook, timeout=600, kernel_name="python3")

    def run(source: str) -> str:
        cell = nbformat.v4.new_code_cell(source)
        notebook.cells.append(cell)
        try:
            client.execute_cell(cell, len(notebook.cells) - 1)
        except CellExecutionError as error:
            raise SideError(f"{error.ename}: {error.evalue}") from error
        return "".join(output.get("text", "") for output in cell.outputs)

    variables = {**os.environ, "PYTHONPATH": search_path(), **environment}
    with client.setup_kernel(env=variables, stderr=subprocess.DEVNULL):
        yield run


EXPERIMENTS = (Experiment("dashboard", shown_and_hidden, ROUNDS, 0.8),)
FIGURES = (
    Figure(
        "dashboard",
        "live dashboard, cost on a running step: 10 M",
        "dashboard",
        lambda found: 100 * (found["shown_s"] / found["hidden_s"] - 1),
        unit="%",
        bar=2.0,
        better="less",
    ),
)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="bench-10m")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=4)
    given = parser.parse_args()
    measure = partial(shown_and_hidden, model=given.model, steps=given.steps)
    main_of(Experiment("dashboard", measure, given.rounds, 30.0), FIGURES)


if __name__ == "__main__":
    main()
