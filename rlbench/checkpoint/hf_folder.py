"""The one exporter of a trained model as a folder that transformers and vLLM load, written aside and put in place."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from rlbench.checkpoint.folder import writing
from rlbench.errors import CheckpointError
from rlbench.results import ExportedModel

SHARD_BYTES = 5 << 30
NOT_COPIED = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack")
INDEX = "model.safetensors.index.json"
WEIGHT_FILES = re.compile(r"(model|pytorch_model|adapter_model)[\w.-]*\.(safetensors|bin)(\.index\.json)?")


def write_folder(place: Path, fill: Callable[[Path], int]) -> ExportedModel:
    """Write a model's folder by `fill`, which returns the bytes of the weights; none of an earlier one stay."""
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


def fill_streamed(folder: Path, module: Any, tensors: Iterable[tuple[str, Tensor]], source: Path | None) -> int:
    """Fill a folder from full tensors under checkpoint names, the module's config, and the other files of `source`."""
    for path in source.iterdir() if source is not None else ():
        if path.is_file() and path.suffix not in NOT_COPIED and not path.name.endswith(".index.json"):
            shutil.copy(path, folder / path.name)
    for settings in (getattr(module, "config", None), getattr(module, "generation_config", None)):
        if settings is not None and hasattr(settings, "save_pretrained"):
            settings.save_pretrained(folder)
    return _write_shards(folder, tensors)


def fill_adapter(folder: Path, config: Any, base: str, tensors: Iterable[tuple[str, Tensor]]) -> int:
    """Fill a folder as peft does, from an adapter's full tensors and its `LoraConfig`, for the model called `base`."""
    held = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors}
    save_file(held, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    replace(config, base_model_name_or_path=base, inference_mode=True, task_type="CAUSAL_LM").save_pretrained(folder)
    return sum(tensor.nbytes for tensor in held.values())


def fill_by_transformers(
    folder: Path, model: nn.Module, state: dict[str, Tensor], tokenizer: Any, options: dict[str, Any]
) -> int:
    """Fill a folder by the model's own `save_pretrained`; `options` are its arguments."""
    saver: Any = model
    saver.save_pretrained(folder, state_dict=state, **options)
    _name_architecture(model, folder / "config.json")
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return sum(tensor.nbytes for tensor in state.values())


def transformers_model(model: nn.Module) -> nn.Module:
    """Return the model to save: itself, or the one a wrapper holds as `model`."""
    for candidate in (model, getattr(model, "model", None)):
        if isinstance(candidate, nn.Module) and hasattr(candidate, "save_pretrained"):
            return candidate
    raise CheckpointError(
        f"{type(model).__name__} is no transformers model, so no Hugging Face folder can be made of it; "
        "strategy.save_ckpt(model, folder) keeps it."
    )


@torch.no_grad()
def gather_state(model: nn.Module, keep: bool, gathered: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """Return the state dict whole, as `gathered` makes a tensor, in host memory where `keep` is set; collective, tied
    ones once."""
    state = model.state_dict(keep_vars=True)
    whole: dict[int, Tensor] = {}
    for tensor in {id(tensor): tensor for tensor in state.values()}.values():
        full = gathered(tensor)
        whole[id(tensor)] = full.detach().to("cpu") if keep else full.new_empty(0)
    return {name: whole[id(tensor)] for name, tensor in state.items()} if keep else {}


def _move(aside: Path, place: Path) -> None:
    with contextlib.suppress(OSError):
        place.rmdir()  # an empty one; not a link to one
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
    own = next(([c.__name__] for c in type(model).__mro__ if c.__module__.startswith("transformers.")), None)
    settings = json.loads(config.read_text()) if config.is_file() else {}
    if settings and own and settings.get("architectures") != own and not settings.get("auto_map"):
        config.write_text(json.dumps(settings | {"architectures": own}, indent=2) + "\n")


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
