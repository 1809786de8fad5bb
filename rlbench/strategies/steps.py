"""From a loss to a step: optimizers, backward, accumulation, clipping.

One rule of gradient scale: `backward` alone scales a loss. With `reduction="mean"` (a user's own loss, a mean over the
rank's data) it divides by the accumulation steps and FSDP averages over ranks. With "sum" the loss is this rank's term
of a sum that is normalised over the whole step: nothing is divided, and FSDP's mean over ranks is undone.

A model that computes in float16 has a loss scale. It is in force while `backward` runs, and gone from every gradient
that a parameter gets: whatever reads or changes those, or calls `loss.backward()` itself, need not know of it.
"""

from __future__ import annotations

import math
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rlbench.errors import EngineError
from rlbench.strategies.memory.offloading import holds_gradients
from rlbench.strategies.optim.gradients import full_shape, global_norm, scale_gradients
from rlbench.strategies.optim.loss_scale import LossScale
from rlbench.strategies.optim.mp_optimizer import FSDPadaptOptimizer
from rlbench.strategies.optim.optimizer_set import Stepped, at_rates, parts_of
from rlbench.strategies.ranks.control import ranks_apart
from rlbench.user_code import user_code

if TYPE_CHECKING:
    from rlbench.strategies.base import StrategyBase

NO_DECAY_NAMES = ("bias", "layer_norm.weight", "layernorm.weight", "norm.weight", "ln_f.weight")


class StepResult(TypedDict):
    """What `optimizer_step` did; `grad_norm` is that before clipping, None where gradients still accumulate;
    `loss_scale` that of the gradients, where the model has one."""

    stepped: bool
    grad_norm: float | None
    skipped: str | None
    loss_scale: NotRequired[float]


