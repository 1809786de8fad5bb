"""Whether processes grow: what each holds, read from the system while they work, and a line through it by steps."""

from __future__ import annotations

import contextlib
import itertools
import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

KINDS = ("bytes", "files", "threads")
"""What is read of each process: resident memory of its own, open files, threads."""
SHARED = Path("/dev/shm")
KIB = 1024.0
MOST = {
    "bytes": 4 * KIB,
    "kernel bytes": 12 * KIB,
    "monitor bytes": 12 * KIB,
    "shm bytes": 64.0,
    "entries": 0.01,
    "files": 0.01,
    "threads": 0.01,
    "references": 0.01,
}
"""What may be added by one step, by the end of a quantity's name.

What a step makes (rollouts, batch, channels, replies) takes 10 KiB and more, so that a process that keeps one of them
is found; an allocator's own drift is up to 2 KiB. Monitor and kernel keep the record of each step on purpose, 4 KiB and
what lies between: that is the history. They also keep ten minutes' samples of memory, two a second of 2 KiB, 1,200 at
most. In all that is 8 KiB, measured. One file, thread, entry or reference in a hundred steps is one too many.
"""


@dataclass(frozen=True)
class Sample:
    """What was held after `step` steps, by what it is, as `"monitor bytes"` or `"shm entries"`."""

    step: int
    held: Mapping[str, float]


@dataclass(frozen=True)
class Growth:
    """What grows by more than it may: `per_step` of it, where `most` is allowed; its `first` and `last` value."""

    what: str
    per_step: float
    most: float
    first: float
    last: float


def held_by(pid: int) -> dict[str, float]:
    """Return what process `pid` holds.

    Memory that it shares (staged weights, Ray's object store) is none of its own: whoever touches a page of it for the
    first time would seem to grow. It is counted in `shm_held`.
    """
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    status = {name: value.split() for name, _, value in (line.partition(":") for line in lines)}
    files = len(os.listdir(f"/proc/{pid}/fd"))
    return {"bytes": 1024.0 * int(status["RssAnon"][0]), "files": files, "threads": int(status["Threads"][0])}


def shm_held(prefix: str) -> dict[str, float]:
    """Return entries and bytes of shared memory whose names begin so, the files of folders among them."""
    files = [file for entry in SHARED.iterdir() if entry.name.startswith(prefix) for file in _files(entry)]
    sizes = {}
    for file in files:
        with contextlib.suppress(FileNotFoundError):  # a copy around a step that gave way just now
            found = file.lstat()
            sizes[found.st_ino] = found.st_size  # links to one file are held once
    return {"entries": len(files), "bytes": sum(sizes.values())}


def _files(entry: Path) -> Iterator[Path]:
    if entry.is_dir():
        yield from (Path(folder) / name for folder, _, names in os.walk(entry) for name in names)
    else:
        yield entry


def slope(samples: Sequence[Sample], what: str) -> float:
    """Return by how much a quantity grows a step: the median over all pairs of samples (Theil and Sen).

    A line of least squares follows one late jump, as when an allocator takes a new arena; the median does not, and
    finds what every step adds.
    """
    pairs = itertools.combinations([(sample.step, sample.held[what]) for sample in samples], 2)
    return statistics.median((b - a) / (j - i) for (i, a), (j, b) in pairs)


def growing(samples: Sequence[Sample], most: Mapping[str, float]) -> list[Growth]:
    """Return what grows by more per step than `most` says, by the longest name that a quantity's name ends with."""
    found = []
    for what in samples[0].held:
        allowed = most[max((name for name in most if what.endswith(name)), key=len)]
        per_step = slope(samples, what)
        if per_step > allowed:
            found.append(Growth(what, per_step, allowed, samples[0].held[what], samples[-1].held[what]))
    return found


def table(samples: Sequence[Sample]) -> str:
    """Say how everything went, for a log."""
    lines = [f"{'':32}{'first':>14}{'last':>14}{'per step':>12}"]
    for what in samples[0].held:
        first, last = samples[0].held[what], samples[-1].held[what]
        lines.append(f"{what:32}{first:14,.0f}{last:14,.0f}{slope(samples, what):12,.2f}")
    return "\n".join(lines)
