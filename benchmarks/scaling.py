"""How a step grows with the model, the tokens, the ranks and the replicas, and what that says of 8 and 64 devices.

Each experiment holds one session per size and lets them take turns. Ranks and replicas compute with one thread each,
so that on two cores a second one brings as much hardware as it would elsewhere.

    python -m benchmarks scaling
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from benchmarks.harness import Experiment, Figure, Measuring, Round, Stage
from benchmarks.models import model_folder
from benchmarks.turns import Record, Side

MODELS = {"0.8m": "bench-0.8m", "10m": "bench-10m", "100m": "bench-100m"}
LENGTHS = (32, 64, 128, 256)
DEVICES, HOST = (8, 64), 8
SMALL_CACHE = {"kv_cache_bytes": 256 << 20}


def sizes(at: Stage) -> Measuring:
    """Yield seconds of a step of 8 x 8 x 64 tokens, by model."""
    started = {size: _session(at, model) for size, model in MODELS.items()}
    for side in _ready(started):
        side.turn(verb="step", tokens=8)
    while True:
        yield {f"s_{size}": side.turn(verb="step")["step_s"] for size, side in started.items()}


def tokens(at: Stage) -> Measuring:
    """Yield seconds of a step at 10 M, by tokens of a completion."""
    side = _session(at, "bench-10m")
    side.ready()
    side.turn(verb="step")
    while True:
        yield {f"s_{length}": side.turn(verb="step", tokens=length)["step_s"] for length in LENGTHS}


def ranks(at: Stage) -> Measuring:
    """Yield seconds of a train step at 10 M on one rank, on two that share the parameters, and on two copies."""
    wanted = {"one": {"shards": 1}, "two": {"shards": 2}, "copies": {"shards": 1, "data_parallel_size": 2}}
    started = {
        name: _session(at, "bench-10m", train={**options, "threads": 1}, inference=SMALL_CACHE)
        for name, options in wanted.items()
    }
    for side in _ready(started):
        side.turn(verb="prepare")
        side.turn(verb="train")
    while True:
        yield {f"train_s_{name}": side.turn(verb="train")["s"] for name, side in started.items()}


def replicas(at: Stage) -> Measuring:
    """Yield seconds of a rollout and a sync at 10 M, with one replica and with two, and of the kernel's own work."""
    started = {
        name: _session(at, "bench-10m", inference={**SMALL_CACHE, "data_parallel_size": count, "threads": 1})
        for name, count in (("one", 1), ("two", 2))
    }
    for side in _ready(started):
        side.turn(verb="step")

    def turn(side: Side) -> Record:
        return side.turn(verb="step")

    while True:
        found = {name: turn(side) for name, side in started.items()}
        yield {f"{key}_{name}": record[key] for name, record in found.items() for key in MEASURED_OF_STEP}


MEASURED_OF_STEP = ("rollout_s", "sync_s", "kernel_s")


def _session(at: Stage, model: str, **options: Any) -> Side:
    settings = {"train": {"lr": 1e-4}} | options
    return at.side("benchmarks.session_side", json.dumps({"model": model_folder(model), **settings}))


def _ready(sides: Mapping[str, Side]) -> Sequence[Side]:
    for side in sides.values():
        side.ready()
    return list(sides.values())


def over(upper: str, lower: str, found: Round) -> float:
    """Return the ratio of two numbers of a round."""
    return found[upper] / found[lower]


EXPERIMENTS = (
    Experiment("sizes", sizes, 2, 2.5),
    Experiment("tokens", tokens, 3, 1.8),
    Experiment("ranks", ranks, 5, 1.0),
    Experiment("replicas", replicas, 5, 1.2),
)
RANKS = "train step, 1 rank"
FIGURES = (
    Figure("size-10", "step, 12.6 × the parameters: 10 M / 0.8 M", "sizes", partial(over, "s_10m", "s_0.8m")),
    Figure("size-100", "step, 10 × the parameters: 100 M / 10 M", "sizes", partial(over, "s_100m", "s_10m")),
    Figure("tokens-64", "step, 2 × the tokens: 64 / 32, 10 M", "tokens", partial(over, "s_64", "s_32")),
    Figure("tokens-128", "… 128 / 64", "tokens", partial(over, "s_128", "s_64")),
    Figure("tokens-256", "… 256 / 128", "tokens", partial(over, "s_256", "s_128")),
    Figure(
        "ranks-2",
        "train step, 1 rank / 2 that share the parameters",
        "ranks",
        partial(over, "train_s_one", "train_s_two"),
    ),
    Figure("copies-2", "… 1 rank / 2 copies", "ranks", partial(over, "train_s_one", "train_s_copies")),
    Figure("replicas-2", "rollout, 1 replica / 2", "replicas", partial(over, "rollout_s_one", "rollout_s_two")),
    Figure("sync-replicas", "sync, to 2 replicas / to 1", "replicas", partial(over, "sync_s_two", "sync_s_one")),
)

