"""A sync by broadcast (gloo, loopback) of differences against one of whole weights, after a step: 10 M parameters in
bfloat16 with float32 copies in the optimizer, one rank, one replica. Sides take turns, at one learning rate after the
other.

    python -m benchmarks.delta [--rounds 12]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.harness import Experiment, Figure, Measuring, Round, Stage, main_of
from benchmarks.models import model_folder

MODEL, LRS = "bench-10m", (1e-6, 1e-5, 1e-4)
SIDES: dict[str, dict[str, Any]] = {"whole": {}, "delta": {"delta": True}}


def syncs(at: Stage) -> Measuring:
    """Yield seconds and bytes of each side's sync after a step at each rate; a first one, of all weights, is before."""
    folder = half_precision(model_folder(MODEL), at.folder / "bfloat16")
    sides = {}
    for name, inference in SIDES.items():
        settings = {"model": folder, "train": {"use_mp_opt": True}, "inference": {"max_model_len": 512} | inference}
        sides[name] = at.side("benchmarks.session_side", json.dumps(settings))
    for side in sides.values():
        side.ready()
        side.turn(verb="prepare")
        for _ in range(2):
            side.turn(verb="trained_sync", lr=LRS[0], transport="broadcast")
    while True:
        found: dict[str, float] = {}
        for lr in LRS:
            for name, side in sides.items():
                turn = side.turn(verb="trained_sync", lr=lr, transport="broadcast")
                found |= {f"{name}_{lr:g}_{key}": value for key, value in turn.items()}
        print("; ".join(line_of(lr, found) for lr in LRS))
        yield found


def half_precision(source: str, target: Path) -> str:
    """Write a model in bfloat16; return the folder."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16).save_pretrained(target)
    AutoTokenizer.from_pretrained(source).save_pretrained(target)
    return str(target)


def line_of(lr: float, found: Round) -> str:
    """Return what both sides took at a rate."""
    sides = (
        f"{name} {found[f'{name}_{lr:g}_bytes'] / 2**20:.2f} MiB {found[f'{name}_{lr:g}_travel_s']:.3f} s, "
        f"with proof {found[f'{name}_{lr:g}_s']:.3f} s"
        for name in SIDES
    )
    return f"lr {lr:g}: {' | '.join(sides)}"


def _ratio(lr: float, key: str) -> Any:
    return lambda found: found[f"delta_{lr:g}_{key}"] / found[f"whole_{lr:g}_{key}"]


EXPERIMENTS = (Experiment("delta", syncs, 12, 1.5),)
FIGURES = tuple(
    Figure(
        f"delta-{key}-{lr:g}",
        f"{what} of a sync of differences / of whole weights, lr {lr:g}",
        "delta",
        _ratio(lr, key),
    )
    for lr in LRS
    for key, what in (("bytes", "bytes"), ("travel_s", "seconds without the proof"), ("s", "seconds with it"))
)


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=EXPERIMENTS[0].rounds)
    main_of(EXPERIMENTS[0], FIGURES, parser.parse_args().rounds)


if __name__ == "__main__":
    main()
