"""Where a rank's weights and optimizer state are, and moving them: on the device, in host memory, released.

On a host without a GPU the device is host memory: "cuda" and "cpu" hold the same bytes there, and "cpu"
only bars training; "meta" gives the memory back. What is reported is measured from the tensors' storages
and the process.
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from rlbench.dispatch.context import bringing_back, this_engine
from rlbench.errors import EngineError, StateError, nearest
from rlbench.strategies.memory import owners as memory
from rlbench.strategies.memory.device import RankDevice
from rlbench.strategies.surface.memory_side import kept_on_host

PARTS = ("weights", "optimizer")
STATES = ("cuda", "cpu", "meta")
MEASURED_S = 0.25
"""So often at most a forward counts what is held: code of a trainer's or a user's tells nobody of its gradients."""
Beside = tuple[list[nn.Module], list[torch.optim.Optimizer]]


class Residency:
    """The states of one rank's parts.

    Args:
        module: sharded, with its weights.
        device: of the rank.
        optimizers: gives the optimizers there are now.
        materialize: fills the weights again after they were released; returns where they came from.
        beside: gives the models and optimizers that the rank holds beside them, which are counted, but not moved.
    """

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
        self._measured = 0.0
        module.register_forward_pre_hook(lambda *_: self._measure_if_due(), prepend=True)  # before FSDP gathers

    def need(self, *parts: str, whole: bool = True) -> None:
        """Refuse a call that needs `parts` on the device.

        Args:
            whole: False for a call that replaces all of them, as what is torn does not matter then.

        Raises:
            StateError: naming the call that brings them back, or makes them whole.
        """
        if whole and self.torn is not None:
            raise StateError(self.torn)
        for part in parts:
            if self.state[part] != "cuda":
                raise StateError(
                    f"the {part} of {this_engine()} are not resident but {self._said(part)}: {bringing_back(part)} "
                    "then call again."
                )

    def need_kept(self, *parts: str, whole: bool = True) -> None:
        """Refuse a call that reads `parts` wherever they are, when they were released; `whole` as of `need`.

        Raises:
            StateError: naming the call that brings them back, or makes them whole.
        """
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

    def _said(self, part: str) -> str:
        return "released (meta)" if self.state[part] == "meta" else "offloaded (cpu)"

    def move(self, state: str, tags: list[str] | str | None) -> dict[str, Any]:
        """Bring parts into a state; no collective.

        Args:
            state: "cuda", "cpu" or "meta".
            tags: parts to move; None for all.

        Returns:
            The states, `freed` and `taken` bytes, `rss` of the process, `lost` (what cannot come back) and
            `materialized_from` (where weights came from, if they were read again).
        """
        parts = [tags] if isinstance(tags, str) else list(PARTS if tags is None else tags)
        for part in parts:
            if part not in PARTS:
                raise EngineError(f"unknown tag {part!r}{nearest(part, PARTS)}; a train engine has {', '.join(PARTS)}.")
        if state not in STATES:
            raise EngineError(f"unknown state {state!r}{nearest(state, STATES)}; it is one of {', '.join(STATES)}.")
        done: dict[str, Any] = {"freed": 0, "taken": 0, "lost": [], "materialized_from": None}
        for part in parts:
            if state == "cpu" and self.state[part] == "meta":
                raise StateError(
                    f"the {part} of {this_engine()} are released (meta), so there is nothing to keep: "
                    f"{bringing_back(part)} first."
                )
            if state != self.state[part]:
                getattr(self, f"_{part}_to_{state}")(done)
                self.state[part] = state
        self._device.release_cache()
        trim_heap()
        return {**self.state, **done, **self._device.allocated()}

    def _weights_to_meta(self, done: dict[str, Any]) -> None:
        if memory.gradient_tensors(self._module):
            done["lost"].append("gradients waiting for a step")
        self._module.zero_grad(set_to_none=True)
        memory.own_storages(self._module)
        self._released = memory.release(memory.weight_tensors(self._module))
        done["freed"] += sum(size for _, size in self._released)
        done["lost"].append("trained weights that no checkpoint holds")

    def _weights_to_cpu(self, done: dict[str, Any]) -> None:
        if self._device.is_gpu and not kept_on_host(self._module):
            before = memory.nbytes(memory.weight_tensors(self._module))
            self._module.to("cpu")
            done["freed"] += before

    def _weights_to_cuda(self, done: dict[str, Any]) -> None:
        was_released = self.state["weights"] == "meta"
        if was_released:
            done["taken"] += memory.regain(self._released)
            self._released = []
        if self._device.is_gpu and not kept_on_host(self._module):
            self._module.to(self._device.device)
        if was_released:
            done["materialized_from"] = self._materialize()

    def _optimizer_to_meta(self, done: dict[str, Any]) -> None:
        freed = memory.nbytes(memory.optimizer_tensors(self._optimizers()))
        for optimizer in self._optimizers():
            optimizer.state.clear()
        done["freed"] += freed
        if freed:
            done["lost"].append("optimizer state; it starts anew")

    def _optimizer_to_cpu(self, done: dict[str, Any]) -> None:
        if self._device.is_gpu and not kept_on_host(self._module):
            done["freed"] += sum(memory.move_optimizer(o, torch.device("cpu")) for o in self._optimizers())

    def _optimizer_to_cuda(self, done: dict[str, Any]) -> None:
        if self._device.is_gpu and not kept_on_host(self._module):
            done["taken"] += sum(memory.move_optimizer(o, self._device.device) for o in self._optimizers())

    def measure(self) -> None:
        """Count the bytes of every tensor on the device, by owner: after what may have changed them."""
        models, optimizers = self._beside()
        self._own = self._bytes_of([self._module], self._optimizers())
        self._held = self._bytes_of([self._module, *models], [*self._optimizers(), *optimizers])
        self._measured = time.monotonic()

    def _bytes_of(self, models: list[nn.Module], optimizers: list[torch.optim.Optimizer]) -> dict[str, int]:
        tensors = {
            "weights": [tensor for model in models for tensor in memory.weight_tensors(model)],
            "gradients": [tensor for model in models for tensor in memory.gradient_tensors(model)],
            "optimizer": memory.optimizer_tensors(optimizers),
        }
        device = self._device.device
        return {owner: memory.nbytes(memory.on_device(own, device)) for owner, own in tensors.items()}

    def _measure_if_due(self) -> None:
        if time.monotonic() - self._measured > MEASURED_S:
            self.measure()

    @contextmanager
    def passing(self) -> Iterator[None]:
        """While a batch is computed, what the process grows beyond what is counted is activations.

        That is all a host can tell, which has no allocator to ask: it holds whatever else the pass takes, too.
        """
        self._resting = self._device.allocated()["rss"] - sum(self._held.values())
        try:
            yield
        finally:
            self._resting = None

    def memory(self) -> dict[str, Any]:
        """Bytes by owner on the `device` ("host" or "gpu") as they were last counted, and what the process holds beside
        them now; `frees`: what `cpu` of each part would free. For any thread; walks no tensors.
        """
        held, own, process, resting = self._held, self._own, self._device.allocated(), self._resting
        frees = {part: own[part] if self._device.is_gpu else 0 for part in PARTS}
        if self._device.is_gpu:
            beyond = memory.beyond(held, self._device.device)
        else:
            grown = 0 if resting is None else process["rss"] - resting - sum(held.values())
            activations = max(0, grown)
            beyond = {"activations": activations, "other": max(0, process["rss"] - sum(held.values()) - activations)}
        device = "gpu" if self._device.is_gpu else "host"
        return {"device": device, **held, **beyond, **process, "frees": frees}


def trim_heap() -> None:
    """Hand freed small blocks back to the system; glibc keeps them otherwise."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
