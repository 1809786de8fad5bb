"""From a loss to a step: optimizers, backward, accumulation, clipping.

One rule of gradient scale: `backward` is the only place that scales a loss. With `reduction="mean"` (a user's own
loss, a mean over the rank's data) it divides by the accumulation steps and FSDP averages over ranks. With
`reduction="sum"` the loss is this rank's term of a sum that is already normalised over the whole optimizer step:
nothing is divided, and FSDP's mean over ranks is undone.
"""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

import torch
from torch import Tensor, nn

from rlbench.errors import EngineError
from rlbench.strategies.optim.gradients import global_norm, scale_gradients
from rlbench.strategies.optim.groups import parameter_groups
from rlbench.strategies.optim.learning_rate import at_rates
from rlbench.strategies.optim.mp_optimizer import FSDPadaptOptimizer
from rlbench.strategies.optim.optimizer_set import Stepped, parts_of
from rlbench.strategies.ranks.control import ranks_apart
from rlbench.strategies.surface.memory_side import MemorySide, holds_gradients
from rlbench.user_code import user_code


class StepResult(TypedDict):
    """What `optimizer_step` did. `grad_norm` is that before clipping, None where gradients still
    accumulate."""

    stepped: bool
    grad_norm: float | None
    skipped: str | None


class StepSide(MemorySide):
    """Of a strategy: `accumulation`, the backward calls of one optimizer step on each rank."""

    max_norm: float
    accumulation: int

    def _start_steps(self) -> None:
        self._calls: weakref.WeakKeyDictionary[nn.Module, Counter[str]] = weakref.WeakKeyDictionary()

    @property
    def accumulated_gradient(self) -> int:
        """The reference's name of `accumulation`."""
        return self.accumulation

    def create_optimizer(self, model: nn.Module, **kwargs: Any) -> torch.optim.Optimizer:
        """AdamW over the trainable parameters, grouped by dtype, shard size and weight decay.

        With `use_mp_opt` it holds float32 copies of half-precision parameters (`FSDPadaptOptimizer`).

        Args:
            model: sharded or not; prepare it first.
            kwargs: AdamW's (`lr`, `betas`, `eps`, …). `weight_decay` (default 0.01) spares biases and norms. `fused`
                defaults to True: one kernel per group, exact, and the fastest on CPU too.

        Raises:
            EngineError: nothing is trainable.
        """
        groups = parameter_groups(model, float(kwargs.pop("weight_decay", 0.01)))
        optimizer = torch.optim.AdamW(groups, **{"fused": True, **kwargs})
        return FSDPadaptOptimizer(optimizer) if self.config.use_mp_opt else optimizer

    def backward(
        self,
        loss: Tensor,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        reduction: str = "mean",
        **kwargs: Any,
    ) -> None:
        """Add the gradients of `loss`.

        Args:
            loss: a number, as a tensor.
            model: whose loss it is.
            optimizer: whose loss scale applies; needed with `use_mp_opt`.
            reduction: "mean" or "sum", described at the top of this module.
            kwargs: as of `torch.Tensor.backward` (`retain_graph`, …).
        """
        if reduction == "mean":
            scaled = loss / self.accumulation
        elif reduction == "sum":
            scaled = loss * self.backward_scale(model)
        else:
            raise EngineError(f"reduction={reduction!r}: it is 'mean' or 'sum'.")
        if optimizer is None and self.config.use_mp_opt:
            raise EngineError(
                "with use_mp_opt the optimizer scales the loss; pass it: backward(loss, model, optimizer)."
            )
        if isinstance(optimizer, FSDPadaptOptimizer):
            optimizer.backward(scaled, **kwargs)
        else:
            scaled.backward(**kwargs)

    def backward_scale(self, model: nn.Module) -> int:
        """By what `backward` multiplies a sum: the ranks over which gradients are averaged."""
        return 1

    def optimizer_step(
        self,
        optimizer: torch.optim.Optimizer,
        model: nn.Module,
        scheduler: Any = None,
        name: str = "model",
        *,
        max_norm: float | None = None,
    ) -> StepResult:
        """Step optimizer and scheduler with every accumulation-th call of this `name`; clip before.

        Args:
            optimizer, scheduler: of the model; no scheduler: None.
            name: calls are counted by it (and by model), so that actor and critic accumulate apart.
            max_norm: of this step; None: the strategy's.
        """
        self.need_optimizer(optimizer)
        calls = self._calls.setdefault(model, Counter())
        calls[name] += 1
        if calls[name] < self.accumulation:
            return StepResult(stepped=False, grad_norm=None, skipped=None)
        calls[name] = 0
        return self.step_now(optimizer, model, scheduler, max_norm)

    def step_now(
        self,
        optimizer: Stepped,
        model: nn.Module,
        scheduler: Any = None,
        max_norm: float | None = None,
        *,
        rates: Sequence[float] | None = None,
    ) -> StepResult:
        """Clip (to `max_norm`, by default the strategy's), step and clear the gradients, whatever has
        accumulated.

        Args:
            optimizer: one, or a set of several that are stepped together.
            scheduler: of the model, or several by name; stepped last, at the rates the groups had before.
            rates: learning rates of the optimizer's groups for this step alone; None: those they have.

        A norm that is not finite clears the gradients and leaves parameters, optimizer and scheduler untouched; the
        result says so.
        """
        for part in parts_of(optimizer):
            self.need_optimizer(part)
        limit = self.max_norm if max_norm is None else max_norm
        with at_rates(optimizer, rates):
            if isinstance(optimizer, FSDPadaptOptimizer):
                optimizer.max_norm = limit
                self._step(optimizer)
                norm = optimizer.grad_norm
            else:
                norm = self._step_clipped(optimizer, limit)
        optimizer.zero_grad(set_to_none=True)
        if not math.isfinite(norm):
            reason = f"the gradient norm is {norm}; gradients were cleared, parameters and optimizer are untouched"
            self.print(f"optimizer step skipped: {reason}")
            return StepResult(stepped=False, grad_norm=norm, skipped=reason)
        for each in scheduler.values() if isinstance(scheduler, Mapping) else [scheduler]:
            if each is not None:
                each.step()
        return StepResult(stepped=True, grad_norm=norm, skipped=None)

    def _step_clipped(self, optimizer: Stepped, limit: float) -> float:
        """Clip by the norm over all groups, and step unless it is not finite; returns the norm before clipping."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        norm = global_norm(parameters)
        if math.isfinite(norm):
            if 0 < limit < norm:
                scale_gradients(parameters, limit / norm)
            self._step(optimizer)
        return norm

    def _step(self, optimizer: Stepped) -> None:
        """The others take theirs whatever happens here: a rank that fails in it holds other weights than they do."""
        try:
            with user_code():
                optimizer.step()
        except Exception as error:
            if self.world_size == 1:
                raise
            raise ranks_apart(
                f"the optimizer's step failed on rank {self.rank} ({type(error).__name__}: {error}), and may have been "
                "taken on others"
            ) from error

    def forget_gradients(self, model: nn.Module) -> bool:
        """Drop the gradients of a model that wait for a step, and the count of them; returns whether there were any."""
        waited = holds_gradients(model)
        model.zero_grad(set_to_none=True)
        self._calls.pop(model, None)
        return waited
