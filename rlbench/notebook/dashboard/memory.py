"""Memory over time as the dashboard draws it: stacks by owner, one lane per device and process, and what ran."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlbench.notebook.base.palette import OWNERS
from rlbench.units import MIB, format_bytes

MOMENTS, MARKS_KEPT = 300, 300
SEEN = 0.01
"""Part of the scale below which a band is no wider than a hair."""

Sample = Mapping[str, Any]


@dataclass(frozen=True)
class Lane:
    """One process or device over time: MiB per owner at each of the moments of `Memory.times`; None where unknown."""

    name: str
    owners: tuple[tuple[int | None, ...], ...]
    total: int | None
    detail: str

    def stack(self) -> np.ndarray:
        """MiB, (owners, moments) float64; 0 where unknown."""
        return np.nan_to_num(np.array(self.owners, np.float64))


@dataclass(frozen=True)
class Memory:
    """Memory over time; `marks` say what ran meanwhile: (start, seconds or None, what, label).

    `untold`: the last moment at which a process had not told whose its memory is; None where all have.
    """

    times: tuple[float, ...]
    lanes: tuple[Lane, ...]
    marks: tuple[tuple[float, float | None, str, str], ...]
    untold: float | None = None


def memory(
    samples: Sequence[Sample], marks: Iterable[Mapping[str, Any]], state: Mapping[str, Any], most: int = MOMENTS
) -> Memory:
    """Memory over time, one lane per device, then one per process in the order of the engines.

    `most`: moments at most; those where nothing changed go first.
    """
    kept = thinned([(float(sample["time"]), _moment(sample)) for sample in samples], most)
    order = [w["name"] for e in state.get("engines", ()) for w in e.get("workers", ())]
    found = list(dict.fromkeys(name for _, moment in kept for name in moment))
    names = sorted(found, key=lambda n: (not n.startswith("GPU "), order.index(n) if n in order else len(order), n))
    last = samples[-1] if samples else {}
    lanes = []
    capacity = {f"GPU {i}": round(gpu["total"] / MIB) for i, gpu in enumerate(last.get("gpus", ()))}
    for name in names:
        rows = [moment.get(name) or (None,) * len(OWNERS) for _, moment in kept]
        shown = " ".join(name.split("/")[-2:])  # `rlbench/demo/actor/0` is known to a reader as `actor 0`
        lanes.append(Lane(shown, tuple(zip(*rows, strict=True)), capacity.get(name), _detail(name, last)))
    recent = sorted(marks, key=lambda mark: mark["time"])[-MARKS_KEPT:]
    untold = [round(s["time"], 2) for s in samples if s.get("resident", {}).keys() - s.get("owners", {}).keys()]
    times = tuple(round(time, 2) for time, _ in kept)
    ran = [(round(m["time"], 2), m["seconds"] and round(m["seconds"], 2), m["what"], m["label"]) for m in recent]
    return Memory(times, tuple(lanes), tuple(ran), untold[-1] if untold else None)


def seen_and_thin(shown: Memory) -> tuple[list[str], list[str]]:
    """What a legend names: owners whose band in the picture can be seen, and those that are there but too thin."""
    most = max((float(lane.stack().sum(0).max(initial=0)) for lane in shown.lanes), default=0) or 1.0
    bands = [lane.stack().max(1, initial=0) / (lane.total or most) for lane in shown.lanes]
    largest = dict(zip(OWNERS, np.max(bands, 0) if bands else np.zeros(len(OWNERS)), strict=True))
    seen = [owner for owner, share in largest.items() if share >= SEEN]
    return seen, [owner for owner, share in largest.items() if 0 < share < SEEN]


def thinned(moments: list[tuple[float, Any]], most: int) -> list[tuple[float, Any]]:
    """Moments without those between two equal ones; if these are too many still, every n-th and the last."""
    ends = len(moments) - 1
    kept = [
        moment
        for i, moment in enumerate(moments)
        if i in (0, ends) or not moments[i - 1][1] == moment[1] == moments[i + 1][1]
    ]
    if len(kept) <= most:
        return kept
    every = math.ceil(len(kept) / max(1, most - 1))
    return [*kept[:-1:every], kept[-1]]


def _moment(sample: Sample) -> dict[str, tuple[int, ...]]:
    """MiB by owner for every device and process of one sample."""
    told = {f"GPU {i}": {"other": gpu["used"]} for i, gpu in enumerate(sample.get("gpus", ()))}
    owners = sample.get("owners", {})
    told |= {actor: owners.get(actor) or {"other": held} for actor, held in sample.get("resident", {}).items()}
    return {name: tuple(round(max(0, o.get(owner) or 0) / MIB) for owner in OWNERS) for name, o in told.items()}


def _detail(name: str, sample: Sample) -> str:
    """What the stack does not show: shared memory, and the allocator's own numbers on a GPU."""
    said = []
    if shared := sample.get("shared", {}).get(name):
        said.append(f"shared {format_bytes(shared)}")
    if torch := sample.get("torch", {}).get(name):
        said.append(f"torch {format_bytes(torch['allocated'])} of {format_bytes(torch['reserved'])}")
    return " · ".join(said)