class Steps:
    """Of a strategy: its optimizers' steps, and the backward calls that each model has accumulated since."""

    def __init__(self, strategy: StrategyBase) -> None:
        self._strategy = strategy
        self._scales: weakref.WeakKeyDictionary[nn.Module, LossScale] = weakref.WeakKeyDictionary()
        self._calls: weakref.WeakKeyDictionary[nn.Module, Counter[str]] = weakref.WeakKeyDictionary()

    def create_optimizer(self, model: nn.Module, **kwargs: Any) -> torch.optim.Optimizer:
        """Make an AdamW over the trainable parameters, grouped by dtype, shard size and weight decay.

        With `use_mp_opt` it holds float32 copies of half-precision parameters (`FSDPadaptOptimizer`).

        Args:
            model: sharded or not; prepare it first.
            kwargs: AdamW's (`lr`, `betas`, `eps`, …). `weight_decay` (default 0.01) spares biases and norms. `fused`
                defaults to True: one kernel per group, exact, and the fastest on CPU too.
        """
        self._strategy.need_own(model)
        groups = parameter_groups(model, float(kwargs.pop("weight_decay", 0.01)))
        optimizer = torch.optim.AdamW(groups, **{"fused": True, **kwargs})
        return self.adopted(optimizer, model)

    def adopted(self, optimizer: torch.optim.Optimizer, model: nn.Module) -> torch.optim.Optimizer:
        """Return the optimizer that steps a prepared model in the place of one that was made over its parameters."""
        if self._strategy.config.use_mp_opt and not isinstance(optimizer, FSDPadaptOptimizer):
            return FSDPadaptOptimizer(optimizer)
        return optimizer

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
            model: whose loss it is; one of float16 has others beside it in one loss only if this strategy prepared
                them, for float16 as well.
            optimizer: whose loss scale applies; needed with `use_mp_opt`.
            reduction: "mean": of this rank's data; "sum": a term of a sum that is normalised over the whole step.
            kwargs: as of `torch.Tensor.backward` (`retain_graph`, …).
        """
        self._strategy.need_own(model)
        if reduction == "mean":
            scaled = loss / self._strategy.accumulation
        elif reduction == "sum":
            scaled = loss * self._strategy.backward_scale(model)
        else:
            raise EngineError(f"reduction={reduction!r}: it is 'mean' or 'sum'.")
        self._add_gradients(scaled, model, optimizer, **kwargs)

    def _add_gradients(
        self, scaled: Tensor, model: nn.Module, optimizer: torch.optim.Optimizer | None, **kwargs: Any
    ) -> None:
        if isinstance(optimizer, FSDPadaptOptimizer):
            optimizer.backward(scaled, **kwargs)
        elif optimizer is None and self._strategy.config.use_mp_opt:
            raise EngineError(
                "with use_mp_opt the optimizer scales the loss; pass it: backward(loss, model, optimizer)."
            )
        elif (scale := self._scale_of(model)) is not None:
            with self._strategy.unscaling({model, *self._strategy.in_float16}, scale.value):
                (scaled.float() * scale.value).backward(**kwargs)
        else:
            scaled.backward(**kwargs)

    def loss_scale(self, model: nn.Module) -> float:
        """Return by what `backward` multiplies the loss of a model, and divides the gradients of its parameters; what
        hooks inside of the model see is scaled by it. 1 where it does not compute in float16."""
        scale = self._scale_of(model)
        return 1.0 if scale is None else scale.value

    def _scale_of(self, model: nn.Module) -> LossScale | None:
        return self._scales.setdefault(model, LossScale()) if self._strategy.needs_scale(model) else None

    def optimizer_step(
        self,
        optimizer: torch.optim.Optimizer,
        model: nn.Module,
        scheduler: Any = None,
        name: str = "model",
        *,
        max_norm: float | None = None,
    ) -> StepResult:
        """Clip and step optimizer and scheduler with every accumulation-th call of this `name`.

        Args:
            optimizer, scheduler: of the model; no scheduler: None.
            name: calls are counted by it (and by model), so that actor and critic accumulate apart.
            max_norm: of this step; None: the strategy's.
        """
        self._strategy.need_optimizer(optimizer)
        calls = self._calls.setdefault(model, Counter())
        calls[name] += 1
        if calls[name] < self._strategy.accumulation:
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
        """Clip, step and clear the gradients, whatever has accumulated, at `rates` of the optimizer's groups for this
        step alone (None: those they have); then step the schedulers (one, or several by name). Where
        the norm is not finite, parameters, optimizer and scheduler are left untouched; the result says so."""
        for part in parts_of(optimizer):
            self._strategy.need_optimizer(part)
        limit = self._strategy.max_norm if max_norm is None else max_norm
        with at_rates(optimizer, rates):
            norm = self._clip_and_step(optimizer, model, limit)
        result = StepResult(stepped=math.isfinite(norm), grad_norm=norm, skipped=None)
        said = self._note_scale(model, result)
        if not result["stepped"]:
            result["skipped"] = (
                f"the gradient norm is {norm}; gradients were cleared, parameters and optimizer are untouched{said}"
            )
            self._strategy.print(f"optimizer step skipped: {result['skipped']}")
            return result
        for each in scheduler.values() if isinstance(scheduler, Mapping) else [scheduler]:
            if each is not None:
                each.step()
        return result

    def _clip_and_step(self, optimizer: Stepped, model: nn.Module, limit: float) -> float:
        """Step with gradients of at most this norm (0: any), unless it is not finite, and clear them; return the norm
        before."""
        if isinstance(optimizer, FSDPadaptOptimizer):
            optimizer.max_norm = limit
            self._step(optimizer.step)
            norm = optimizer.grad_norm
        else:
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            norm = global_norm(parameters)
            if math.isfinite(norm):
                if 0 < limit < norm:
                    scale_gradients(parameters, limit / norm)
                self._step(optimizer.step)
        optimizer.zero_grad(set_to_none=True)
        return norm

    def _note_scale(self, model: nn.Module, result: StepResult) -> str:
        """Add the loss scale of a step to its result, and let it follow; return what a skipped step says of it."""
        scale = self._scale_of(model)
        if scale is None:
            return ""
        result["loss_scale"] = scale.value
        scale.update(result["stepped"])
        if scale.value == result["loss_scale"]:
            return f"; the loss scale stays {scale.value:g}: the model itself overflows in float16, or its loss does"
        return f"; the loss scale goes from {result['loss_scale']:g} to {scale.value:g}, so the next step may fit"

    def _step(self, step: Callable[[], Any]) -> Any:
        """Step; the others take theirs whatever happens here: a rank that fails in it holds other weights than they."""
        try:
            with user_code():
                return step()
        except Exception as error:
            if self._strategy.world_size == 1:
                raise
            raise ranks_apart(
                f"the optimizer's step failed on rank {self._strategy.rank} ({type(error).__name__}: {error}), and may "
                "have been taken on others"
            ) from error

    def forget_gradients(self, model: nn.Module) -> bool:
        """Drop the gradients of a model that wait for a step, and the count of them; return whether there were any."""
        waited = holds_gradients(model)
        model.zero_grad(set_to_none=True)
        self._calls.pop(model, None)
        return waited


def decays(name: str, parameter: Tensor) -> bool:
    """Whether weight decay applies: not to biases and norms, by name or because they have one dimension."""
    return len(full_shape(parameter)) > 1 and not any(part in name.lower() for part in NO_DECAY_NAMES)


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return the trainable parameters in groups of equal dtype, shard count and weight decay: a fused step and the
    reduction of a gradient norm both need one dtype and one mesh."""
    groups: defaultdict[tuple[Any, ...], list[nn.Parameter]] = defaultdict(list)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            shards = parameter.device_mesh.size() if isinstance(parameter, DTensor) else 1
            decay = weight_decay if decays(name, parameter) else 0.0
            groups[parameter.dtype, shards, decay].append(parameter)
    if not groups:
        raise EngineError(f"{type(model).__name__} has no trainable parameter; set requires_grad on some first.")
    return [{"params": params, "weight_decay": decay} for (_, _, decay), params in groups.items()]
