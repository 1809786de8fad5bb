"""The component of a rank that lends weights of a snapshot to replicas; the rank's own are afterwards as they were."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rlbench.checkpoint.rank_state import State
from rlbench.checkpoint.tensor_files import local_part
from rlbench.data import TrainBatch
from rlbench.strategies.memory.offloading import reshard
from rlbench.weights.manifest import Manifest
from rlbench.workers.train.parts import RankParts
from rlbench.workers.train.policy import Policy
from rlbench.workers.train.snapshots import POLICY, opened_policy


class Lending:
    """Verbs of a built rank; collective."""

    def __init__(self, parts: RankParts, policy: Policy) -> None:
        self._module, self._control = parts.module, parts.strategy.control
        self._residency, self._sender, self._policy = parts.residency, parts.sender, policy

    def lend_snapshot(
        self, folder: str, staging: Mapping[str, Any], batch: TrainBatch, options: Mapping[str, Any]
    ) -> tuple[Manifest | None, dict[str, Any]]:
        """Stage the weights in snapshot `folder` as `stage_weights` would with the options `staging` were they the
        policy's, and compute log-probs of a batch under them, as `policy_forward`; return both."""
        self._residency.need("weights")
        state = State.of(self._module)
        opened = opened_policy(self._control, state, folder, lambda state, tensors, _: state.check_module(tensors))
        with self._computing_with(opened.part(POLICY)[0], state):
            return self._sender.stage(**staging), self._policy.policy_forward(batch, options)

    @contextmanager
    def _computing_with(self, tensors: Mapping[str, Tensor], state: State) -> Iterator[None]:
        """Have the module's parameters and buffers hold `tensors`; afterwards what they held, to the bit."""
        targets = {name: local_part(tensor) for name, tensor in state.module_tensors().items()}
        copied: Callable[[], dict[str, Tensor]] = partial(_copies, targets)
        own = self._control.together("setting the weights aside", copied)
        reshard(self._module)
        try:
            self._control.together("reading a snapshot", partial(_fill, targets, tensors))
            yield
        finally:
            _fill(targets, own)
            reshard(self._module)


def _copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()}


@torch.no_grad()
def _fill(targets: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    for name, target in targets.items():
        target.copy_(local_part(tensors[name]))