ASSUMPTIONS = (
    "Each device adds as much work as it brings: 8 prompts × 8 completions × 64 tokens of the 10 M model per device.",
    "A device is one core of this machine, used by a training rank and a replica in turn; a host has 8.",
    "Computing in rollout and train stays per device as measured; no device waits for a slower one.",
    "A call costs, for each further rank, the difference between two ranks and one (taken as linear); a step makes 4.",
    "Sharded training: what two ranks take beyond half of one rank's time is communication, and grows as a ring's "
    "traffic, 2 (N − 1) / N of it; links between hosts are as fast as two processes here, and nothing overlaps.",
    "Sync: within a host each further replica costs what the second one does here; hosts are reached by a tree, "
    "each level costing one sync.",
    "Scoring and making the batch stay in the kernel, one process, and grow with the devices.",
)
CALLS_PER_STEP = 4


def projection(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return parts, assumptions and the step on more devices; empty where a part was not measured."""
    numbers: dict[str, list[float]] = {}
    for record in {record["title"]: record for record in records}.values():
        for found in record.get("measured", []):
            for name, number in found.items():
                numbers.setdefault(name, []).append(number)
    middle = {name: statistics.median(found) for name, found in numbers.items()}
    try:
        parts = {
            "rollout_s": middle["rollout_s_one"],
            "train_s": middle["train_s_one"],
            "sync_s": middle["sync_s_one"],
            "kernel_s": middle["kernel_s_one"],
            "further_rank_s": max(0.0, middle["engine_2_ms"] - middle["engine_1_ms"]) / 1e3,
            "communication_of_two_s": max(0.0, middle["train_s_two"] - middle["train_s_one"] / 2),
            "further_replica_s": max(0.0, middle["sync_s_two"] - middle["sync_s_one"]),
        }
    except KeyError:
        return {}
    steps = {devices: projected(parts, devices) for devices in (1, *DEVICES)}
    return {
        "parts": parts,
        "assumptions": list(ASSUMPTIONS),
        "devices": [
            {"devices": devices, **step, "efficiency": steps[1]["step_s"] / step["step_s"]}
            for devices, step in steps.items()
        ],
    }


def projected(parts: Mapping[str, float], devices: int) -> dict[str, float]:
    """Return the seconds of a step on so many devices, each with its own share of work, by what they are spent on."""
    hosts = -(-devices // HOST)
    spent = {
        "compute_s": parts["rollout_s"] + parts["train_s"],
        "calls_s": CALLS_PER_STEP * (devices - 1) * parts["further_rank_s"],
        "communication_s": parts["communication_of_two_s"] * 2 * (devices - 1) / devices,
        "sync_s": parts["sync_s"] * (1 + (hosts - 1).bit_length())
        + (min(devices, HOST) - 1) * parts["further_replica_s"],
        "kernel_s": devices * parts["kernel_s"],
    }
    return {**spent, "step_s": sum(spent.values())}


def projection_text(found: Mapping[str, Any]) -> str:
    """Return the projection as the page has it: marked as one, with its assumptions."""
    kinds = ("compute_s", "communication_s", "calls_s", "sync_s", "kernel_s", "step_s")
    head = "| devices | computing, s | communication, s | calls, s | sync, s | kernel, s | step, s | efficiency |"
    rows = [
        f"| {row['devices']} | {' | '.join(f'{row[kind]:.2f}' for kind in kinds)} | {row['efficiency']:.2f} |"
        for row in found["devices"]
    ]
    assumptions = "\n".join(f"- {text}" for text in found["assumptions"])
    said = "A projection, calculated from the parts measured above; no such machine has run it. It assumes:"
    return "\n".join([said, "", assumptions, "", head, "|---|---|---|---|---|---|---|---|", *rows])
