"""Mixed-precision optimizer: half-precision parameters in the model, float32 copies of them in the optimizer.

The copy of a parameter is one more tensor of its state, `state[p]["master"]`, so whatever moves, counts or saves
optimizer state takes it along. With AdamW 2 + 12 bytes a parameter, where float32 ones cost 12; gradients 2, not 4.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from rlbench.errors import EngineError
from rlbench.strategies.optim.gradients import global_norm, local

INITIAL, LEAST, MOST = 2.0**16, 1.0, 2.0**24
GROWTH, BACKOFF, GROWTH_INTERVAL = 2.0, 0.5, 1000
MASTER = "master"
OWN_KEYS = ("params", "loss_scale", "good_steps", "dynamic_scale")


class FSDPadaptOptimizer(Optimizer):
    """Steps float32 copies of half-precision parameters and rounds the result back; sharded or not.

    Where a parameter is float16 the loss is scaled so that small gradients survive; the scale is halved after an
    overflow (whose step is skipped) and grows again. bfloat16 has float32's range and needs none.

    Args:
        optimizer: one that was made over the model's parameters (AdamW, SGD, …); or the parameters, for an AdamW
            over them.
        max_norm: global norm of the unscaled gradients above which they are scaled down; 0: no clipping.
        kwargs: AdamW's, where parameters are given.
    """

    def __init__(self, optimizer: Optimizer | Iterable[Any], *, max_norm: float = 0.0, **kwargs: Any) -> None:
        if not isinstance(optimizer, Optimizer):
            optimizer = torch.optim.AdamW(optimizer, **kwargs)
        elif kwargs:
            raise EngineError(f"{next(iter(kwargs))!r} belongs to the optimizer that was given; set it there.")
        self.inner = optimizer
        self.max_norm = max_norm
        self.grad_norm = math.nan  # of the last step, unscaled, before clipping
        groups = [{**group, "params": list(group["params"])} for group in optimizer.param_groups]
        super().__init__(groups, dict(optimizer.defaults))
        for parameter in self._parameters():
            if parameter in optimizer.state:
                self.state[parameter] = {k: _float32(v) for k, v in optimizer.state[parameter].items()}
        optimizer.state.clear()
        for group in optimizer.param_groups:
            group["params"] = []  # it sees the copies, during a step
        self._scaled = False
        dynamic = any(p.dtype == torch.float16 for p in self._parameters())
        for group in self.param_groups:  # plain numbers there, so that every checkpoint has them
            group.setdefault("loss_scale", INITIAL if dynamic else 1.0)
            group.setdefault("good_steps", 0)
            group.setdefault("dynamic_scale", dynamic)

    def _parameters(self) -> list[Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    @property
    def loss_scale(self) -> float:
        """By what `backward` multiplies the loss, and `step` divides the gradients."""
        return float(self.param_groups[0]["loss_scale"])

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Add the gradients of the scaled loss; kwargs as of `torch.Tensor.backward`."""
        (loss.float() * self.loss_scale).backward(**kwargs)
        self._scaled = True

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> bool:  # type: ignore[override]
        """Clip, step the copies, round them into the parameters; collective where these are sharded. Return False where
        the gradients were not finite: they are cleared, and nothing else changed but the loss scale."""
        if closure is not None:
            raise EngineError("the mixed-precision optimizer takes no closure; call backward(loss), then step().")
        scale = self.loss_scale
        if scale != 1.0 and not self._scaled:
            raise EngineError(
                "these gradients are not scaled, as those of float16 parameters must be: make them by "
                "strategy.backward(loss, model, optimizer) or optimizer.backward(loss)."
            )
        self._scaled = False
        self.grad_norm = global_norm(self._parameters()) / scale
        overflow = not math.isfinite(self.grad_norm)
        self._update_scale(overflow)
        if overflow:
            self.zero_grad()
            return False
        clip = self.max_norm / self.grad_norm if 0 < self.max_norm < self.grad_norm else 1.0
        self._step_masters(clip / scale)
        self.zero_grad()
        return True

    def _update_scale(self, overflow: bool) -> None:
        """Halve the scale after an overflow; double it after 1000 steps without (Micikevicius et al., 2018, §3.2)."""
        for group in self.param_groups:
            if not group["dynamic_scale"]:
                continue
            group["good_steps"] = 0 if overflow else group["good_steps"] + 1
            if overflow:
                group["loss_scale"] = max(LEAST, group["loss_scale"] * BACKOFF)
            elif group["good_steps"] == GROWTH_INTERVAL:
                group["loss_scale"], group["good_steps"] = min(MOST, group["loss_scale"] * GROWTH), 0

    def _step_masters(self, factor: float) -> None:
        """Let the wrapped optimizer step float32 stand-ins; its state lives in ours between two steps."""
        stand_ins: list[tuple[Tensor, Tensor]] = []
        for group, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            inner.update({key: value for key, value in group.items() if key not in OWN_KEYS})
            inner["params"] = []
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                master = self._master(parameter)
                master.grad = parameter.grad.to(torch.float32) * factor
                parameter.grad = None
                inner["params"].append(master)
                stand_ins.append((parameter, master))
        self.inner.state.clear()
        for parameter, master in stand_ins:
            self.inner.state[master] = {k: v for k, v in self.state[parameter].items() if k != MASTER}
        self.inner.step()
        for parameter, master in stand_ins:
            master.grad = None
            self.state[parameter] = {MASTER: master, **self.inner.state[master]}
            local(parameter).copy_(local(master))
        self.inner.state.clear()
        for inner in self.inner.param_groups:
            inner["params"] = []

    def _master(self, parameter: Tensor) -> Tensor:
        """The float32 copy. Where the parameter no longer is its rounding, somebody loaded weights: it follows them."""
        state = self.state[parameter]
        if MASTER not in state:
            state[MASTER] = parameter.detach().to(torch.float32, copy=True)
        rounded, copy = local(parameter.detach()), local(state[MASTER])
        copy.copy_(torch.where(copy.to(rounded.dtype) == rounded, copy, rounded.float()))
        return state[MASTER]  # type: ignore[no-any-return]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, but keeping float32 state float32 beside half-precision parameters."""
        super().load_state_dict(state_dict)
        places = [index for group in state_dict["param_groups"] for index in group["params"]]
        for index, parameter in zip(places, self._parameters(), strict=True):
            for key, value in state_dict["state"].get(index, {}).items():
                if isinstance(value, Tensor) and value.dim() > 0:
                    self.state[parameter][key] = value.to(parameter.device, copy=True)
                elif isinstance(value, Tensor):  # a counter: torch placed it, but shares it with where it came from
                    self.state[parameter][key] = self.state[parameter][key].clone()


def _float32(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value


def is_mp_optimizer(optim: Any) -> bool:
    """True for an `FSDPadaptOptimizer`."""
    return isinstance(optim, FSDPadaptOptimizer)
