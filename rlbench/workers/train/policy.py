"""The component of a rank that computes and steps its policy."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from rlbench.checkpoint.rank_state import schedulers_of
from rlbench.data.batches.batch import TrainBatch
from rlbench.errors import EngineError
from rlbench.strategies.memory.peak import pass_peak
from rlbench.strategies.optim.optimizer_set import parts_of, scaled_rates
from rlbench.trainers.update.options import PolicyOptions
from rlbench.workers.train.optimizers import outside_state, policy_optimizer, unstepped
from rlbench.workers.train.parts import RankParts
from rlbench.workers.train.trainer import HeldTrainer

COUNTED_SHARE = 0.05
"""Of a pass's time: memory is counted behind it if that takes no longer, and otherwise when it is asked for."""


class Policy:
    """Collective verbs of a built rank; `trainer` holds the session's, whose gradients are never mixed with these."""

    def __init__(self, parts: RankParts, trainer: HeldTrainer) -> None:
        self._module, self._residency, self._policy = parts.module, parts.residency, parts.policy
        self._strategy, self._trainer = parts.strategy, trainer

    def policy_forward(self, batch: TrainBatch, options: PolicyOptions | Mapping[str, Any]) -> dict[str, Any]:
        """Log-probs and entropies without gradient, of this rank's rows; see `PolicyStep.forward`."""
        self._residency.need("weights")
        with self._residency.passing(settled=False):
            return self._policy.forward(batch, PolicyOptions.of(options))

    def policy_forward_backward(
        self, batch: TrainBatch, loss_blob: bytes, options: PolicyOptions | Mapping[str, Any]
    ) -> dict[str, Any]:
        """Add the gradients of a batch; see `PolicyStep.forward_backward`."""
        self._residency.need("weights")
        self._trainer.need_no_trainer_gradients()
        begin = time.monotonic()
        try:
            with self._residency.passing(), pass_peak(self._strategy.device.device) as peak:
                done = self._policy.forward_backward(batch, loss_blob, PolicyOptions.of(options))
            return done | {"peak_bytes": peak.bytes}
        finally:
            self._residency.measure_after(time.monotonic() - begin, COUNTED_SHARE)

    def policy_optim_step(self, options: dict[str, Any]) -> dict[str, Any]:
        """Step once, by `lr`, `max_norm` (of this step alone), `whole_step` and `skip` of `PolicyStep.optim_step`."""
        self._residency.need("weights", "optimizer")
        self._trainer.need_no_trainer_gradients()
        optimizer, lr = policy_optimizer(self._module), options.get("lr")
        self._strategy.maybe_load_optimizer(optimizer)  # a trainer that a cell drives leaves it away
        notes = [unstepped(self._module, optimizer)]
        try:
            done = self._policy.optim_step(
                optimizer,
                getattr(self._module, "lr_scheduler", None),
                options.get("max_norm"),
                options.get("whole_step", False),
                None if lr is None else scaled_rates(optimizer, lr),
                options.get("skip"),
            )
            notes.append(outside_state(self._module, optimizer))
            return done | {"notes": [note for note in notes if note is not None]}
        finally:
            self._residency.measure()

    def loss_states(self) -> dict[str, dict[str, Tensor]]:
        """What losses with a state hold now, on the host; equal on all ranks."""
        held = self._policy.loss_states.held
        return {name: {key: value.cpu() for key, value in state.items()} for name, state in held.items()}

    def policy_zero_grad(self) -> None:
        """Forget the gradients that wait for a step."""
        self._policy.zero_grad()
        self._trainer.drop_trainer_gradients()
        self._residency.measure()

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of the policy's optimizer and the base rate of its schedulers, a trainer's too. Groups
        with rates of their own keep their ratio to the first, which gets `lr`."""
        optimizer = policy_optimizer(self._module)
        rates = scaled_rates(optimizer, lr)
        if not any(rates) and len({group["lr"] for group in optimizer.param_groups}) > 1:
            raise EngineError("lr=0 would forget the ratio of the groups' rates; train_step(…, lr=0) is for one step.")
        self._trainer.schedule_from(rates)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
            if "initial_lr" in group:
                group["initial_lr"] = rate
        stepped = parts_of(optimizer)
        for scheduler in schedulers_of(self._module).values():
            if any(scheduler.optimizer is part for part in stepped):
                scheduler.base_lrs = [float(group["lr"]) for group in scheduler.optimizer.param_groups]
