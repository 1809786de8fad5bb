"""The mathematics: losses, advantages, KL estimators, aggregation. Pure functions of tensors; torch alone."""

from rlbench.rl.advantages import AdvantageFunction, group_normalized
from rlbench.rl.aggregate import Aggregation, BatchTotals
from rlbench.rl.kl import k1, k2, k3
from rlbench.rl.losses import grpo, reinforce, resolve
from rlbench.rl.types import Loss, LossInputs

__all__ = [
    "AdvantageFunction",
    "Aggregation",
    "BatchTotals",
    "Loss",
    "LossInputs",
    "group_normalized",
    "grpo",
    "k1",
    "k2",
    "k3",
    "reinforce",
    "resolve",
]
