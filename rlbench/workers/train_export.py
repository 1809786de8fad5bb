"""The trained model as a folder that transformers and vLLM load: weights under checkpoint names, config, tokenizer."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from rlbench.errors import CheckpointError

SHARD_BYTES = 5 << 30
NOT_COPIED = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack")
INDEX = "model.safetensors.index.json"


def write_model(place: Path, module: Any, tensors: Iterable[tuple[str, Tensor]], source: Path | None) -> dict[str, Any]:
    """Write the folder aside, then give it its name; consumes the iterator one tensor at a time.

    Args:
        place: must not exist, or be empty.
        module: where it is a transformers model its config is written too.
        tensors: full tensors under checkpoint names.
        source: the folder the model came from, for tokenizer, templates and generation settings; None: without.

    Returns:
        `path`, `bytes`, `files`.

    Raises:
        CheckpointError: no room; nothing is left at `place`.
    """
    aside = place.with_name(f".{place.name}.partial")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        aside.mkdir(parents=True)
        if source is not None:
            _copy_companions(source, aside)
        if hasattr(getattr(module, "config", None), "save_pretrained"):
            module.config.save_pretrained(aside)
        if getattr(module, "generation_config", None) is not None:
            module.generation_config.save_pretrained(aside)
        nbytes = _write_shards(aside, tensors)
        if place.exists():
            place.rmdir()
        os.rename(aside, place)
    except OSError as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise CheckpointError(f"{place} could not be written ({error}): make room, or export elsewhere") from error
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    return {"path": str(place), "bytes": nbytes, "files": sorted(p.name for p in place.iterdir())}


def _copy_companions(source: Path, aside: Path) -> None:
    """Tokenizer, chat template, generation settings, remote code: everything but weights and their index."""
    for path in source.iterdir():
        if path.is_file() and path.suffix not in NOT_COPIED and not path.name.endswith(".index.json"):
            shutil.copy(path, aside / path.name)


def _write_shards(aside: Path, tensors: Iterable[tuple[str, Tensor]]) -> int:
    shards: list[list[str]] = []
    pending: dict[str, Tensor] = {}
    size = total = 0
    for name, tensor in tensors:
        nbytes = tensor.numel() * tensor.element_size()
        if pending and size + nbytes > SHARD_BYTES:
            shards.append(_flush(aside, len(shards), pending))
            pending, size = {}, 0
        pending[name] = tensor.detach().to("cpu", copy=True).contiguous()
        size += nbytes
        total += nbytes
    shards.append(_flush(aside, len(shards), pending))
    _name_shards(aside, shards, total)
    return total


def _flush(aside: Path, number: int, tensors: dict[str, Tensor]) -> list[str]:
    save_file(tensors, aside / f"shard-{number}.safetensors", metadata={"format": "pt"})
    return list(tensors)


def _name_shards(aside: Path, shards: list[list[str]], total: int) -> None:
    """The names that transformers looks for; an index where there are several."""
    if len(shards) == 1:
        os.rename(aside / "shard-0.safetensors", aside / "model.safetensors")
        return
    where: dict[str, str] = {}
    for number, names in enumerate(shards):
        file = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        os.rename(aside / f"shard-{number}.safetensors", aside / file)
        where |= dict.fromkeys(names, file)
    (aside / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=1))
