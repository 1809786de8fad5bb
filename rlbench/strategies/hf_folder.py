"""A trained model as a folder that transformers loads, written aside and put in place file by file."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rlbench.errors import CheckpointError

WEIGHT_FILES = re.compile(r"(model|pytorch_model|adapter_model)[\w.-]*\.(safetensors|bin)(\.index\.json)?")


def transformers_model(model: nn.Module) -> nn.Module:
    """The model to save: itself, or the one a wrapper holds as `model`.

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
    """The state dict whole in host memory where `keep` is set, tied tensors once; collective, a tensor at a time."""
    whole: dict[int, Tensor] = {}
    for tensor in model.state_dict(keep_vars=True).values():
        if id(tensor) not in whole:
            full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            whole[id(tensor)] = full.detach().to("cpu") if keep else full.new_empty(0)
    if not keep:
        return {}
    return {name: whole[id(tensor)] for name, tensor in model.state_dict(keep_vars=True).items()}


def write(model: nn.Module, state: dict[str, Tensor], tokenizer: Any, place: Path, kwargs: dict[str, Any]) -> None:
    """Write the folder; files of an earlier save are replaced by the new ones, and none of its weights stay behind.

    Raises:
        CheckpointError: no room, or no right to write; what was there is as it was.
    """
    aside = place.with_name(f".{place.name}.partial")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        aside.mkdir(parents=True)
        model.save_pretrained(aside, state_dict=state, **kwargs)
        _name_architecture(model, aside / "config.json")
        if tokenizer is not None:
            tokenizer.save_pretrained(aside)
        _move(aside, place)
    except OSError as error:
        raise CheckpointError(f"{place} could not be written ({error}): make room, or save elsewhere.") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _move(aside: Path, place: Path) -> None:
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
    held = json.loads(config.read_text())
    if own is not None and held.get("architectures") != [own.__name__] and not held.get("auto_map"):
        config.write_text(json.dumps(held | {"architectures": [own.__name__]}, indent=2) + "\n")
