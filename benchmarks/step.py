"""A whole RL step of a session against the hand-written single-process loop, and against TRL's `GRPOTrainer`.

Each side is a process that was started once and has taken a step already, a session also short ones, until the memory
of its copies for undo is there (at 100 M of `undo=1`, as that takes long); then they take one step each, in turns. A
ratio above 1 says that a session is faster. Rollout, train and sync are one step; of TRL, which generates with the
weights it trains, generation and train. Lengths are fixed, or geometric (`handwritten_loop.GEOMETRIC_BIAS`), for which
the learning rate is tiny, so that no side learns to end its completions earlier than the others.

    python -m benchmarks.step                      # 10 M parameters, 8 x 8 completions of 64 tokens; also TRL
    python -m benchmarks.step --figure geometric   # or small (0.8 M), large (100 M)
    python -m benchmarks.step --start              # the start of a session, see benchmarks/start.py
    python -m benchmarks.step --call               # empty calls, see benchmarks/call.py
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from functools import partial
from typing import Any

from benchmarks.handwritten_loop import GEOMETRIC_BIAS
from benchmarks.harness import Experiment, Figure, Measuring, Round, Stage, main_of
from benchmarks.models import model_folder
from benchmarks.session_side import PROMPTS, SAMPLES, TOKENS
from benchmarks.turns import Record, Side, SideError, one_line

LR, LR_GEOMETRIC, LIMIT = 1e-4, 1e-8, 256
TRL_STEPS = 200
PHASES = ("rollout_s", "train_s", "sync_s", "step_s")


def steps(
    at: Stage,
    model: str,
    sides: tuple[str, ...],
    lengths: str = "fixed",
    prompts: int = PROMPTS,
    tokens: int = TOKENS,
    warm: int | None = None,
    undo: int | None = None,
) -> Measuring:
    """Yield each side's seconds by phase, step by step.

    Args:
        at: the stage.
        model: its name.
        sides: of "hand", "session" and "trl".
        lengths: "fixed" or "geometric".
        prompts: of a step.
        tokens: the longest completion.
        warm: length of the completions in the step that does not count; None: as in the others.
        undo: of the session.
    """
    started = {name: side for name in sides if (side := _started(name, at, model, lengths, prompts, tokens, undo))}
    for side in started.values():
        side.ready()
    for name, side in started.items():
        _turn(name, side, lengths, prompts, warm or tokens)
        if name == "session":
            side.turn(verb="settle")
    while True:
        yield {
            f"{name}_{key}": value
            for name, side in started.items()
            for key, value in _turn(name, side, lengths, prompts, tokens).items()
            if key in (*PHASES, "copies_s", "bytes", "tokens")
        }


def large(at: Stage) -> Measuring:
    """Yield the same at 100 M, of 4 × 8 × 16 tokens, with a copy of as many bytes as a sync brings over, in turns."""
    copier = at.side("benchmarks.copies")
    copier.ready()
    for found in steps(at, "bench-100m", ("hand", "session"), prompts=4, tokens=16, warm=8, undo=1):
        yield {**found, "memcpy_s": copier.turn(size=int(found["session_bytes"]))["s"]}


def _started(
    name: str, at: Stage, model: str, lengths: str, prompts: int, tokens: int, undo: int | None
) -> Side | None:
    """Start a side; TRL, which needs an environment of its own, may be absent."""
    try:
        return _start(name, at, model, lengths, prompts, tokens, undo)
    except SideError as error:
        if name != "trl":
            raise
        at.absent[name] = one_line(error)
        return None


def _start(name: str, at: Stage, model: str, lengths: str, prompts: int, tokens: int, undo: int | None) -> Side:
    path, lr = model_folder(model), LR if lengths == "fixed" else LR_GEOMETRIC
    if name == "session":
        given = {"model": path, "train": {"lr": lr, "betas": (0.9, 0.95)}, "undo": undo}
        return at.side("benchmarks.session_side", json.dumps(given))
    if name == "hand":
        sizes = {
            "prompts": prompts,
            "n": SAMPLES,
            "max-tokens": tokens,
            "lr": lr,
            "lengths": lengths,
            "device": at.device,
        }
        arguments = [part for key, value in sizes.items() for part in (f"--{key}", str(value))]
        return at.side("benchmarks.handwritten_loop", "--turns", "--model", path, *arguments)
    return _start_trl(at, path, lengths, tokens, lr)


def _start_trl(at: Stage, path: str, lengths: str, tokens: int, lr: float) -> Side:
    from benchmarks import trl_environment
    from rlbench.tiny import tasks

    source, settings = tasks.stream("train", 0), at.folder / f"trl-{lengths}.json"
    sizes: dict[str, Any] = {
        "model": path,
        "prompts": [tasks.message(next(source)) for _ in range(PROMPTS * TRL_STEPS)],
        "n": SAMPLES,
        "rows": PROMPTS * SAMPLES,
        "max_tokens": tokens,
        "lengths": lengths,
        "bias": GEOMETRIC_BIAS,
        "end": _end_token(path),
        "lr": lr,
        "device": at.device,
        "threads": len(os.sched_getaffinity(0)),
        "output": str(at.folder / "trl"),
    }
    settings.write_text(json.dumps(sizes))
    python = trl_environment.python("cpu" if at.device == "cpu" else "gpu")
    return at.side("benchmarks.trl_loop", str(settings), python=python)


def _end_token(path: str) -> int:
    with open(os.path.join(path, "generation_config.json")) as file:
        return int(json.load(file)["eos_token_id"])


def _turn(name: str, side: Side, lengths: str, prompts: int, tokens: int) -> Record:
    if name == "session":
        return side.turn(verb="step", prompts=prompts, tokens=tokens, geometric=lengths == "geometric")
    record = side.turn(max_tokens=tokens) if name == "hand" else side.turn()
    return {"step_s": record["step"]} if name == "trl" else record


def times(upper: str, lower: str, key: str = "step_s") -> Any:
    """Return what reads a ratio of two sides off a round."""

    def value(found: Round) -> float:
        return found[f"{upper}_{key}"] / found[f"{lower}_{key}"]

    return value


ALL = ("hand", "session", "trl")
GEOMETRIC = partial(steps, model="bench-10m", sides=("trl", "session"), lengths="geometric", tokens=LIMIT)
EXPERIMENTS = (
    Experiment("step", partial(steps, model="bench-10m", sides=ALL), 5, 1.4),
    Experiment("small", partial(steps, model="bench-0.8m", sides=("hand", "session")), 12, 0.5),
    Experiment("large", large, 2, 1.2),
    Experiment(
        "geometric",
        GEOMETRIC,
        6,
        1.2,
    ),
)
BY_HAND = "RL step by hand / session"
FIGURES = (
    Figure("step-10m", f"{BY_HAND}: 10 M, 8 × 8 × 64 tokens", "step", times("hand", "session"), bar=0.95),
    Figure("rollout-10m", "… its rollout", "step", times("hand", "session", "rollout_s")),
    Figure("train-10m", "… its train step", "step", times("hand", "session", "train_s")),
    Figure("step-0.8m", f"{BY_HAND}: 0.8 M", "small", times("hand", "session"), bar=0.9),
    Figure("step-100m", f"{BY_HAND}: 100 M, 4 × 8 × 16 tokens", "large", times("hand", "session"), bar=0.97),
    Figure("trl-10m", "RL step of TRL / session: 10 M, 8 × 8 × 64 tokens", "step", times("trl", "session"), bar=1.15),
    Figure(
        "trl-geometric",
        "… geometric lengths, mean 32, limit 256",
        "geometric",
        times("trl", "session"),
        bar=2.0,
    ),
    Figure(
        "sync-10m",
        "weight sync with proof / by hand without one: 10 M",
        "step",
        times("session", "hand", "sync_s"),
        bar=2.0,
        better="less",
    ),
    Figure(
        "sync-100m",
        "weight sync with proof: 100 M, share of memcpy's speed",
        "large",
        lambda found: found["memcpy_s"] / found["session_sync_s"],
        bar=0.5,
    ),
    Figure(
        "undo-copy",
        "undo copy, share of a step: 10 M",
        "step",
        lambda found: 100 * found["session_copies_s"] / found["session_step_s"],
        unit="%",
        bar=2.0,
        better="less",
    ),
)


def main() -> None:
    """Run what was asked for and print ratios."""
    from benchmarks import call, start

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--figure", choices=[experiment.name for experiment in EXPERIMENTS], default="step")
    parser.add_argument("--start", action="store_true", help="start-up instead of steps")
    parser.add_argument("--call", action="store_true", help="empty calls instead of steps")
    parser.add_argument("--rounds", type=int, help="how often each side works, in turns")
    given = parser.parse_args()
    experiments: Sequence[Experiment] = [e for e in EXPERIMENTS if e.name == given.figure]
    figures: Sequence[Figure] = FIGURES
    if given.start or given.call:
        room = start if given.start else call
        experiments, figures = room.EXPERIMENTS, room.FIGURES
    for experiment in experiments:
        main_of(experiment, figures, given.rounds)


if __name__ == "__main__":
    main()
