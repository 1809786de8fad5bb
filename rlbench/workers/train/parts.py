"""What the components of a training rank are made from, and the table of their verbs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rlbench.nn import BaseTrainModule
from rlbench.strategies.fsdp2 import FSDPV2Strategy
from rlbench.trainers.update.policy_step import PolicyStep
from rlbench.workers.train.config import TrainConfig
from rlbench.workers.train.stage import WeightSender
from rlbench.workers.train.states import Residency


@dataclass(frozen=True)
class RankParts:
    """A built rank: its module, and the one owner of each thing that is done with it."""

    config: TrainConfig
    module: BaseTrainModule
    strategy: FSDPV2Strategy
    residency: Residency
    policy: PolicyStep
    sender: WeightSender


def verbs_of(components: Iterable[type]) -> dict[str, type]:
    """Return which component has each verb: the public methods of a component are verbs of its rank."""
    return {name: component for component in components for name in vars(component) if not name.startswith("_")}
