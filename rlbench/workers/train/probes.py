"""The component of a rank that looks at its gradients, and tries and measures the passes of a step, with everything put
back: gradients that wait are there afterwards, bit for bit, and the random states too."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlbench.checkpoint.rank_state import optimizers_of, random_state, set_random_state
from rlbench.data.batches.batch import TrainBatch
from rlbench.errors import RLBenchError, StateError
from rlbench.strategies.memory import owners as memory
from rlbench.strategies.memory.peak import PeakMemory, room
from rlbench.strategies.optim.gradients import local, over_shards
from rlbench.strategies.optim.mp_optimizer import MASTER, FSDPadaptOptimizer
from rlbench.strategies.ranks.control import on_all_ranks
from rlbench.trainers.passes.routing import with_any_experts
from rlbench.trainers.update.options import PolicyOptions
from rlbench.workers.train.parts import RankParts

PIECE = 1 << 20  # entries of a gradient that are turned to float64 at a time
MOMENTS = {"Adam": 2, "AdamW": 2, "NAdam": 2, "RAdam": 2, "Adamax": 2, "SGD": 0, "Adagrad": 1, "RMSprop": 1}
"""Tensors of a parameter's size that an optimizer holds for it from its first step on."""


class Probes:
    """Collective verbs of a built rank; `ranks_here`: that share this host's memory."""

    def __init__(self, parts: RankParts, ranks_here: int) -> None:
        self._module, self._policy, self._residency = parts.module, parts.policy, parts.residency
        self._strategy, self._ranks_here = parts.strategy, ranks_here
        self._replays = parts.config.router_replay

    def gradient_facts(self) -> dict[str, Any]:
        """Describe the gradients that wait for a step: of each trainable parameter (P,) float64 over all shards,
        `squares` (their sum), `largest` (of the finite), `zeros`, `nonfinite` (counts), …; and of each batch its
        tokens' (`batches`)."""
        self._residency.need("weights")
        if not self._policy.waiting:
            raise StateError(
                "no gradient waits for a step: session.forward_backward(batch, loss) makes one; train_step and "
                "optim_step use it up."
            )
        named = {name: p for name, p in self._module.named_parameters() if p.requires_grad}
        parameters = list(named.values())
        parts = torch.stack([_facts_of(p) for p in parameters])
        sums, largest = over_shards(parameters, parts[:, :5]), over_shards(parameters, parts[:, 5], highest=True)
        columns = ("squares", "zeros", "nonfinite", "sizes", "weight_squares")
        return {
            "names": tuple(named),
            "largest": largest.cpu().numpy(),
            "batches": self._policy.token_gradients(),
            **{name: sums[:, i].cpu().numpy() for i, name in enumerate(columns)},
        }

    def gradients_of_losses(
        self, batch: TrainBatch, losses: dict[str, tuple[bytes, Any]], options: PolicyOptions | Mapping[str, Any]
    ) -> dict[str, Any]:
        """Compare the whole gradients of several losses (the pickled loss and its aggregation, by name) on one batch;
        what waits for a step is not touched. `gram`: (P, K, K) float64, dot products of every two by parameter;
        `failed`: what losses raised. Of K losses K - 1 copies of this rank's gradient are in host memory."""
        self._residency.need("weights")
        named = {name: p for name, p in self._module.named_parameters() if p.requires_grad}
        parameters = list(named.values())
        before = random_state()
        alone = replace(PolicyOptions.of(options), keep_tokens=False, whole_step=True)
        held: dict[str, list[Tensor | None]] = {}
        products: dict[tuple[str, str], Tensor] = {}
        failed: dict[str, str] = {}
        try:
            for name, (blob, aggregation) in losses.items():
                set_random_state(before)  # a dropout is the same for all
                with self._policy.gradients.aside(), self._residency.passing():
                    chosen = replace(alone, aggregation=aggregation)
                    try:
                        self._policy.forward_backward(batch, blob, chosen)
                    except Exception as error:
                        if not (isinstance(error, RLBenchError) or on_all_ranks(error)):
                            raise  # inside a pass: the peers may still be in its collectives
                        failed[name] = str(error)
                        continue
                    own = [None if p.grad is None else local(p.grad).detach() for p in parameters]
                    for other, theirs in [*held.items(), (name, own)]:
                        products[name, other] = torch.stack(
                            [_dot(p, a, b) for p, a, b in zip(parameters, own, theirs, strict=True)]
                        )
                    last = name == list(losses)[-1]
                    held[name] = [] if last else [None if g is None else g.cpu() for g in own]
        finally:
            set_random_state(before)
            self._residency.measure()
        gram = _gram(parameters, tuple(held), products)
        return {"names": tuple(named), "losses": tuple(held), "gram": gram, "failed": failed}

    def policy_trial(
        self, batch: TrainBatch, options: dict[str, Any], loss_blob: bytes | None = None
    ) -> dict[str, Any]:
        """Run `PolicyStep.forward`, or with a loss `PolicyStep.forward_backward`; returns what that returns."""
        with self._put_back():
            chosen = PolicyOptions.of(options)
            if loss_blob is None:
                return self._policy.forward(batch, chosen)
            torch.rand(1, device=self._strategy.device.device)  # other draws than the scoring had: chance shows
            return self._policy.forward_backward(batch, loss_blob, chosen)

    def trial_facts(self, batch: TrainBatch, options: dict[str, Any]) -> dict[str, Any]:
        """Return what a rehearsal plans with: `token_budget`, bytes `used` and their `limit`, and of the optimizers'
        state what there is, what is missing until the first step, and what a step takes beside it."""
        self._residency.need("weights", "optimizer")
        with self._put_back():
            chosen = self._policy.decided(batch, PolicyOptions.of(options))
            self._policy.forward(batch, chosen)
            head = self._policy.head_used(chosen)
        device, optimizers = self._strategy.device, list(optimizers_of(self._module).values())
        with PeakMemory(device.device) as now:
            pass
        return {
            "token_budget": self._policy.budget(chosen, head == "chunked"),
            "used": now.before,
            "limit": now.before + room(device.device, 1 if device.is_gpu else self._ranks_here),
            "device": str(device.device),
            "optimizer": memory.nbytes(memory.on_device(memory.optimizer_tensors(optimizers), device.device)),
            "optimizer_missing": sum(missing_state(one, device.device) for one in optimizers),
            "optimizer_step": sum(taken_by_step(one, device.device) for one in optimizers),
        }

    def rehearse(
        self, warm_up: TrainBatch, batch: TrainBatch, options: dict[str, Any], loss_blob: bytes | None
    ) -> dict[str, Any]:
        """Run one micro-batch at its worst, with the gradients of `warm_up` there before (without a loss: a forward
        pass alone), and measure it: `peak` and `before` in bytes."""
        if self._replays:
            warm_up, batch = (with_any_experts(self._module, one) for one in (warm_up, batch))
        with self._put_back():
            chosen, count = PolicyOptions.of(options), 1
            if loss_blob is not None:
                self._policy.forward_backward(warm_up, loss_blob, chosen)
            with PeakMemory(self._strategy.device.device) as measured:
                if loss_blob is None:
                    self._policy.forward(batch, chosen)
                else:
                    count = self._policy.forward_backward(batch, loss_blob, chosen)["micro_batches"]
        return {"peak": measured.peak, "before": measured.before, "how": measured.how, "micro_batches": count}

    @contextmanager
    def _put_back(self) -> Iterator[None]:
        self._residency.need("weights")
        self._strategy.control.together("a trial", self._need_no_gradients)
        before = random_state()
        try:
            yield
        finally:
            self._policy.zero_grad()
            set_random_state(before)
            self._residency.measure()

    def _need_no_gradients(self) -> None:
        if memory.gradient_tensors(self._module):
            raise StateError(
                "gradients wait for a step and a trial would drop them: optim_step() or zero_grad() first, then again."
            )


