"""The bases every trained module inherits: what it is told about its rank, and the hooks it may define."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rlbench.errors import BuildError, EngineError, StateError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

Source = str | Mapping[str, Tensor] | Mapping[str, Callable[..., Any]]
"""A folder, a checkpoint file or a hub id; a state dict; or an initialiser for each parameter."""


@dataclass(frozen=True)
class RankContext:
    """What a module is told when it is built on a rank."""

    rank: int
    world_size: int
    device: torch.device
    strategy: Any
    stop_requested: Callable[[], bool]


class BaseTrainModule(nn.Module):
    """A torch module whose methods an engine runs on its ranks.

    Inherit from it first and from the architecture second. There is no constructor of its own. All hooks are
    optional but `materialization_source`, which the Hugging Face bases provide.
    """

    _rank_context: RankContext | None = None

    # -- what a method can ask -------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """The rank's device; before the build, where the parameters are."""
        if self._rank_context is not None:
            return self._rank_context.device
        return next((parameter.device for parameter in self.parameters()), torch.device("cpu"))

    @property
    def rank(self) -> int:
        """Rank of this copy; 0 outside an engine."""
        return 0 if self._rank_context is None else self._rank_context.rank

    @property
    def world_size(self) -> int:
        """Number of ranks; 1 outside an engine."""
        return 1 if self._rank_context is None else self._rank_context.world_size

    @property
    def strategy(self) -> Any:
        """The rank's strategy (`FSDPV2Strategy`): optimizers, backward, step, offload."""
        if self._rank_context is None:
            raise StateError("self.strategy exists on the ranks only; build the engine first: engine.build().")
        return self._rank_context.strategy

    def stop_requested(self) -> bool:
        """True once somebody asked the running call to stop; a long method may look and return early."""
        return self._rank_context is not None and self._rank_context.stop_requested()

    # -- hooks -----------------------------------------------------------------------------------------------

    def materialization_source(self) -> Source:
        """Say where the weights come from; called on every rank.

        A folder, a checkpoint file (.safetensors, .bin, .pt) or a hub id; a dict of full tensors; or a dict of
        initialisers: each is called with the full, empty tensor to fill (or with nothing, and returns it).
        """
        raise BuildError(
            f"{type(self).__name__} does not say where its weights come from: define "
            "materialization_source(), returning a path, a dict of tensors or a dict of initialisers."
        )

    @property
    def non_split_modules(self) -> set[type[nn.Module]]:
        """Types of the modules that are gathered and freed as one unit; their parameters are sharded
        together."""
        return set()

    def on_weights_materialized(self) -> None:
        """Run on every rank once the weights are there and sharded: the place for optimizer and processor.

        `self.optimizer` is what the policy verbs step: one, or a dict of several that are stepped together, as
        `{"muon": …, "adamw": …}`. `self.lr_scheduler`, one or a dict, is stepped after it.
        """

    def preprocess_input_named_parameters(self, name: str, param: Tensor) -> tuple[str, Tensor] | None:
        """Map one tensor of the source to a parameter of this module; None drops it."""
        return name, param

    def postprocess_output_named_parameters(
        self, name: str, param: DTensor, full_state_dict: Mapping[str, DTensor]
    ) -> tuple[str, Tensor] | None:
        """Map one parameter to what a replica or a checkpoint receives; None drops it.

        Runs on all ranks in the same order, so it may gather (`full_tensor()`) other entries of
        `full_state_dict`.
        """
        return name, param.full_tensor()


class Fsdp2TrainModule(BaseTrainModule):
    """Base of a custom architecture trained with FSDP2. Define `materialization_source` and
    `non_split_modules`."""


def guard_forward(module: nn.Module) -> None:
    """Make `self.forward(...)` on a sharded module say what to call instead.

    FSDP2 gathers the parameters in hooks around `self(...)`; a direct `forward` would meet sharded ones.
    """
    inside = [0]

    def enter(*_: Any) -> None:
        inside[0] += 1

    def leave(*_: Any) -> None:
        inside[0] -= 1

    def forward(*args: Any, **kwargs: Any) -> Any:
        if inside[0] == 0:
            raise EngineError(
                "self.forward(...) skips the gathering of sharded parameters; call self(...) with the same arguments."
            )
        return forward.__wrapped__(*args, **kwargs)  # type: ignore[attr-defined]

    module.register_forward_pre_hook(enter)
    module.register_forward_hook(leave, always_call=True)
    functools.update_wrapper(forward, module.forward)
    module.forward = forward


def renew_forward(module: nn.Module) -> None:
    """The guarded module's class is another one: call that one's `forward` from now on."""
    guard = vars(module)["forward"]
    if getattr(guard.__wrapped__, "__self__", None) is module:  # the class's own, not one put on the instance
        cls: Any = type(module)
        functools.update_wrapper(guard, cls.forward.__get__(module))
