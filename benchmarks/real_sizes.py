"""Sessions of 10 M, 100 M and 0.5 B parameters, all weights trained and LoRA 32: seconds of each verb, and the memory
of all their processes at its highest, with each owner's. Nothing is compared: one session after the other, each alone.

    python -m benchmarks.real_sizes                              # in `make bench-scaling`, too
    python -m benchmarks.real_sizes --models bench-0.5b --ranks 32
"""

from __future__ import annotations

import argparse
import itertools
import json
from typing import Any

from benchmarks.harness import Experiment, Figure, Measuring, Stage, main_of
from benchmarks.models import model_folder
from benchmarks.turns import Record

MODELS, RANKS = ("bench-10m", "bench-100m", "bench-0.5b"), (0, 32)
"""Models, and ranks of the adapters; 0: full training."""
SIZES = {"prompts": 4, "n": 4, "tokens": 64}
"""Of a step: few, as two cores take minutes for more of the largest."""


def sessions(at: Stage, models: tuple[str, ...] = MODELS, ranks: tuple[int, ...] = RANKS) -> Measuring:
    """Yield seconds of a second step and of going back, and GiB by owner, of each session."""
    while True:
        measured: dict[str, float] = {}
        for model, rank in itertools.product(models, ranks):
            settings: dict[str, Any] = {"model": model_folder(model), "watched": True}
            settings["inference"] = {"max_model_len": 512}
            if rank:
                settings["train"] = {"lora": {"rank": rank}}
            side = at.side("benchmarks.session_side", json.dumps(settings))
            side.ready()
            side.turn(verb="step", **SIZES)
            record = side.turn(verb="step", **SIZES)
            if record["copies_s"]:
                record |= side.turn(verb="undo")
            record |= side.turn(verb="highest")
            at.end_sides()
            name = f"{model}, {'LoRA' if rank else 'full'}"
            print(line_of(name, record))
            measured |= {f"{name}_{key}": value for key, value in record.items()}
        yield measured


def line_of(name: str, record: Record) -> str:
    """Return what a session took, as one line."""
    verbs = [verb for verb in ("rollout", "train", "sync", "undo") if f"{verb}_s" in record]
    seconds = [f"{verb} {record[f'{verb}_s']:.1f} s" for verb in verbs]
    owners = [f"{key.removesuffix('_gib')} {value:.2f}" for key, value in record.items() if key.endswith("_gib")]
    return f"{name}: {', '.join(seconds)}; GiB: {', '.join(owners)}"


def _figure(model: str, kind: str, unit: str) -> Figure:
    """Return the seconds of a step, or the memory of all processes; of the largest with adapters there is a bar."""
    key, what = ("step_s", "a step of 16 × 64 tokens") if unit == "s" else ("all_gib", "all processes")
    bar = 16.0 if (model, kind, unit) == ("bench-0.5b", "LoRA", "GiB") else None
    title = f"{'a session of' if model == MODELS[0] else '…'} {model.removeprefix('bench-')} parameters, {kind}: {what}"
    name = f"{model.replace('bench', 'model')}-{kind}-{unit}".lower()
    return Figure(name, title, "models", lambda measured: measured[f"{model}, {kind}_{key}"], unit, bar, "less")


EXPERIMENTS = (Experiment("models", sessions, rounds=1, minutes=6),)
FIGURES = tuple(_figure(*which) for which in itertools.product(MODELS, ("full", "LoRA"), ("s", "GiB")))


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--ranks", nargs="+", type=int, default=RANKS)
    asked = parser.parse_args()
    experiment = Experiment("models", lambda at: sessions(at, tuple(asked.models), tuple(asked.ranks)), 1, 12)
    main_of(experiment, ())


if __name__ == "__main__":
    main()
