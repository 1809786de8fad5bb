"""A training rank that takes a step, and the plan of it: bytes by owner of both."""

from __future__ import annotations

from typing import Any

import cloudpickle
import pytest

from rlbench.data.batches.batch import TrainBatch
from rlbench.session.checks.rehearsal import worst_batch
from rlbench.session.planning.plan import plan
from rlbench.session.planning.uses import RANK
from rlbench.trainers.models.policy_spec import PolicySpec
from tests.ranks import ranks

TOKENS, LENGTH = 256, 128
"""Of a micro-batch and of its sequences: two of them pack, and a host computes few."""
HELD = ("weights", "gradients", "optimizer")
BEGIN = """
from rlbench.strategies.memory.live import LiveMemory
live = LiveMemory([*module.parameters(), *module.buffers()])
live.__enter__()
"""
END = """
live.__exit__(None, None, None)
live.peak
"""
ON_GPU = "import torch; torch.cuda.reset_peak_memory_stats(); before = torch.cuda.memory_allocated()"
HIGHEST = "torch.cuda.max_memory_allocated() - before"


def measured(path: str, train: dict[str, Any], count: int, batch: TrainBatch | None = None) -> dict[str, int]:
    """Bytes by owner of the first rank in its second step, of two micro-batches; `pass`: what comes and goes."""
    ours = ("gradient_checkpointing", "dtype", "lora")
    spec = PolicySpec(path, **{name: value for name, value in train.items() if name in ours})
    with ranks(count, **{name: value for name, value in train.items() if name not in ours}) as engine:
        vocabulary = engine.build(spec)[0]["vocab_size"]
        batch = worst_batch(2 * TOKENS, LENGTH, count, vocabulary) if batch is None else batch
        step = (batch, cloudpickle.dumps("grpo"), {"token_budget": TOKENS})
        engine.call("policy_forward_backward", *step)
        engine.call("policy_optim_step", {})
        on_gpu = train.get("device") == "cuda"
        engine.run(ON_GPU if on_gpu else BEGIN)
        engine.call("policy_forward_backward", *step)
        peak = int(engine.run(HIGHEST if on_gpu else END)[0])
        engine.call("release_memory_cache", False, False)  # which counts again
        memory = engine.call("memory")[0]
        owners = {owner: int(memory[owner]) for owner in HELD}
        return {**owners, "pass": peak - owners["gradients"]}


def planned(path: str, train: dict[str, Any], count: int, images: str | None = None) -> dict[str, int]:
    """The same bytes, as the plan has them."""
    gpus = f"{count}x100GiB" if train.get("device") == "cuda" else "0x100GiB"
    options = {**train, "shards": count}
    answer = plan(path, train=options, gpus=gpus, lengths=LENGTH, token_budget=TOKENS, images=images)
    there = 1 if answer.request.devices.gpus else count
    owners = {use.owner: use.most // there for use in answer.device if use.role == RANK}
    for beside in ("allocator", "sync buffers", "pixels"):
        owners.pop(beside, None)
    return {**{owner: owners.pop(owner) for owner in HELD}, "pass": sum(owners.values())}


def assert_as_planned(
    path: str,
    train: dict[str, Any] | None = None,
    count: int = 1,
    batch: TrainBatch | None = None,
    images: str | None = None,
) -> None:
    """Hold the plan to 1 % of what is held, and 15 % of what comes and goes."""
    taken, foretold = measured(path, train or {}, count, batch), planned(path, train or {}, count, images)
    for owner in HELD:
        assert foretold[owner] == pytest.approx(taken[owner], rel=0.01), owner
    assert foretold["pass"] == pytest.approx(taken["pass"], rel=0.15)
    assert sum(foretold.values()) == pytest.approx(sum(taken.values()), rel=0.15)
