"""Which methods of a user's module an engine may call, as data that a kernel without the class can hold."""

from __future__ import annotations

import inspect
from typing import Any, TypedDict

from torch import nn

FRAMEWORKS = frozenset({"torch", "transformers", "transformers_modules", "rlbench", "peft", "accelerate"})
HOOKS = frozenset(
    {
        "on_weights_materialized",
        "materialization_source",
        "non_split_modules",
        "preprocess_input_named_parameters",
        "postprocess_output_named_parameters",
        "forward",  # FSDP2 gathers parameters around self(...), so forward itself cannot be called
    }
)
ALWAYS = ("train", "eval")


class MethodInfo(TypedDict):
    """One callable method: enough for tab completion and help without the class."""

    name: str
    signature: str
    doc: str | None


def callable_methods(cls: type[nn.Module]) -> list[MethodInfo]:
    """Return the methods that the user's own classes define, in order of definition, then `train` and `eval`.

    Frameworks' classes, names with a leading underscore, hooks and `forward` do not count.
    """
    found: dict[str, Any] = {}
    for owner in cls.__mro__:
        if owner.__module__.split(".")[0] in FRAMEWORKS or owner is object:
            continue
        for name, value in vars(owner).items():
            function = value.__func__ if isinstance(value, staticmethod | classmethod) else value
            if inspect.isfunction(function) and not name.startswith("_") and name not in HOOKS:
                found.setdefault(name, value)
    for name in ALWAYS:
        found.setdefault(name, getattr(cls, name))
    return [_describe(name, value) for name, value in found.items()]


def _describe(name: str, value: Any) -> MethodInfo:
    static = isinstance(value, staticmethod)
    function = value.__func__ if isinstance(value, staticmethod | classmethod) else value
    signature = inspect.signature(function)
    parameters = list(signature.parameters.values())
    if not static and parameters:  # drop self or cls
        signature = signature.replace(parameters=parameters[1:])
    return MethodInfo(name=name, signature=str(signature), doc=inspect.getdoc(function))
