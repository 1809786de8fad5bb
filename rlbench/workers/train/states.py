"""Where a rank's weights and optimizer state are, and moving them: on the device, in host memory, released. On a host
without a GPU "cuda" and "cpu" hold the same bytes, and "cpu" only bars training."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from rlbench.dispatch.context import bringing_back, this_engine
from rlbench.errors import EngineError, StateError, nearest
from rlbench.strategies.flat.units import flat_units
from rlbench.strategies.memory import owners as memory
from rlbench.strategies.memory.device import RankDevice
from rlbench.strategies.memory.offloading import kept_on_host, need_movable
from rlbench.weights.memory import return_free_memory

PARTS = ("weights", "optimizer")
STATES = ("cuda", "cpu", "meta")
MEASURED_S = 0.25
"""So often at most a forward counts what is held: code of a trainer's or a user's tells nobody of its gradients."""
Beside = tuple[list[nn.Module], list[torch.optim.Optimizer]]


class Residency:
    """The states of one rank's parts. `materialize` fills released weights again; models and optimizers `beside` the
    module's are counted, but not moved."""

    def __init__(
        self,
        module: nn.Module,
        device: RankDevice,
        optimizers: Callable[[], list[torch.optim.Optimizer]],
        materialize: Callable[[], str],
        beside: Callable[[], Beside] = lambda: ([], []),
    ) -> None:
        self._module = module
        self._device = device
        self._optimizers = optimizers
        self._materialize = materialize
        self._beside = beside
        self.state = dict.fromkeys(PARTS, "cuda")
        self.torn: str | None = None  # what failed in the middle of replacing the state, and what mends it
        self._released: memory.Released = []
        self._held = self._own = dict.fromkeys(("weights", "gradients", "optimizer"), 0)
        self._resting: int | None = None
        self._measured = self._count_s = 0.0
        self._due = False
        module.register_forward_pre_hook(lambda *_: self._measure_if_due(), prepend=True)  # before FSDP gathers

    def need(self, *parts: str, whole: bool = True) -> None:
        """Refuse a call that needs `parts` on the device, naming the call that brings them back.

        `whole`: False for a call that replaces all of them, as what is torn does not matter then.
        """
        if whole and self.torn is not None:
            raise StateError(self.torn)
        for part in parts:
            if self.state[part] != "cuda":
                where = "released (meta)" if self.state[part] == "meta" else "offloaded (cpu)"
                raise StateError(
                    f"the {part} of {this_engine()} are not resident but {where}: {bringing_back(part)} then "
                    "call again."
                )

    def need_kept(self, *parts: str, whole: bool = True) -> None:
        """Refuse a call that reads `parts` wherever they are, when they were released; `whole` as of `need`."""
        self.need(*(part for part in parts if self.state[part] == "meta"), whole=whole)

    @contextmanager
    def replacing(self, by: str) -> Iterator[None]:
        """Around what replaces weights and optimizer: where it ends in the middle, nothing else is done with them."""
        try:
            yield
        except BaseException:
            self.torn = (
                f"the policy is torn: {by} ended in the middle of going back, so it is partly that and partly as "
                "before. session.restore(…) this or another snapshot first; where that fails too, end the rank's "
                "process and session.heal()"
            )
            raise
        self.torn = None

    def move(self, state: str, tags: list[str] | str | None) -> dict[str, Any]:
        """Bring parts (`tags`; None: all) into a state; return the states, bytes `freed` and `taken`, what is `lost`
        and where weights were `materialized_from`."""
        parts = [tags] if isinstance(tags, str) else list(PARTS if tags is None else tags)
        for part in parts:
            if part not in PARTS:
                raise EngineError(f"unknown tag {part!r}{nearest(part, PARTS)}; a train engine has {', '.join(PARTS)}.")
        if state not in STATES:
            raise EngineError(f"unknown state {state!r}{nearest(state, STATES)}; it is one of {', '.join(STATES)}.")
        if state == "cpu" and "weights" in parts and self._device.is_gpu:
            need_movable(self._module)
        done: dict[str, Any] = {"freed": 0, "taken": 0, "lost": [], "materialized_from": None}
        movers = {"weights": self._move_weights, "optimizer": self._move_optimizer}
        for part in parts:
            if state == "cpu" and self.state[part] == "meta":
                raise StateError(
                    f"the {part} of {this_engine()} are released (meta), so there is nothing to keep: "
                    f"{bringing_back(part)} first."
                )
            if state != self.state[part]:
                movers[part](state, done)
                self.state[part] = state
        self._device.release_cache()
        return_free_memory()
        return {**self.state, **done, **self._device.allocated()}

    def _move_weights(self, state: str, done: dict[str, Any]) -> None:
        on_gpu = self._device.is_gpu and not kept_on_host(self._module)
        if state == "meta":
            memory.own_storages(self._module)
            if memory.gradient_tensors(self._module):
                done["lost"].append("gradients waiting for a step")
            self._module.zero_grad(set_to_none=True)
            self._released = memory.release(memory.weight_tensors(self._module))
            done["freed"] += sum(size for _, size in self._released)
            done["lost"].append("trained weights that no checkpoint holds")
        elif state == "cpu" and on_gpu:
            done["freed"] += memory.nbytes(memory.weight_tensors(self._module))
            self._module.to("cpu")
        elif state == "cuda":
            done["taken"] += memory.regain(self._released)
            self._released = []
            if on_gpu and flat_units(self._module) is None:  # FSDP1's never left
                self._module.to(self._device.device)
            if self.state["weights"] == "meta":
                done["materialized_from"] = self._materialize()

    def _move_optimizer(self, state: str, done: dict[str, Any]) -> None:
        optimizers = self._optimizers()
        if state == "meta":
            freed = memory.nbytes(memory.optimizer_tensors(optimizers))
            for optimizer in optimizers:
                optimizer.state.clear()
            done["freed"] += freed
            if freed:
                done["lost"].append("optimizer state; it starts anew")
        elif self._device.is_gpu and not kept_on_host(self._module):
            device = torch.device("cpu") if state == "cpu" else self._device.device
            done["freed" if state == "cpu" else "taken"] += sum(memory.move_optimizer(o, device) for o in optimizers)

    def measure(self) -> None:
        """Count the bytes of every tensor on the device, by owner: after what may have changed them."""
        begin, before, late = time.monotonic(), sum(self._held.values()), self._due
        self._due = False
        (models, others), own = self._beside(), self._optimizers()
        self._own = self._held = self._bytes_of([self._module], own)
        if models or others:
            self._held = self._bytes_of([self._module, *models], [*own, *others])
        if late and self._resting is not None:  # what had changed before the pass is none of its activations
            self._resting += before - sum(self._held.values())
        self._measured = time.monotonic()
        self._count_s = self._measured - begin

    def measure_after(self, seconds: float, share: float = 1.0) -> None:
        """Count what a call that took so long may have changed: now, unless to count takes longer than that share of
        it. Then `settle` does, when somebody asks for it or a batch is computed."""
        self._due = share * seconds < self._count_s
        if not self._due:
            self.measure()

    def settle(self) -> None:
        """Count what the last call left for later; not beside another call."""
        if self._due:
            self.measure()

    def _bytes_of(self, models: list[nn.Module], optimizers: list[torch.optim.Optimizer]) -> dict[str, int]:
        device = self._device.device
        weights, gradients = memory.model_nbytes(models, device)
        held = memory.nbytes(memory.on_device(memory.optimizer_tensors(optimizers), device))
        return {"weights": weights, "gradients": gradients, "optimizer": held}

    def _measure_if_due(self) -> None:
        if time.monotonic() - self._measured > MEASURED_S:
            self.measure()

    @contextmanager
    def passing(self, settled: bool = True) -> Iterator[None]:
        """Count as activations what the process grows while a batch is computed: a host has no allocator to ask. What
        the last call left to be counted is counted first, unless not `settled`: a pass that holds nothing new."""
        if settled:
            self.settle()
        self._resting = self._device.allocated()["rss"] - sum(self._held.values())
        try:
            yield
        finally:
            self._resting = None

    def memory(self) -> dict[str, Any]:
        """Bytes by owner as they were last counted, what the process holds beside them now, and what `cpu` of each part
        would free. For any thread; walks no tensors."""
        held, own, process, resting = self._held, self._own, self._device.allocated(), self._resting
        if self._device.is_gpu:
            frees = {part: own[part] for part in PARTS}
            return {"device": "gpu", **held, **memory.beyond(held, self._device.device), **process, "frees": frees}
        rest = process["rss"] - sum(held.values())
        activations = 0 if resting is None else max(0, rest - resting)
        beyond = {"activations": activations, "other": max(0, rest - activations)}
        return {"device": "host", **held, **beyond, **process, "frees": dict.fromkeys(PARTS, 0)}
