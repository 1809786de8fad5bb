"""The bases every trained module inherits: what it is told about its rank, and the hooks it may define."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypedDict

import torch
from torch import Tensor, nn

from rlbench.errors import BuildError, EngineError, StateError
from rlbench.nn.lora import Adapted
from rlbench.nn.quantised import quantised_layers

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

Source = str | Mapping[str, Tensor] | Mapping[str, Callable[..., Any]]
"""A folder, a checkpoint file or a hub id; a state dict; or an initialiser for each parameter."""
MAKE_ON_META = "make it inside `with rlbench.nn.device('meta'):` (the same as accelerate's init_empty_weights())"
FRAMEWORKS = frozenset({"torch", "transformers", "transformers_modules", "rlbench", "peft", "accelerate"})
HOOKS = frozenset(
    {
        "on_weights_materialized",
        "materialization_source",
        "non_split_modules",
        "get_fsdp_wrap_policy",
        "preprocess_input_named_parameters",
        "postprocess_output_named_parameters",
        "forward",  # FSDP2 gathers parameters around self(...), so forward itself cannot be called
    }
)
ALWAYS = ("train", "eval")
REGISTER_PARAMETER = nn.Module.register_parameter
"""torch's own, which a context that makes modules on meta replaces."""


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

    Inherit from it first and from the architecture second. All hooks are optional but `materialization_source`.
    """

    _rank_context: RankContext | None = None

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
        """The rank's strategy (`FSDPV2Strategy`, `FSDP1Strategy`): optimizers, backward, step, offload."""
        if self._rank_context is None:
            raise StateError("self.strategy exists on the ranks only; build the engine first: engine.build().")
        return self._rank_context.strategy

    def stop_requested(self) -> bool:
        """True once somebody asked the running call to stop; a long method may look and return early."""
        return self._rank_context is not None and self._rank_context.stop_requested()

    def materialization_source(self) -> Source:
        """Say where the weights come from: a folder, a checkpoint file or a hub id; a dict of full tensors;
        initialisers.

        Called on every rank; an initialiser is called with the full, empty tensor to fill (or with nothing, and
        returns it).
        """
        raise BuildError(
            f"{type(self).__name__} does not say where its weights come from: define "
            "materialization_source(), returning a path, a dict of tensors or a dict of initialisers."
        )

    @property
    def left_to_source(self) -> frozenset[str]:
        """Names of parameters and buffers that snapshots and checkpoints leave out: of an adapted module the frozen
        base, which its source has."""
        if not Adapted.of(self):
            return frozenset()
        frozen = (name for name, parameter in self.named_parameters() if not parameter.requires_grad)
        packed = (f"{path}.{name}" for path, layer in quantised_layers(self).items() for name in layer._buffers)
        return frozenset((*frozen, *packed))

    @property
    def non_split_modules(self) -> set[type[nn.Module]]:
        """Types of the modules that are gathered and freed as one unit; their parameters are sharded together."""
        return set()

    def on_weights_materialized(self) -> None:
        """Run on every rank once the weights are there and sharded: the place for optimizer and processor.

        `self.optimizer` is what the policy verbs step: one, or a dict of several, as `{"muon": …, "adamw": …}`;
        `self.lr_scheduler`, one or a dict, is stepped after it.
        """

    def preprocess_input_named_parameters(self, name: str, param: Tensor) -> tuple[str, Tensor] | None:
        """Map one tensor of the source to a parameter of this module; None drops it."""
        return name, param

    def postprocess_output_named_parameters(
        self, name: str, param: DTensor, full_state_dict: Mapping[str, DTensor]
    ) -> tuple[str, Tensor] | None:
        """Map one parameter to what a replica or a checkpoint receives; None drops it.

        Runs on all ranks in the same order, so it may gather (`full_tensor()`) other entries.
        """
        return name, param.full_tensor()


class Fsdp2TrainModule(BaseTrainModule):
    """Base of a custom architecture trained with FSDP2: define `materialization_source` and `non_split_modules`."""


