"""Where weights come from, read one full tensor at a time: folders, files, the hub, dicts, initialisers."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rlbench.errors import BuildError
from rlbench.nn.huggingface import check_path

WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth")


@dataclass(frozen=True)
class TensorSource:
    """Full tensors by name. `read` may be lazy; `label` says in a message where they come from, and is a path unless
    they are `in_memory`."""

    label: str
    names: tuple[str, ...]
    read: Callable[[str], Tensor]
    in_memory: bool = False


def open_source(source: Any, shapes: Mapping[str, tuple[int, ...]], revision: str | None, seed: int) -> TensorSource:
    """Open what a module's `materialization_source()` returned.

    Args:
        source: path, hub id, dict of tensors, dict of initialisers, or one that is open already.
        shapes: full shape of each parameter, for the initialisers.
        revision: of a hub id.
        seed: of the initialisers; the same full tensor is drawn on every rank.

    Raises:
        BuildError: nothing there, or something that is no source.
    """
    if isinstance(source, TensorSource):
        return source
    if isinstance(source, Mapping):
        return _from_mapping(source, shapes, seed)
    if not isinstance(source, str | Path):
        raise BuildError(
            f"materialization_source() returned {type(source).__name__}; it must be a path, a dict of "
            "tensors or a dict of initialisers."
        )
    path = locate(str(source), revision)
    if path.is_dir():
        return _from_folder(path)
    return _from_files(str(path), [path])


def locate(source: str, revision: str | None = None) -> Path:
    """Return the local folder or file of a path or hub id, downloading a model of the hub when it is not
    cached.

    Raises:
        BuildError: no such path, or the hub could not serve it.
    """
    path = Path(source).expanduser()
    if path.exists():
        return path
    check_path(source)
    from huggingface_hub import snapshot_download

    patterns = ["*.safetensors", "*.json", "*.model", "*.txt", "*.jinja", "*.py"]
    try:
        folder = Path(snapshot_download(source, revision=revision, allow_patterns=patterns))
        if not _weight_files(folder):
            folder = Path(snapshot_download(source, revision=revision, allow_patterns=["pytorch_model*.bin*"]))
    except Exception as error:  # the hub's client raises many kinds; all mean that the weights are not here
        raise BuildError(
            f"{source!r} is neither a path on this machine nor a model that the hub or its local cache can "
            f"serve now ({type(error).__name__}); give a folder, or download it while the network is there."
        ) from error
    return folder


def _weight_files(folder: Path) -> list[Path]:
    for index in ("model.safetensors.index.json", "pytorch_model.bin.index.json"):
        if (folder / index).exists():
            held = json.loads((folder / index).read_text())["weight_map"]
            return [folder / name for name in sorted(set(held.values()))]
    for single in ("model.safetensors", "pytorch_model.bin"):
        if (folder / single).exists():
            return [folder / single]
    return sorted(folder.glob("*.safetensors"))


def _from_folder(folder: Path) -> TensorSource:
    files = _weight_files(folder)
    if not files:
        raise BuildError(f"{folder} holds no weights (*.safetensors or pytorch_model*.bin); check the path.")
    absent = [file.name for file in files if not file.exists()]
    if absent:
        raise BuildError(f"{folder} is incomplete: its index names {', '.join(absent)}, not there; copy it again.")
    return _from_files(str(folder), files)


def _from_files(label: str, files: list[Path]) -> TensorSource:
    readers: dict[str, Callable[[str], Tensor]] = {}
    for file in files:
        names, read = _open_file(file)
        readers.update(dict.fromkeys(names, read))
    return TensorSource(label, tuple(readers), lambda name: readers[name](name))


def _open_file(file: Path) -> tuple[list[str], Callable[[str], Tensor]]:
    if file.suffix not in WEIGHT_FILES:
        raise BuildError(f"{file} is no checkpoint: its name must end in one of {', '.join(WEIGHT_FILES)}.")
    try:
        if file.suffix == ".safetensors":
            from safetensors import safe_open

            handle = safe_open(str(file), framework="pt", device="cpu")
            return list(handle.keys()), handle.get_tensor
        state = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # every reader has its own kinds; all mean a damaged or foreign file
        raise BuildError(f"{file} cannot be read as a checkpoint ({error}); save the state dict again.") from error
    if not isinstance(state, Mapping) or not all(isinstance(value, Tensor) for value in state.values()):
        raise BuildError(f"{file} holds no state dict of tensors; save module.state_dict() alone.")
    return list(state), lambda name: state[name]


def _from_mapping(source: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], seed: int) -> TensorSource:
    if all(isinstance(value, Tensor) for value in source.values()):
        return TensorSource("the dict of materialization_source()", tuple(source), lambda name: source[name])

    def read(name: str) -> Tensor:
        value = source[name]
        if isinstance(value, Tensor):
            return value
        if not callable(value):
            raise BuildError(f"materialization_source()[{name!r}] is neither a tensor nor an initialiser.")
        return initialised(name, value, shapes.get(name), seed)

    return TensorSource("the initialisers of materialization_source()", tuple(source), read)


def initialised(name: str, fill: Callable[..., Any], shape: tuple[int, ...] | None, seed: int) -> Tensor:
    """Return a full float32 tensor that `fill` filled or returned; the same on every rank.

    Args:
        fill: called with the tensor to fill if it takes an argument (as `torch.nn.init.normal_` does), else
            without.
        shape: of the parameter; None where the module has none of that name.
    """
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:7], "big"))
        if not inspect.signature(fill).parameters:
            tensor = fill()
        else:
            empty = torch.zeros(shape if shape is not None else ())
            returned = fill(empty)
            tensor = returned if isinstance(returned, Tensor) else empty
    if not isinstance(tensor, Tensor):
        raise BuildError(f"the initialiser of {name!r} returned {type(tensor).__name__}; it must give a tensor.")
    return tensor


def through_transformers(module: nn.Module, source: TensorSource) -> TensorSource:
    """Read a checkpoint whose names differ from the module's as transformers does: renamed, merged, split.

    Holds the full model in host memory while it is read.

    Raises:
        BuildError: transformers finds weights missing, left over or of another shape.
    """
    from transformers import PreTrainedModel
    from transformers.utils import logging

    from rlbench.nn import BaseTrainModule

    plain: Any = next(
        cls
        for cls in type(module).__mro__
        if issubclass(cls, PreTrainedModel) and not issubclass(cls, BaseTrainModule | torch.distributed.fsdp.FSDPModule)
    )
    place: dict[str, Any] = {"pretrained_model_name_or_path": source.label}
    if source.in_memory:
        state = {name: source.read(name) for name in source.names}
        place = {"pretrained_model_name_or_path": None, "state_dict": state, "dtype": next(iter(state.values())).dtype}
    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model, report = plain.from_pretrained(
            **place, config=module.config, output_loading_info=True, ignore_mismatched_sizes=True
        )
    finally:
        if bars:
            logging.enable_progress_bar()
    wrong = {kind: sorted(map(str, report[kind])) for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")}
    if any(wrong.values()):
        said = "; ".join(f"{kind.split('_')[0]}: {', '.join(names[:5])}" for kind, names in wrong.items() if names)
        raise BuildError(f"the weights of {source.label} do not fit {plain.__name__}: {said}.")
    tensors = dict(model.state_dict())
    return TensorSource(source.label, tuple(tensors), tensors.__getitem__)