def _gram(parameters: list[Tensor], losses: tuple[str, ...], products: dict[tuple[str, str], Tensor]) -> np.ndarray:
    count = len(losses)
    gram = torch.zeros(len(parameters), count, count, dtype=torch.float64)
    for i, one in enumerate(losses):
        for j, other in enumerate(losses[: i + 1]):
            gram[:, i, j] = gram[:, j, i] = products[one, other].cpu()
    device = local(parameters[0]).device
    return np.asarray(over_shards(parameters, gram.to(device)).cpu())


def _dot(parameter: Tensor, one: Tensor | None, other: Tensor | None) -> Tensor:
    """Of this rank's parts, float64; in pieces, so that no copy in float64 of a whole one is held."""
    device = local(parameter).device
    total = torch.zeros((), dtype=torch.float64, device=device)
    if one is None or other is None:
        return total
    for a, b in zip(one.flatten().split(PIECE), other.flatten().split(PIECE), strict=True):
        total += torch.dot(a.to(device).double(), b.to(device).double())
    return total


def _facts_of(parameter: Tensor) -> Tensor:
    """Of this rank's part: squares, zeros, entries not finite, entries, squares of the weights; and the largest finite
    size of an entry; (6,) float64."""
    weights = local(parameter.detach())
    gradient = torch.zeros_like(weights) if parameter.grad is None else local(parameter.grad)
    squares = torch.zeros((), dtype=torch.float64, device=weights.device)
    of_weights, largest = squares.clone(), squares.clone()
    for part, weight in zip(gradient.flatten().split(PIECE), weights.flatten().split(PIECE), strict=True):
        squares += part.double().square().sum()
        of_weights += weight.double().square().sum()
    size = torch.tensor(gradient.numel(), device=weights.device)
    if gradient.numel():
        largest = gradient.abs().nan_to_num(0.0, posinf=0.0).max().double()
    counts = [(gradient == 0).sum(), (~torch.isfinite(gradient)).sum(), size]
    return torch.stack([squares, *(count.double() for count in counts), of_weights, largest])


