"""Measure the figures this project holds itself to; write benchmarks/results.json and tables of docs/performance.md.

    python -m benchmarks                        # all figures; make bench
    python -m benchmarks --only step start      # experiments or figures whose name begins so
    python -m benchmarks --list                 # names, bars, and about how long each takes
    python -m benchmarks --dry --rounds 1       # writes nothing
    python -m benchmarks --page                 # only the tables, from the results that are there
    python -m benchmarks --gpu                  # on a GPU host; make bench-gpu
    python -m benchmarks scaling                # sizes, tokens, ranks, replicas, a projection; make bench-scaling

One that fails is in the table with its error, the others go on, and the exit status is 1. Where the minutes are used
up, what is left keeps its last numbers, and the exit status is 1 too.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks import call, figures, page, plan, real_sizes, scaling
from benchmarks.harness import (
    Experiment,
    Figure,
    Stage,
    circumstances,
    failure_of,
    line_of,
    note_of,
    record_of,
    rounds_of,
    stage,
)

MINUTES = 15.0
Records = list[dict[str, Any]]


@dataclass(frozen=True)
class Part:
    """A table: its name in the results and on the page, what is measured for it, and on which device."""

    name: str
    experiments: Sequence[Experiment]
    figures: Sequence[Figure]
    device: str = "cpu"

    def chosen(self, only: Sequence[str]) -> list[Experiment]:
        """Return the experiments of these names, or with figures of these names; without names all."""
        begins = tuple(only)
        named = {figure.experiment for figure in self.figures if figure.name.startswith(begins)} if only else set()
        return [e for e in self.experiments if not only or e.name.startswith(begins) or e.name in named]

    def notes(self) -> Records:
        """Return the rows of what nothing measures."""
        return [note_of(figure) for figure in self.figures if not figure.experiment]


ON_GPU = {experiment.name for experiment in figures.EXPERIMENTS} - {"linear", "viewer", "history"}
"""The others compute on the CPU on any host."""
SCALING = (scaling, plan, real_sizes, call)
PARTS = {
    "figures": Part("figures", figures.EXPERIMENTS, figures.FIGURES),
    "scaling": Part(
        "scaling",
        [experiment for module in SCALING for experiment in module.EXPERIMENTS],
        [figure for module in SCALING for figure in module.FIGURES],
    ),
    "gpu": Part(
        "gpu",
        [experiment for experiment in figures.EXPERIMENTS if experiment.name in ON_GPU],
        [figure for figure in figures.FIGURES if figure.experiment in ON_GPU],
        "cuda",
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what was asked for; the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="?", choices=("figures", "scaling"), default="figures")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="experiments or figures that begin so")
    parser.add_argument("--rounds", type=int, help="of each experiment, instead of its own number")
    parser.add_argument(
        "--minutes", type=float, default=MINUTES, help="an experiment that would not end by then is left out"
    )
    parser.add_argument("--dry", action="store_true", help="write nothing")
    parser.add_argument("--page", action="store_true", help="measure nothing, write the tables from the results")
    parser.add_argument("--list", action="store_true", help="measure nothing, say what there is")
    parser.add_argument("--gpu", action="store_true", help="on a GPU; says what cannot run")
    given = parser.parse_args(arguments)
    part = PARTS["gpu" if given.gpu else given.what]
    if given.list:
        print(listed(part))
        return 0
    if given.page:
        write_page(page.load(page.RESULTS))
        return 0
    if given.gpu and (missing := missing_for_gpu()):
        print(f"bench-gpu: none of {len(part.experiments)} experiments could run: {missing}", file=sys.stderr)
        return 1
    experiments = part.chosen(given.only)
    if not experiments:
        parser.error(f"nothing is called {' or '.join(given.only)}: see --list")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what runs is ended all the same
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where a shell started this in the background
    prepare("gpu" if given.gpu else "cpu")
    with stage(part.device) as at:
        records, left = measured(part, experiments, at, given.rounds, given.minutes)
    for name in left:
        print(f"{name:<22} left out: {given.minutes:g} minutes were used up", file=sys.stderr)
    if not given.dry:
        keep(part, records)
    return 1 if left or any("failed" in record for record in records) else 0


def measured(
    part: Part,
    experiments: Sequence[Experiment],
    at: Stage,
    count: int | None,
    minutes: float,
    say: Callable[[str], None] = print,
) -> tuple[Records, list[str]]:
    """Run experiments one after the other; return the records of their figures, and the names of what was left out."""
    records: Records = []
    end = time.monotonic() + 60 * minutes
    for number, experiment in enumerate(experiments):
        if time.monotonic() + 60 * experiment.minutes > end:
            return records, [left.name for left in experiments[number:]]
        about, begin = circumstances(), time.monotonic()
        mine = [figure for figure in part.figures if figure.experiment == experiment.name]
        try:
            rounds = rounds_of(experiment, at, count, say)
        except Exception as error:
            found = [failure_of(figure, error, about) for figure in mine]
        else:
            found = [record_of(figure, rounds, about, at.absent) for figure in mine]
        say(f"{experiment.name}: {time.monotonic() - begin:.0f} s, load {about['load']}")
        for record in found:
            say(line_of(record))
        records += found
    return records, []


def keep(part: Part, records: Records) -> None:
    """Write the results, and the page from them."""
    results = page.load(page.RESULTS)
    order = [figure.name for figure in part.figures]
    results[part.name] = page.merged(results.get(part.name, []), [*records, *part.notes()], order)
    if part.name == "scaling":
        results["projection"] = scaling.projection(results["scaling"])
    page.write(page.RESULTS, results)
    write_page(results)


def write_page(results: dict[str, Any]) -> None:
    """Write the tables that there are results of."""
    text = page.PAGE.read_text()
    for name in PARTS:
        if name in results:
            text = page.rewritten(text, name, page.table(results[name]))
    if results.get("projection"):
        text = page.rewritten(text, "projection", scaling.projection_text(results["projection"]))
    page.PAGE.write_text(text)


def prepare(engine: str) -> None:
    """Make what is made once, before anything is timed: the models, and TRL's environment for that engine."""
    from benchmarks import models, trl_environment
    from benchmarks.turns import SideError

    for name in ("tiny", "bench-10m", *models.SHAPES):
        models.model_folder(name)
    try:
        trl_environment.python(engine)
    except SideError as error:
        print(error, file=sys.stderr)  # its figures will say so too


def missing_for_gpu() -> str:
    """Say what is missing to measure on a GPU; empty where nothing is."""
    from importlib.metadata import PackageNotFoundError, version

    from rlbench.setup.plan import has_nvidia_gpu

    if not has_nvidia_gpu():
        return "no NVIDIA GPU is on this machine"
    try:
        version("vllm")
    except PackageNotFoundError:
        return "vLLM for GPUs is not installed (RLBENCH_ENGINE=gpu make env)"
    import torch

    return "" if torch.cuda.is_available() else f"torch {torch.__version__} sees no GPU"


def listed(part: Part) -> str:
    """Say the experiments with their figures and bars."""
    lines = []
    for experiment in part.experiments:
        lines.append(f"{experiment.name}: {experiment.rounds} rounds, about {experiment.minutes:g} min")
        lines += [
            f"  {figure.name:<20} {page.bar_text(asdict(figure)):<8} {figure.title}"
            for figure in part.figures
            if figure.experiment == experiment.name
        ]
    return "\n".join([*lines, f"about {sum(e.minutes for e in part.experiments):.0f} min in all"])


if __name__ == "__main__":
    sys.exit(main())
