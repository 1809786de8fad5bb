"""What the components of a training rank are made from, and the table of their verbs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from rlbench.nn import BaseTrainModule
from rlbench.strategies.base import StrategyBase
from rlbench.strategies.memory.offloading import reshard
from rlbench.trainers.update.policy_step import PolicyStep
from rlbench.workers.train.config import TrainConfig
from rlbench.workers.train.group import RankGroup
from rlbench.workers.train.namespace import Namespace
from rlbench.workers.train.stage import WeightSender
from rlbench.workers.train.states import Residency


@dataclass(frozen=True)
class RankParts:
    """A built rank: its module, and the one owner of each thing that is done with it."""

    config: TrainConfig
    module: BaseTrainModule
    strategy: StrategyBase
    group: RankGroup
    residency: Residency
    policy: PolicyStep
    sender: WeightSender
    namespace: Namespace

    def of_the_user(self, work: Callable[[], Any]) -> Any:
        """Do what a user wrote: whatever ends it early, no gathered parameter is left behind, on any rank."""
        begin = time.monotonic()
        try:
            return work()
        except BaseException:
            reshard(self.module)
            self.group.failed = True
            raise
        finally:
            self.residency.measure_after(time.monotonic() - begin)


def verbs_of(components: Iterable[type]) -> dict[str, type]:
    """Return which component has each verb: the public methods of a component are verbs of its rank."""
    return {name: component for component in components for name in vars(component) if not name.startswith("_")}
