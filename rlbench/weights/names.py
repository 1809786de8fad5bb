"""Names: what a module's weights are called in a checkpoint, what a checkpoint holds, and whether a sync
matches it.

transformers 5 names modules differently from checkpoints for some models; vLLM reads checkpoint names. A sync
that leaves a weight out or brings one nobody knows is refused before anything is touched: vLLM itself would
only log it.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from rlbench.errors import WeightSyncError, nearest

Shapes = Mapping[str, tuple[int, ...]]


def unique_parameters(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers by name, each storage once: of tied ones the name that registered
    first.

    Works on FSDP2-sharded modules (DTensors): the tie is the parameter object itself.
    """
    found: dict[str, torch.Tensor] = dict(module.named_parameters(remove_duplicate=True))
    persistent = module.state_dict(keep_vars=True)
    found.update({name: b for name, b in module.named_buffers(remove_duplicate=True) if name in persistent})
    return found


def to_checkpoint_names(module: torch.nn.Module, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Rename (and where the architecture asks for it split or merge) full tensors into what a checkpoint
    holds.

    A module that is not from transformers keeps its names. The tensors must be full, not sharded. A module
    that wraps a transformers model under a prefix must be given that model, with its names.
    """
    from transformers import PreTrainedModel
    from transformers.core_model_loading import revert_weight_conversion

    if not isinstance(module, PreTrainedModel):
        return state
    converted: dict[str, torch.Tensor] = revert_weight_conversion(_as_transformers_class(module), state)
    return converted


def transformers_class(module: torch.nn.Module) -> type[torch.nn.Module] | None:
    """The architecture of transformers that the module is of, by class or by inheritance; None for another."""
    return next((cls for cls in type(module).__mro__ if cls.__module__.startswith("transformers.models.")), None)


def _as_transformers_class(module: Any) -> Any:
    """The same module under its class of transformers, which alone is looked up for its names.

    A class of the user's own, or one that FSDP made, would be taken for an architecture transformers knows nothing of.
    """
    plain = transformers_class(module)
    if plain is None:
        return module
    alias = object.__new__(plain)
    alias.__dict__ = module.__dict__  # its parameters and submodules are the module's own
    return alias


def checkpoint_shapes(folder: str | Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes a checkpoint folder holds, from the headers alone (safetensors), or by mapping
    (`.bin`).

    Raises:
        WeightSyncError: the folder holds no checkpoint.
    """
    folder = Path(folder)
    shapes: dict[str, tuple[int, ...]] = {}
    tensors = _files(folder, "*.safetensors", "model.safetensors.index.json")
    for path in tensors:
        shapes.update(_safetensors_shapes(path))
    if not tensors:
        for path in _files(folder, "pytorch_model*.bin", "pytorch_model.bin.index.json"):
            loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            shapes.update({name: tuple(tensor.shape) for name, tensor in loaded.items()})
    if not shapes:
        raise WeightSyncError(
            f"{folder} holds no *.safetensors and no pytorch_model*.bin, so no weights to compare with"
        )
    return shapes


def check_names(sent: Shapes, expected: Shapes, tied: Iterable[str] = (), owner: str = "replica") -> None:
    """Refuse a sync whose names or shapes differ from what the receiver's checkpoint holds.

    Args:
        sent: shape by checkpoint name, as staged.
        expected: the same of the receiver's checkpoint.
        tied: names that may come or be left out, because another name carries the same weight
            (`lm_head.weight`).
        owner: what a message calls the receiver.

    Raises:
        WeightSyncError: naming unknown, missing and wrongly shaped weights (the first few of each).
    """
    optional = set(tied)
    unknown = sorted(set(sent) - set(expected) - optional)
    missing = sorted(set(expected) - set(sent) - optional)
    wrong = [
        f"{name} {tuple(sent[name])} instead of {tuple(expected[name])}"
        for name in sorted(set(sent) & set(expected))
        if tuple(sent[name]) != tuple(expected[name])
    ]
    complaints = []
    if unknown:
        complaints.append(f"the {owner} does not know {_some(unknown)}{nearest(unknown[0], missing or expected)}")
    if missing:
        complaints.append(f"the trainer did not send {_some(missing)}")
    if wrong:
        complaints.append(f"shapes differ: {_some(wrong)}")
    if complaints:
        raise WeightSyncError(
            f"weights do not match the {owner}'s model: {'; '.join(complaints)}. Build both engines from the "
            f"same checkpoint, or rename in postprocess_output_named_parameters. The {owner} keeps its old weights."
        )


def _some(names: list[str], shown: int = 3) -> str:
    rest = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + rest


def _files(folder: Path, pattern: str, index: str) -> list[Path]:
    """The files an index names (leftovers of another format may lie beside them), else all that match."""
    if (folder / index).is_file():
        held = json.loads((folder / index).read_text())["weight_map"].values()
        return sorted({folder / name for name in held})
    return sorted(p for p in folder.glob(pattern) if not p.name.startswith("consolidated"))


def _safetensors_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header: dict[str, Any] = json.loads(file.read(length))
    return {name: tuple(value["shape"]) for name, value in header.items() if name != "__metadata__"}
