"""The one exporter of a trained model as a folder that transformers and vLLM load, written aside and put in place."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rlbench.checkpoint.folder import writing
from rlbench.errors import CheckpointError
from rlbench.results import ExportedModel

SHARD_BYTES = 5 << 30
NOT_COPIED = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack")
INDEX = "model.safetensors.index.json"
WEIGHT_FILES = re.compile(r"(model|pytorch_model|adapter_model)[\w.-]*\.(safetensors|bin)(\.index\.json)?")


def write_folder(place: Path, fill: Callable[[Path], int]) -> ExportedModel:
    """Write a model's folder; files of an earlier one are replaced, and none of its weights stay behind.

    Args:
        fill: writes all files into a folder and returns the bytes of the weights; `streamed` or `by_transformers`.

    Raises:
        CheckpointError: no room, or no right to write; what was there is as it was.
    """
    aside = place.with_name(f".{place.name}.partial")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        with writing(place):
            aside.mkdir(parents=True)
            nbytes = fill(aside)
            _move(aside, place)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return ExportedModel(str(place), nbytes, tuple(sorted(p.name for p in place.iterdir())))


def streamed(module: Any, tensors: Iterable[tuple[str, Tensor]], source: Path | None) -> Callable[[Path], int]:
    """Fill a folder from full tensors under checkpoint names, of which few are held at a time.

    Args:
        module: where it is a transformers model its config is written too.
        source: the folder the model came from, for tokenizer, templates and generation settings; None: without.
    """

    def fill(aside: Path) -> int:
        for path in source.iterdir() if source is not None else ():
            if path.is_file() and path.suffix not in NOT_COPIED and not path.name.endswith(".index.json"):
                shutil.copy(path, aside / path.name)
        for settings in (getattr(module, "config", None), getattr(module, "generation_config", None)):
            if settings is not None and hasattr(settings, "save_pretrained"):
                settings.save_pretrained(aside)
        return _write_shards(aside, tensors)

    return fill


def by_transformers(
    model: nn.Module, state: dict[str, Tensor], tokenizer: Any, options: dict[str, Any]
) -> Callable[[Path], int]:
    """Fill a folder by the model's own `save_pretrained`; `options` are its arguments."""

    def fill(aside: Path) -> int:
        saver: Any = model
        saver.save_pretrained(aside, state_dict=state, **options)
        _name_architecture(model, aside / "config.json")
        if tokenizer is not None:
            tokenizer.save_pretrained(aside)
        return sum(tensor.nbytes for tensor in state.values())

    return fill


def transformers_model(model: nn.Module) -> nn.Module:
    """Return the model to save: itself, or the one a wrapper holds as `model`.

    Raises:
        CheckpointError: neither can be saved for transformers.
    """
    for candidate in (model, getattr(model, "model", None)):
        if isinstance(candidate, nn.Module) and hasattr(candidate, "save_pretrained"):
            return candidate
    raise CheckpointError(
        f"{type(model).__name__} is no transformers model, so no Hugging Face folder can be made of it; "
        "strategy.save_ckpt(model, folder) keeps it."
    )


@torch.no_grad()
def gather_state(model: nn.Module, keep: bool) -> dict[str, Tensor]:
    """Return the state dict whole in host memory where `keep` is set; collective, a tensor at a time.

    Tied tensors are gathered once.
    """
    whole: dict[int, Tensor] = {}
    for tensor in model.state_dict(keep_vars=True).values():
        if id(tensor) not in whole:
            full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            whole[id(tensor)] = full.detach().to("cpu") if keep else full.new_empty(0)
    if not keep:
        return {}
    return {name: whole[id(tensor)] for name, tensor in model.state_dict(keep_vars=True).items()}


def _move(aside: Path, place: Path) -> None:
    with contextlib.suppress(OSError):
        place.rmdir()  # an empty one
    if not place.exists():
        os.rename(aside, place)
        return
    new = {path.relative_to(aside) for path in aside.rglob("*") if path.is_file()}
    for old in place.iterdir():
        if old.is_file() and WEIGHT_FILES.fullmatch(old.name) and old.relative_to(place) not in new:
            old.unlink()  # transformers would load it beside, or instead of, the new ones
    for name in sorted(new):
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        os.replace(aside / name, place / name)


def _name_architecture(model: nn.Module, config: Path) -> None:
    """Name transformers' class, not the user's subclass of it, which nobody else could load."""
    if not config.is_file():
        return
    own = next((c for c in type(model).__mro__ if c.__module__.startswith("transformers.")), None)
    settings = json.loads(config.read_text())
    if own is not None and settings.get("architectures") != [own.__name__] and not settings.get("auto_map"):
        config.write_text(json.dumps(settings | {"architectures": [own.__name__]}, indent=2) + "\n")


def _write_shards(aside: Path, tensors: Iterable[tuple[str, Tensor]]) -> int:
    """Write safetensors files under the names that transformers looks for, and an index where there are several."""
    shards: list[list[str]] = []
    pending: dict[str, Tensor] = {}
    size = total = 0

    def flush() -> None:
        save_file(pending, aside / f"shard-{len(shards)}.safetensors", metadata={"format": "pt"})
        shards.append(list(pending))
        pending.clear()

    for name, tensor in tensors:
        if pending and size + tensor.nbytes > SHARD_BYTES:
            flush()
            size = 0
        pending[name] = tensor.detach().to("cpu", copy=True).contiguous()
        size += tensor.nbytes
        total += tensor.nbytes
    flush()
    if len(shards) == 1:
        os.rename(aside / "shard-0.safetensors", aside / "model.safetensors")
        return total
    files: dict[str, str] = {}
    for number, names in enumerate(shards):
        file = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        os.rename(aside / f"shard-{number}.safetensors", aside / file)
        files |= dict.fromkeys(names, file)
    (aside / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": files}, indent=1))
    return total
