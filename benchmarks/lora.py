"""LoRA: a step against one by hand with peft and vLLM, a sync of the adapter alone against one of all weights, and what
undo, branch and restore cost. At 10 M parameters, rank 32 on all linear layers; sides take turns.

    python -m benchmarks.lora
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from benchmarks.harness import Experiment, Figure, Measuring, Round, Stage, main_of
from benchmarks.models import model_folder
from benchmarks.session_side import PROMPTS, SAMPLES, TOKENS
from benchmarks.step import times

MODEL, RANK, LR = "bench-10m", 32, 1e-4


def steps(at: Stage) -> Measuring:
    """Yield seconds of a step of each side, of both syncs, and of going back."""
    path = model_folder(MODEL)
    lora: dict[str, Any] = {"lr": LR, "betas": (0.9, 0.95), "lora": {"rank": RANK}}
    settings = {
        "merged": {"model": path, "train": lora},
        "adapters": {"model": path, "train": lora, "inference": {"adapters": 2}},
        "full": {"model": path, "train": {"lr": LR}},
    }
    sizes = {"prompts": PROMPTS, "n": SAMPLES, "max-tokens": TOKENS, "lr": LR, "lora-rank": RANK, "device": at.device}
    arguments = [part for key, value in sizes.items() for part in (f"--{key}", str(value))]
    sides = {name: at.side("benchmarks.session_side", json.dumps(given)) for name, given in settings.items()}
    sides["hand"] = at.side("benchmarks.handwritten_loop", "--turns", "--model", path, *arguments)
    for name, side in sides.items():
        side.ready()
        if name != "hand":
            side.turn(verb="settle")
    while True:
        found: dict[str, float] = {}
        for name, side in sides.items():
            turn = side.turn() if name == "hand" else side.turn(verb="step")
            found |= {f"{name}_{key}": value for key, value in turn.items()}
        found |= {f"back_{key}": value for key, value in sides["adapters"].turn(verb="back").items()}
        yield found


def slowest(found: Round) -> float:
    """Return the longest of undo, branch and restore, without their syncs."""
    return max(found[f"back_{verb}_s"] for verb in ("undo", "branch", "restore"))


EXPERIMENTS = (Experiment("lora", steps, 6, 1.4),)
FIGURES = (
    Figure(
        "lora-step",
        "LoRA step by hand (peft, vLLM) / session: 10 M, rank 32, merged",
        "lora",
        times("hand", "merged"),
        bar=0.95,
    ),
    Figure("lora-adapters", "… merged / adapters of vLLM's own, a step", "lora", times("merged", "adapters")),
    Figure(
        "lora-merged-sync",
        "sync of the adapter with proof / of all weights of the same policy, it merged in",
        "lora",
        times("adapters", "merged", "sync_s"),
        bar=0.5,
        better="less",
    ),
    Figure(
        "lora-sync",
        "… / of all weights of a policy without adapters",
        "lora",
        times("adapters", "full", "sync_s"),
        bar=0.5,
        better="less",
    ),
    Figure("lora-undo", "LoRA: undo, branch, restore", "lora", slowest, unit="s", bar=0.2, better="less"),
    Figure(
        "lora-bytes",
        "LoRA: a snapshot / the adapter: weights, AdamW's two moments, counters",
        "lora",
        lambda found: found["back_bytes"] / found["back_own"],
        bar=3.01,
        better="less",
    ),
)


def main() -> None:
    """Run what was asked for and print ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, help="how often each side works, in turns")
    main_of(EXPERIMENTS[0], FIGURES, parser.parse_args().rounds)


if __name__ == "__main__":
    main()