def missing_state(optimizer: torch.optim.Optimizer, device: torch.device) -> int:
    """Bytes of `device` that this optimizer's state will take with its first step, but for counters."""
    held = {key for state in optimizer.state.values() for key in state}
    if not isinstance(optimizer, FSDPadaptOptimizer):
        return 0 if held else _moments(optimizer) * _trained_bytes(optimizer, device)
    moments = 0 if held - {MASTER} else _moments(optimizer.inner)
    return (moments + (MASTER not in held)) * _trained_bytes(optimizer, device, torch.float32)


def taken_by_step(optimizer: torch.optim.Optimizer, device: torch.device) -> int:
    """Bytes of `device` by which its step is above gradients and state: float32 gradients in the place of half ones."""
    if not isinstance(optimizer, FSDPadaptOptimizer):
        return 0
    return max(0, _trained_bytes(optimizer, device, torch.float32) - _trained_bytes(optimizer, device))


def _moments(optimizer: torch.optim.Optimizer) -> int:
    asked = sum(bool(optimizer.defaults.get(name)) for name in ("amsgrad", "momentum", "centered"))
    return MOMENTS.get(type(optimizer).__name__, 2) + asked


def _trained_bytes(optimizer: torch.optim.Optimizer, device: torch.device, dtype: torch.dtype | None = None) -> int:
    """Bytes of this rank's parts of its parameters on `device`, in `dtype`: their state is made beside them."""
    trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    parts = memory.on_device((memory.local(p.detach()) for p in trained), device)
    return sum(part.numel() * (dtype or part.dtype).itemsize for part in parts)
