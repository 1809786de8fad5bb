"""The memory that `rb.plan` foretells against what a rank then takes, by owner: full training and LoRA, on the CPU.

A rank is built in a process of its own, which computes with the OpenMP runtime, the allocator and as many threads as
that of a session, and takes a step of two micro-batches, so that gradients are there in the second. Weights,
gradients and optimizer are counted as the monitor counts them; what a pass takes is the highest sum of its tensors
(`LiveMemory`), and with the allocator's slack the growth of the process's resident memory.

    python -m benchmarks.plan                              # 0.8 M to 0.5 B parameters
    python -m benchmarks.plan --models bench-100m --tokens 4096 --length 512 --checkpointing
    python -m benchmarks.plan --models path/or/hub-id      # any other
"""

from __future__ import annotations

import argparse
import itertools
import json
from typing import Any

from benchmarks.harness import Experiment, Figure, Measuring, Stage, main_of
from benchmarks.models import SHAPES, model_folder
from benchmarks.turns import Record, Requests, serve
from rlbench.runtime import allocator, openmp

MODELS = ("bench-0.8m", "bench-10m", "bench-100m", "bench-0.5b")
RANKS = (0, 32)
"""Of the adapters; 0: full training."""
OWNERS = ("weights", "gradients", "optimizer", "pass")
TOKENS, LENGTH = 1024, 256


class Rank:
    """A training rank without Ray, and the plan of it."""

    def __init__(self, model: str, tokens: int, length: int, checkpointing: bool, lora: int) -> None:
        import cloudpickle

        from rlbench.dispatch import context
        from rlbench.trainers.models.policy_spec import PolicySpec
        from rlbench.workers.train.config import TrainConfig
        from rlbench.workers.train.rank import TrainRank

        context.set_current(context.CallContext())
        self.path, self.tokens, self.length = model_folder(model), tokens, length
        self.train: dict[str, Any] = {"gradient_checkpointing": checkpointing, "lora": {"rank": lora} if lora else None}
        self.loss = cloudpickle.dumps("grpo")
        self.rank = TrainRank(0, 1, TrainConfig(device="cpu"))
        spec = cloudpickle.dumps(PolicySpec(self.path, **self.train))
        self.vocabulary = self.rank.build(spec, self.rank.rendezvous() or ("", 0))["vocab_size"]
        openmp.leave_no_notes()

    def turn(self) -> Record:
        """Step once, so that there is an optimizer, then measure the passes of the next step."""
        from rlbench.strategies.memory.live import LiveMemory
        from rlbench.strategies.memory.peak import PeakMemory

        self._passes()
        self.rank.policy_optim_step({})
        module = self.rank._built().module
        known = [*module.parameters(), *module.buffers()]
        with LiveMemory(known) as live:
            self._passes()
        held = self._held()
        self.rank.policy_zero_grad()
        with PeakMemory() as resident:
            self._passes()
        self.rank.policy_zero_grad()
        gradients = held["gradients"]
        measured = {**held, "pass": live.peak - gradients, "resident": resident.peak - resident.before - gradients}
        return {"measured": measured, "planned": self._planned()}

    def _passes(self) -> None:
        from rlbench.session.checks.rehearsal import worst_batch

        batch = worst_batch(2 * self.tokens, self.length, 1, self.vocabulary)
        self.rank.policy_forward_backward(batch, self.loss, {"token_budget": self.tokens})

    def _held(self) -> dict[str, int]:
        self.rank._built().residency.measure()
        told = self.rank.memory()
        return {owner: int(told[owner]) for owner in OWNERS[:3]}

    def _planned(self) -> dict[str, int]:
        from rlbench.session.planning.plan import plan
        from rlbench.session.planning.uses import RANK

        found = plan(
            self.path,
            train=self.train,
            gpus="0x1000GiB",
            lengths=self.length,
            token_budget=self.tokens,
        )
        owners = {use.owner: use.most for use in found.device if use.role == RANK}
        slack = owners.pop("allocator")
        passing = sum(owners.values()) - sum(owners[owner] for owner in OWNERS[:3])
        return {**{owner: owners[owner] for owner in OWNERS[:3]}, "pass": passing, "resident": passing + slack}


def plans(at: Stage, models: tuple[str, ...] = MODELS, **how: Any) -> Measuring:
    """Yield of each model what was foretold over what was measured, by owner."""
    while True:
        found: dict[str, float] = {}
        for model, lora in itertools.product(models, RANKS):
            asked = {"model": model, "tokens": TOKENS, "length": LENGTH, "checkpointing": False, "lora": lora, **how}
            model += f", LoRA {lora}" if lora else ""
            workers = openmp.environment() | allocator.environment()
            side = at.side("benchmarks.plan", "--serve", json.dumps(asked), **workers)
            side.ready()
            answer = side.turn()
            side.close()
            print(table_of(model, answer))
            for owner, nbytes in answer["measured"].items():
                found[f"{model}_{owner}"] = answer["planned"][owner] / nbytes
            total = [sum(answer[which][owner] for owner in OWNERS) for which in ("planned", "measured")]
            found[f"{model}_total"] = total[0] / total[1]
        yield found


def table_of(model: str, answer: Record) -> str:
    """Planned and measured, by owner."""
    from rlbench.units import format_bytes, format_share

    lines = [f"{model}: planned, measured"]
    for owner, nbytes in answer["measured"].items():
        planned = answer["planned"][owner]
        lines.append(
            f"  {owner:<10} {format_bytes(planned):>9} {format_bytes(nbytes):>9} {format_share(planned, nbytes)}"
        )
    return "\n".join(lines)


def farthest(found: Any, name: str) -> float:
    """How far the plan is from what was measured, in percent, in the model and owner where it is farthest."""
    return max(abs(value - 1.0) * 100.0 for key, value in found.items() if key.endswith(name))


EXPERIMENTS = (Experiment("plan", plans, rounds=1, minutes=5),)
FIGURES = (
    Figure(
        "memory-plan",
        "memory plan, off by: what a rank's tensors take in a step, 0.8 M to 0.5 B parameters, full and LoRA 32",
        "plan",
        lambda found: farthest(found, "_total"),
        "%",
        15.0,
        "less",
    ),
    Figure(
        "memory-plan-resident",
        "… by which its process grows in a pass, the allocator's slack estimated",
        "plan",
        lambda found: farthest(found, "_resident"),
        "%",
        15.0,
        "less",
    ),
)


def main() -> None:
    """Measure, or serve a turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--serve", metavar="JSON")
    parser.add_argument(
        "--models", nargs="+", default=MODELS, help=f"of {', '.join(('tiny', 'bench-10m', *SHAPES))}, …"
    )
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--length", type=int, default=LENGTH)
    parser.add_argument("--checkpointing", action="store_true")
    asked = parser.parse_args()
    if asked.serve is not None:
        openmp.load()  # as a session's workers do, before torch
        serve(Requests(), lambda: Rank(**json.loads(asked.serve)))
        return
    how = {"tokens": asked.tokens, "length": asked.length, "checkpointing": asked.checkpointing}
    main_of(Experiment("plan", lambda at: plans(at, tuple(asked.models), **how), rounds=1, minutes=5), FIGURES)


if __name__ == "__main__":
    main()
