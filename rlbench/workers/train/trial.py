"""Trials of a rank: the passes of a training step, measured, with everything put back as it was.

What a preflight and a rehearsal are made of. Gradients are dropped and random states put back, whatever ends a trial;
no optimizer is touched. A rank whose gradients wait for a step refuses: they would be dropped with the trial's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rlbench.checkpoint.rank_state import random_state, set_random_state
from rlbench.data.batches.batch import TrainBatch
from rlbench.errors import StateError
from rlbench.strategies.memory import owners as memory
from rlbench.strategies.memory.peak import PeakMemory, room
from rlbench.strategies.optim.mp_optimizer import MASTER, FSDPadaptOptimizer
from rlbench.trainers.update.options import PolicyOptions

if TYPE_CHECKING:
    from rlbench.strategies.fsdp2 import FSDPV2Strategy
    from rlbench.trainers.update.policy_step import PolicyStep
    from rlbench.workers.train.states import Residency

MOMENTS = {"Adam": 2, "AdamW": 2, "NAdam": 2, "RAdam": 2, "Adamax": 2, "SGD": 0, "Adagrad": 1, "RMSprop": 1}
"""Tensors of a parameter's size that an optimizer holds for it from its first step on."""


class PolicyTrial:
    """Of one rank's module; every method is collective.

    Args:
        module: sharded, with its weights.
        policy: of the module.
        residency: where weights and optimizers are.
        strategy: the rank's.
        optimizers: gives those of the module.
        ranks_here: that share this host's memory.
    """

    def __init__(
        self,
        module: nn.Module,
        policy: PolicyStep,
        residency: Residency,
        strategy: FSDPV2Strategy,
        optimizers: Callable[[], list[torch.optim.Optimizer]],
        ranks_here: int,
    ) -> None:
        self._module, self._policy, self._residency, self._strategy = module, policy, residency, strategy
        self._optimizers, self._ranks_here = optimizers, ranks_here

    def run(self, batch: TrainBatch, options: dict[str, Any], loss_blob: bytes | None = None) -> dict[str, Any]:
        """`PolicyStep.forward`, or with a loss `PolicyStep.forward_backward`; returns what that returns."""
        with self._put_back():
            chosen = PolicyOptions.of(options)
            if loss_blob is None:
                return self._policy.forward(batch, chosen)
            torch.rand(1, device=self._strategy.device.device)  # other draws than the scoring had: chance shows
            return self._policy.forward_backward(batch, loss_blob, chosen)

    def facts(self, batch: TrainBatch, options: dict[str, Any]) -> dict[str, Any]:
        """What a rehearsal plans with: the `token_budget` that `options` give, and the rank's memory.

        Args:
            batch: a short one, to find out how the model is run.

        Returns:
            `token_budget`, `used` (bytes now), `limit` (bytes it may use, everything else staying as it is), `device`,
            and of that device's memory `optimizer`: the bytes of the optimizers' state, `optimizer_missing`: what it
            will take with its first step, `optimizer_step`: what a step takes beside it while it runs.
        """
        self._residency.need("weights", "optimizer")
        with self._put_back():
            chosen = PolicyOptions.of(options)
            self._policy.forward(batch, chosen)
            head = self._policy.head_used(chosen)
        device, optimizers = self._strategy.device, self._optimizers()
        with PeakMemory(device.device) as now:
            pass
        here = 1 if device.is_gpu else self._ranks_here
        return {
            "token_budget": self._policy.budget(chosen, head == "chunked"),
            "used": now.before,
            "limit": now.before + room(device.device, here),
            "device": str(device.device),
            "optimizer": memory.nbytes(memory.on_device(memory.optimizer_tensors(optimizers), device.device)),
            "optimizer_missing": sum(missing_state(one, device.device) for one in optimizers),
            "optimizer_step": sum(taken_by_step(one, device.device) for one in optimizers),
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
            "peak": measured.peak,
            "before": measured.before,
            "how": measured.how,
            "micro_batches": count,
        }

    @contextmanager
    def _put_back(self) -> Iterator[None]:
        self._residency.need("weights")
        self._strategy.control.together("a trial", lambda: _need_no_gradients(self._module))
        before = random_state()
        try:
            yield
        finally:
            self._policy.zero_grad()
            set_random_state(before)
            self._residency.measure()


def _need_no_gradients(module: nn.Module) -> None:
    if memory.gradient_tensors(module):
        raise StateError(
            "gradients wait for a step and a trial would drop them: optim_step() or zero_grad() first, then again."
        )


def missing_state(optimizer: torch.optim.Optimizer, device: torch.device) -> int:
    """Bytes of `device` that this optimizer's state will take with its first step; exact for torch's own and for
    `FSDPadaptOptimizer` around one, but for their counters."""
    held = {key for state in optimizer.state.values() for key in state}
    if not isinstance(optimizer, FSDPadaptOptimizer):
        return 0 if held else _moments(optimizer) * sum(p.nbytes for p in _trained(optimizer, device))
    moments = 0 if held - {MASTER} else _moments(optimizer.inner)
    return (moments + (MASTER not in held)) * _masters(optimizer, device)


def taken_by_step(optimizer: torch.optim.Optimizer, device: torch.device) -> int:
    """Bytes of `device` by which its step is above gradients and state, while it runs: float32 gradients of the copies,
    which take the place of those in half precision."""
    if not isinstance(optimizer, FSDPadaptOptimizer):
        return 0
    return max(0, _masters(optimizer, device) - sum(p.nbytes for p in _trained(optimizer, device)))


def _moments(optimizer: torch.optim.Optimizer) -> int:
    """Tensors of a parameter's size that its state holds for each."""
    asked = sum(bool(optimizer.defaults.get(name)) for name in ("amsgrad", "momentum", "centered"))
    return MOMENTS.get(type(optimizer).__name__, 2) + asked


def _masters(optimizer: torch.optim.Optimizer, device: torch.device) -> int:
    """Bytes of a float32 copy of what it trains."""
    return sum(p.numel() * torch.float32.itemsize for p in _trained(optimizer, device))


def _trained(optimizer: torch.optim.Optimizer, device: torch.device) -> list[torch.Tensor]:
    """This rank's parts of its parameters, of those on `device`: their state is made beside them."""
    held = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    return memory.on_device((memory.local(p.detach()) for p in held), device)
