"""The update of a trainer's critic."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rlbench.errors import DataError
from rlbench.rl import Aggregation, value_loss
from rlbench.strategies.base import StrategyBase
from rlbench.trainers.experience.values import Experience
from rlbench.trainers.models.value_model import valued
from rlbench.trainers.passes.forward import DUMMY, check_token_ids
from rlbench.trainers.passes.loss_value import need_finite
from rlbench.trainers.passes.metrics import MetricSums
from rlbench.trainers.passes.packing import ModelInputs
from rlbench.trainers.passes.routing import routers_of
from rlbench.trainers.update.experience_update import Metrics, Update
from rlbench.trainers.update.gradient_step import Pass, PendingStep
from rlbench.trainers.update.policy_pass import balancing


class ValueUpdate(Update):
    """Optimizer steps of a critic, of `make_critic` or one of the user's own; metrics are in docs/metrics.md.

    `value_clip`: bound on the change of a value since the experience was made, in units of the return; 0: none.
    `aux_loss_coef`: of a critic that is a mixture of experts, see `PolicyOptions`.
    """

    name = "critic"
    loss_name = "critic_loss"

    def __init__(
        self,
        critic: nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: Any,
        strategy: StrategyBase,
        value_clip: float | None = None,
        aggregation: str | Aggregation = "seq-mean-token-mean",
        *,
        packed: bool = True,
        aux_loss_coef: float = 0.0,
        stop_requested: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__(critic, optimizer, scheduler, strategy, aggregation, stop_requested)
        self.critic = critic
        self.value_clip = value_clip or None
        self._packed = packed
        self._aux_loss_coef = aux_loss_coef if routers_of(critic) else 0.0

    def _check(self, part: Experience) -> None:
        if part.returns is None:
            raise DataError("the experience has no returns for the critic to predict; make it with a critic.")
        if self.value_clip is not None and part.values is None:
            raise DataError(f"value_clip={self.value_clip:g} needs the values of when the experience was made.")
        check_token_ids(self.critic, "the critic", part.batch.prompts.values, part.batch.responses.values)

    def _passes(self, parts: Sequence[Experience], pending: PendingStep, count: int) -> Callable[[int], Pass]:
        sums = MetricSums()
        self.gradients.beside.append(sums)

        @contextmanager
        def one(index: int) -> Iterator[tuple[Tensor, Callable[[], Tensor] | None]]:
            part = parts[index] if index < len(parts) else None
            batch, device = DUMMY if part is None else part.batch, self.strategy.device.device
            ranks, balance = self.strategy.sequence, self._aux_loss_coef > 0
            given = (self.critic, batch, device, self._packed)
            with valued(*given, ranks=ranks, balance=balance) as (values, inputs):
                yield values, None if part is None else lambda: self._loss(part, values, inputs, pending, sums)

        return one

    def _loss(
        self, part: Experience, values: Tensor, inputs: ModelInputs, pending: PendingStep, sums: MetricSums
    ) -> Tensor:
        assert part.returns is not None
        padded = inputs.grid.pad_numbers
        mask, returns = padded(part.batch.mask) > 0, padded(part.returns)
        old = None if part.values is None else padded(part.values)
        group = torch.from_numpy(part.batch.group.astype(np.int64)).to(values.device)
        now = inputs.grid.pad(values)
        per_token, clipped = value_loss(now, returns, mask, old, self.value_clip)
        weights = pending.weights(mask, group)
        total = (per_token * weights).sum()
        need_finite("the critic's loss", total, per_token, mask, "returns, and the rewards they came from")
        sums.totals["loss"] = sums.totals.get("loss", 0.0) + float(total.detach())
        numbers = {"values": now.detach(), "returns": returns, **clipped, "errors": returns - now.detach()}
        numbers |= {f"{name}^2": numbers[name].double() ** 2 for name in ("returns", "errors")}
        for name, values in numbers.items():
            sums.mean(name, float(values[mask].double().sum()), int(mask.sum()))
        return total + balancing(inputs, weights * mask, self._aux_loss_coef, sums)

    def _named(self, found: Metrics) -> Metrics:
        if "returns^2" in found:
            left = found.pop("errors^2") - found.pop("errors") ** 2
            square = found.pop("returns^2")
            variance = square - found["returns"] ** 2
            found["explained_variance"] = 0.0 if variance <= 1e-14 * square else 1.0 - left / variance
        return super()._named(found)
