"""The update of a trainer's critic."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rlbench.errors import DataError, LossError
from rlbench.rl import Aggregation, RunningMoments, value_loss
from rlbench.strategies.base import StrategyBase
from rlbench.trainers.experience.values import Experience
from rlbench.trainers.models.value_model import valued
from rlbench.trainers.passes.forward import DUMMY
from rlbench.trainers.passes.metrics import MetricSums
from rlbench.trainers.passes.packing import ModelInputs
from rlbench.trainers.update.experience_update import Metrics, Update
from rlbench.trainers.update.gradient_step import Pass, Pending


class ValueUpdate(Update):
    """Optimizer steps of a critic; see `Update` for `step`, `accumulate` and `finish`.

    Metrics: `critic_loss`, `values` and `returns` (means over the trained tokens, before the step),
    `value_clip_fraction`, `explained_variance`, `critic_lr`, `critic_grad_norm`, `critic_skipped`.

    Args:
        critic: see `make_critic`, or one of the user's own (`own_critic`); prepared by the strategy.
        optimizer, scheduler, strategy, aggregation, stop_requested: see `Update`.
        value_clip: bound on the change of a value since the experience was made, in units of the return; 0: none.
        packed: rows without padding; or padded ones. The result is the same.
    """

    name = "critic"

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
        stop_requested: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__(critic, optimizer, scheduler, strategy, aggregation, stop_requested)
        self.critic = critic
        self.value_clip = value_clip or None
        self._packed = packed

    def _check(self, part: Experience) -> None:
        if part.returns is None:
            raise DataError("the experience has no returns for the critic to predict; make it with a critic.")
        if self.value_clip is not None and part.values is None:
            raise DataError(f"value_clip={self.value_clip:g} needs the values of when the experience was made.")
        config = getattr(self.critic, "config", None)
        if config is None or not hasattr(config, "get_text_config"):
            return  # a module of the user's own, which says of no vocabulary
        size = int(config.get_text_config().vocab_size)
        for ids in (part.batch.prompts.values, part.batch.responses.values):
            if len(ids) and not (0 <= int(ids.min()) and int(ids.max()) < size):
                raise DataError(
                    f"the experience holds token ids from {ids.min()} to {ids.max()}, the critic's vocabulary has "
                    f"{size}; make the critic from a checkpoint with the actor's tokenizer."
                )

    def _passes(self, parts: Sequence[Experience], pending: Pending, count: int) -> Callable[[int], Pass]:
        sums = _ValueSums()
        self.gradients.beside += [sums, sums.metrics]

        @contextmanager
        def one(index: int) -> Iterator[tuple[Tensor, Callable[[], Tensor] | None]]:
            part = parts[index] if index < len(parts) else None
            batch, device = DUMMY if part is None else part.batch, self.strategy.device.device
            with valued(self.critic, batch, device, self._packed) as (values, inputs):
                yield values, None if part is None else lambda: self._loss(part, values, inputs, pending, sums)

        return one

    def _loss(
        self, part: Experience, values: Tensor, inputs: ModelInputs, pending: Pending, sums: _ValueSums
    ) -> Tensor:
        assert part.returns is not None
        mask = _padded(part.batch.mask, values, inputs) > 0
        returns = _padded(part.returns, values, inputs)
        old = None if part.values is None else _padded(part.values, values, inputs)
        group = torch.from_numpy(part.batch.group.astype(np.int64)).to(values.device)
        now = inputs.grid.pad(values)
        per_token, clipped = value_loss(now, returns, mask, old, self.value_clip)
        total = (per_token * pending.weights(mask, group)).sum()
        if not torch.isfinite(total):
            bad = int((~torch.isfinite(per_token) & mask).sum())
            raise LossError(
                f"the critic's loss is {float(total.detach())}: {bad} of {int(mask.sum())} trained tokens are not "
                "finite; look at the returns, and at the rewards they came from. No step was taken."
            )
        sums.count(now.detach(), returns, mask, clipped, float(total.detach()))
        return total

    def _named(self, found: Metrics) -> Metrics:
        own = [sums for sums in self.gradients.beside if isinstance(sums, _ValueSums)]
        errors, returns = RunningMoments(), RunningMoments()
        for sums in (one for theirs in self.strategy.control.gather(own) for one in theirs):
            errors, returns = errors.merge(sums.errors), returns.merge(sums.returns)
        if returns.count:
            found = {**found, "explained_variance": _explained(errors, returns)}
        return {"critic_loss" if name == "loss" else name: value for name, value in found.items()}


class _ValueSums:
    """What one call counts of a critic: metrics, and the moments that its explained variance is made of."""

    def __init__(self) -> None:
        self.metrics = MetricSums()
        self.errors, self.returns = RunningMoments(), RunningMoments()

    def scale(self, factor: float) -> None:
        """Nothing of it is normalised; the metrics are beside it."""

    def count(self, values: Tensor, returns: Tensor, mask: Tensor, clipped: dict[str, Any], loss: float) -> None:
        """Add one micro-batch."""
        tokens = int(mask.sum())
        self.metrics.totals["loss"] = self.metrics.totals.get("loss", 0.0) + loss
        for name, numbers in {"values": values, "returns": returns, **clipped}.items():
            self.metrics.mean(name, float(numbers[mask].double().sum()), tokens)
        self.errors = self.errors.update((returns - values).double(), mask)
        self.returns = self.returns.update(returns.double(), mask)


def _padded(values: np.ndarray, like: Tensor, inputs: ModelInputs) -> Tensor:
    return inputs.grid.pad(torch.from_numpy(np.array(values, np.float32)).to(like.device))


def _explained(errors: RunningMoments, returns: RunningMoments) -> float:
    """`rlbench.rl.explained_variance` from moments: of equal returns, rounding may leave a little variance."""
    square = returns.squares + returns.count * returns.mean**2
    return 0.0 if returns.squares <= 1e-24 * square else 1.0 - errors.squares / returns.squares
