"""Trials of a rank: the passes of a training step, measured, with everything put back as it was.

What a preflight and a rehearsal are made of. Gradients are dropped and random states put back, whatever ends a trial;
no optimizer is touched. A rank whose gradients wait for a step refuses: they would be dropped with the trial's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rlbench.checkpoint.rank_state import random_state, set_random_state
from rlbench.data.batch import TrainBatch
from rlbench.errors import StateError
from rlbench.strategies import memory
from rlbench.strategies.peak import PeakMemory, room
from rlbench.trainers.options import PolicyOptions

if TYPE_CHECKING:
    from rlbench.strategies.fsdp2 import FSDPV2Strategy
    from rlbench.trainers.policy_step import PolicyStep
    from rlbench.workers.train_config import TrainConfig
    from rlbench.workers.train_states import Residency

MOMENTS = {"Adam": 2, "AdamW": 2, "NAdam": 2, "RAdam": 2, "Adamax": 2, "SGD": 0, "Adagrad": 1, "RMSprop": 1}
"""Tensors of a parameter's size that an optimizer holds for it from its first step on."""


class TrialVerbs:
    """What `TrainRank` inherits; all verbs are collective."""

    config: TrainConfig
    world_size: int
    _residency: Residency
    _policy: PolicyStep
    _strategy: FSDPV2Strategy

    def _built(self) -> nn.Module:
        raise NotImplementedError

    def _remeasure(self) -> None:
        raise NotImplementedError

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        raise NotImplementedError

    def policy_trial(
        self, batch: TrainBatch, options: dict[str, Any], loss_blob: bytes | None = None
    ) -> dict[str, Any]:
        """`PolicyStep.forward`, or with a loss `PolicyStep.forward_backward`; returns what that returns."""
        with self._put_back():
            chosen = PolicyOptions.of(options)
            if loss_blob is None:
                return self._policy.forward(batch, chosen)
            torch.rand(1, device=self._strategy.device.device)  # other draws than the scoring had: chance shows
            return self._policy.forward_backward(batch, loss_blob, chosen)

    def trial_facts(self, batch: TrainBatch, options: dict[str, Any]) -> dict[str, Any]:
        """What a rehearsal plans with: the `token_budget` that `options` give, and the rank's memory.

        Args:
            batch: a short one, to find out how the model is run.

        Returns:
            `token_budget`, `used` (bytes now), `limit` (bytes it may use, everything else staying as it is), `device`,
            `optimizer` and `optimizer_missing`: the optimizer's bytes, and what it will take with its first step.
        """
        self._residency.need("weights", "optimizer")
        with self._put_back():
            chosen = PolicyOptions.of(options)
            self._policy.forward(batch, chosen)
            head = self._policy.head_used(chosen)
        device = self._strategy.device
        with PeakMemory(device.device) as now:
            pass
        here = 1 if device.is_gpu else self.config.local_ranks or self.world_size
        return {
            "token_budget": self._policy.budget(chosen, head == "chunked"),
            "used": now.before,
            "limit": now.before + room(device.device, here),
            "device": str(device.device),
            "optimizer": memory.nbytes(memory.optimizer_tensors(self._optimizers())),
            "optimizer_missing": sum(map(_missing, self._optimizers())),
        }

    def rehearse(
        self, warm_up: TrainBatch, batch: TrainBatch, options: dict[str, Any], loss_blob: bytes | None
    ) -> dict[str, Any]:
        """One micro-batch as it is at its worst: with the gradients of `warm_up` there before.

        Args:
            loss_blob: None: a forward pass alone, as a frozen policy does.

        Returns:
            `peak` and `before` in bytes, `how` they were measured, `micro_batches`.
        """
        device = self._strategy.device.device
        with self._put_back():
            chosen = PolicyOptions.of(options)
            if loss_blob is None:
                with PeakMemory(device) as measured:
                    self._policy.forward(batch, chosen)
                count = 1
            else:
                self._policy.forward_backward(warm_up, loss_blob, chosen)
                with PeakMemory(device) as measured:
                    count = self._policy.forward_backward(batch, loss_blob, chosen)["micro_batches"]
        return {
            "peak": measured.peak, "before": measured.before, "how": measured.how, "micro_batches": count,
        }  # fmt: skip

    @contextmanager
    def _put_back(self) -> Iterator[None]:
        module = self._built()
        self._residency.need("weights")
        self._strategy.control.together("a trial", lambda: _need_no_gradients(module))
        before = random_state()
        try:
            yield
        finally:
            self._policy.zero_grad()
            set_random_state(before)
            self._remeasure()


def _need_no_gradients(module: nn.Module) -> None:
    if memory.gradient_tensors(module):
        raise StateError(
            "gradients wait for a step and a trial would drop them: optim_step() or zero_grad() first, then again."
        )


def _missing(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of state this optimizer will take with its first step; exact for torch's own, in the parameters' dtype."""
    if optimizer.state:
        return 0
    defaults = optimizer.defaults
    per_weight = MOMENTS.get(type(optimizer).__name__, 2)
    per_weight += bool(defaults.get("amsgrad")) + bool(defaults.get("momentum"))
    trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    return per_weight * memory.nbytes(memory.local(p.data) for p in trained)
