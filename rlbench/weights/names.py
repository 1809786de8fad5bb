"""Names: what a module's weights are called in a checkpoint, what a checkpoint holds, and whether a sync matches it.

transformers 5 names some modules otherwise than checkpoints, whose names vLLM reads; it only logs what does not match.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from rlbench.errors import WeightSyncError, nearest, some

Shapes = Mapping[str, tuple[int, ...]]


def unique_parameters(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters and persistent buffers by name; a tied one by the name that registered first."""
    persistent = module.state_dict(keep_vars=True)
    buffers = {name: b for name, b in module.named_buffers(remove_duplicate=True) if name in persistent}
    return {**dict(module.named_parameters(remove_duplicate=True)), **buffers}


def to_checkpoint_names(module: torch.nn.Module, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Rename (and where the architecture asks for it split or merge) full tensors into what a checkpoint holds.

    transformers looks an architecture up by its class: one of the user's own, or one that FSDP made, it would not know.
    """
    from transformers import PreTrainedModel
    from transformers.core_model_loading import revert_weight_conversion

    if not isinstance(module, PreTrainedModel):
        return state
    plain: Any = module
    if (known := transformers_class(module)) is not None:
        plain = object.__new__(known)
        plain.__dict__ = module.__dict__  # its parameters and submodules are the module's own
    found = revert_weight_conversion(plain, state)
    if getattr(module.config, "model_type", None) == "qwen2_audio":
        found = {once(name): tensor for name, tensor in found.items()}
    return found


def once(name: str) -> str:
    """Return a name of Qwen2-Audio's as checkpoints have it. transformers (5.19) undoes one renaming twice, as that of
    the whole model and of its base, and so do the files that it saves."""
    return name.replace("language_model.model.model.", "language_model.model.")


def transformers_class(module: torch.nn.Module) -> type[torch.nn.Module] | None:
    """Return the architecture of transformers that the module is of, itself or by inheritance; None for another."""
    return next((cls for cls in type(module).__mro__ if cls.__module__.startswith("transformers.models.")), None)


def weight_files(folder: Path) -> list[Path]:
    """Return a checkpoint's files: those its index names (leftovers may lie beside them), else all."""
    for whole in ("model.safetensors", "pytorch_model.bin"):
        if (index := folder / f"{whole}.index.json").is_file():
            return sorted({folder / name for name in json.loads(index.read_text())["weight_map"].values()})
    for whole in ("model.safetensors", "pytorch_model.bin"):
        if (folder / whole).is_file():
            return [folder / whole]
    several = [sorted(folder.glob(pattern)) for pattern in ("*.safetensors", "pytorch_model*.bin")]
    return next(([p for p in paths if not p.name.startswith("consolidated")] for paths in several if paths), [])


def checkpoint_shapes(folder: str | Path) -> dict[str, tuple[int, ...]]:
    """Return names and shapes a checkpoint folder holds; no tensor is read."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path in weight_files(Path(folder)):
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt") as file:
                shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in list(file.keys())}
        else:
            loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            shapes |= {name: tuple(tensor.shape) for name, tensor in loaded.items()}
    if not shapes:
        raise WeightSyncError(
            f"{folder} holds no *.safetensors and no pytorch_model*.bin, so no weights to compare with"
        )
    return shapes


def check_adapter(sent: Shapes, expected: Shapes) -> None:
    """Refuse an adapter, by peft's names, whose layers are not those of the receiver's checkpoint."""
    for name, shape in sent.items():
        layer, _, kind = name.removeprefix("base_model.model.").removesuffix(".weight").rpartition(".")
        base = expected.get(f"{layer}.weight")
        if base is None or (shape[1] != base[1] if kind == "lora_A" else shape[0] != base[0]):
            held = "none" if base is None else f"one of shape {tuple(base)}"
            raise WeightSyncError(
                f"the adapter is of another base: it has {kind} {tuple(shape)} on {layer}, the replica's checkpoint "
                f"has {held} there. Build both engines from the same checkpoint. The replica keeps what it holds."
            )


def check_names(sent: Shapes, expected: Shapes, tied: Iterable[str] = (), owner: str = "replica") -> None:
    """Refuse names or shapes that differ from what the receiver's checkpoint holds; `tied` ones may be left out."""
    unknown = sorted(set(sent) - set(expected) - set(tied))
    missing = sorted(set(expected) - set(sent) - set(tied))
    wrong = [
        f"{name} {tuple(sent[name])} instead of {tuple(expected[name])}"
        for name in sorted(set(sent) & set(expected))
        if tuple(sent[name]) != tuple(expected[name])
    ]
    complaints = []
    if unknown:
        complaints.append(f"the {owner} does not know {some(unknown)}{nearest(unknown[0], missing or expected)}")
    if missing:
        complaints.append(f"the trainer did not send {some(missing)}")
    if wrong:
        complaints.append(f"shapes differ: {some(wrong)}")
    if complaints:
        raise WeightSyncError(
            f"weights do not match the {owner}'s model: {'; '.join(complaints)}. Build both engines from the "
            f"same checkpoint, or rename in postprocess_output_named_parameters. The {owner} keeps its old weights."
        )
