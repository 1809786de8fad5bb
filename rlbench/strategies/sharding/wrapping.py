"""Which parts of a model FSDP gathers and frees as one unit."""

from __future__ import annotations

from torch import nn

manual_transformer_cls_names_to_wrap = [
    "Embedding",
    "Qwen2VLDecoderLayer",
    "Qwen2VLVisionBlock",
    "Qwen2_5_VLVisionBlock",
    "Qwen2_5_VLDecoderLayer",
    "Qwen2DecoderLayer",
    "LlamaDecoderLayer",
    "DeepseekDecoderLayer",
]
"""Names of classes that are units in any model that does not name its own; append to it before `prepare_model`."""


def units(model: nn.Module) -> list[nn.Module]:
    """The modules to shard as units, inner ones first; `model` itself is not among them.

    A model of `rlbench.nn` says itself which types they are (`non_split_modules`). Any other: the classes named by
    its `_no_split_modules` (transformers) and by `manual_transformer_cls_names_to_wrap`. A part that shares a
    parameter with another one (a tied embedding) stays with the root: sharded apart, the two would no longer be one.
    """
    own = getattr(model, "non_split_modules", None)
    if own is not None:
        types = tuple(own)
        found = [part for part in model.modules() if types and isinstance(part, types)]
    else:
        names = {*(getattr(model, "_no_split_modules", None) or ()), *manual_transformer_cls_names_to_wrap}
        found = [part for part in model.modules() if type(part).__name__ in names]
    shared = _shared_parameters(model)
    apart = [part for part in found if part is not model and not _holds_one_of(part, shared)]
    return list(reversed(apart))  # modules() gives parents first


def _shared_parameters(model: nn.Module) -> dict[int, int]:
    """How many modules hold each parameter that more than one holds, by the parameter's identity."""
    holders: dict[int, int] = {}
    for part in model.modules():
        for parameter in part._parameters.values():
            if parameter is not None:
                holders[id(parameter)] = holders.get(id(parameter), 0) + 1
    return {key: count for key, count in holders.items() if count > 1}


def _holds_one_of(part: nn.Module, shared: dict[int, int]) -> bool:
    """Whether `part` holds a shared parameter that a module outside it holds too."""
    inside = _shared_parameters(part)
    held = {id(parameter) for parameter in part.parameters()}
    return any(key in held and inside.get(key, 1) < count for key, count in shared.items())