class FsdpTrainModule(BaseTrainModule):
    """Base of a custom architecture trained with FSDP1: define `materialization_source`, and `non_split_modules` or
    `get_fsdp_wrap_policy`.

    Its parameters are rows of numbers, of one dimension, between two passes: an optimizer may look at each number, not
    at the shape.
    """

    def get_fsdp_wrap_policy(self) -> Any:
        """Say which parts are units: a set of module classes, or a wrap policy as torch's FullyShardedDataParallel
        takes it (`auto_wrap_policy`); None: `non_split_modules`."""
        return None

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale the gradients of all ranks down to `max_norm` and return their norm before, as the method of torch's
        FullyShardedDataParallel does; collective."""
        return self.strategy.clip_grad_norm_(self, max_norm, norm_type)  # type: ignore[no-any-return]


def executor_for(cls: type, asked: str | None = None) -> str:
    """Return what holds modules of a class: as its base says, else as `asked` (None: FSDP2)."""
    own = {Fsdp2TrainModule: "fsdp2", FsdpTrainModule: "fsdp1"}
    said = next((executor for base, executor in own.items() if issubclass(cls, base)), None)
    if None not in (said, asked) and said != asked:
        base = next(one.__name__ for one in own if issubclass(cls, one))
        raise BuildError(
            f"executor={asked!r}, and {cls.__name__} inherits from {base}, which {said} holds: TrainEngine(module, "
            f"executor={said!r}), or another base"
        )
    return said or asked or "fsdp2"


def lead_forward(module: nn.Module, through: Callable[..., Any]) -> None:
    """Make `self(...)`, and `self.forward(...)`, compute `through(...)`, which comes back to the module's own forward:
    `module.forward.__wrapped__`."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        return through(*args, **kwargs)

    functools.update_wrapper(forward, module.forward)
    forward.led = True  # type: ignore[attr-defined]
    module.forward = forward


def guard_forward(module: nn.Module) -> None:
    """Make `self.forward(...)` on a sharded module say what to call instead: FSDP2 gathers in hooks of `self(...)`."""
    if hasattr(module.forward, "led"):
        return  # it gathers, too
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


# -- modules without weights: parameters on meta, buffers real, as no checkpoint holds them


def device(tag: str) -> AbstractContextManager[object]:
    """Return a context in which modules are made on `tag`; "meta" keeps buffers real."""
    if tag != "meta":
        return torch.device(tag)
    from accelerate import init_empty_weights

    return init_empty_weights(include_buffers=False)


def making_on_meta() -> bool:
    """True inside `device("meta")` or accelerate's `init_empty_weights()`, which patch `register_parameter`."""
    return "init_on_device" in getattr(nn.Module.register_parameter, "__qualname__", "")


@contextmanager
def with_memory() -> Iterator[None]:
    """Leave such a context for a while: what is made and filled inside is real."""
    patched = nn.Module.register_parameter
    if making_on_meta():
        nn.Module.register_parameter = REGISTER_PARAMETER  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = patched  # type: ignore[method-assign]


def check_module(module: object) -> None:
    """Refuse what cannot be shipped to the ranks."""
    if not isinstance(module, nn.Module):
        raise BuildError(f"a train engine takes a torch module, and this is {type(module).__name__}.")
    real = [name for name, parameter in module.named_parameters() if not parameter.is_meta]
    if real:
        raise BuildError(f"{type(module).__name__} is not on meta: {real[0]} holds memory here; {MAKE_ON_META}.")
    filled = {id(buffer) for layer in quantised_layers(module).values() for buffer in layer.buffers(recurse=False)}
    lost = [name for name, buffer in module.named_buffers() if buffer.is_meta and id(buffer) not in filled]
    if lost:
        raise BuildError(
            f"{type(module).__name__} lost buffers ({lost[0]}): torch.device('meta') empties them too; {MAKE_ON_META}."
        )


# -- which methods of a user's module an engine may call


class MethodInfo(TypedDict):
    """One callable method: enough for tab completion and help without the class."""

    name: str
    signature: str
    doc: str | None


def callable_methods(cls: type[nn.Module]) -> list[MethodInfo]:
    """Return the methods that the user's own classes define, in order of definition, then `train` and `eval`."""
    return [_describe(name, value) for name, value in _methods_of(cls).items()]


def callable_names(cls: type[nn.Module]) -> list[str]:
    """Return the names of `callable_methods`, at a tenth of the time."""
    return list(_methods_of(cls))


def _methods_of(cls: type[nn.Module]) -> dict[str, Any]:
    methods: dict[str, Any] = {}
    for owner in cls.__mro__:
        if owner.__module__.split(".")[0] in FRAMEWORKS or owner is object:
            continue
        for name, value in vars(owner).items():
            function = value.__func__ if isinstance(value, staticmethod | classmethod) else value
            if inspect.isfunction(function) and not name.startswith("_") and name not in HOOKS:
                methods.setdefault(name, value)
    for name in ALWAYS:
        methods.setdefault(name, getattr(cls, name))
    return methods


def _describe(name: str, value: Any) -> MethodInfo:
    function = value.__func__ if isinstance(value, staticmethod | classmethod) else value
    signature = inspect.signature(function)
    bound = 0 if isinstance(value, staticmethod) else 1  # self or cls
    signature = signature.replace(parameters=list(signature.parameters.values())[bound:])
    return MethodInfo(name=name, signature=str(signature), doc=inspect.getdoc(function))
