"""A model with a source of chance, and a step of it."""

from __future__ import annotations

from typing import Any

import torch

from tests.modules import TrainedQwen
from tests.ranks import Ranks
from tests.trainers.policy_reference import batch, forward_backward


class NoisyQwen(TrainedQwen):
    """Draws random numbers in its step, and has a scheduler and a frozen part."""

    def on_weights_materialized(self) -> None:
        self.model.embed_tokens.weight.requires_grad_(False)
        super().on_weights_materialized()
        self.lr_scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, gamma=0.5)

    def noise(self) -> float:
        import random

        import numpy as np

        return float(torch.rand(1)) + random.random() + float(np.random.rand())


def step(engine: Ranks, seed: int) -> tuple[Any, ...]:
    """One training step; everything that could tell two runs apart."""
    metrics = forward_backward(engine, batch(seed))[0]["metrics"]
    done = engine.call("policy_optim_step", {})[0]["metrics"]
    return metrics["loss"], done["grad_norm"], done["lr"], engine.method("noise"), engine.call("training_checksums")
