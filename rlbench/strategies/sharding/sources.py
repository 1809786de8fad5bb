"""Where weights come from, read one full tensor at a time: folders, files, the hub, dicts, initialisers."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rlbench.errors import BuildError
from rlbench.nn.huggingface import check_path
from rlbench.weights.names import weight_files

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
    """Open what a module's `materialization_source()` returned: path, hub id (of `revision`), dict of tensors, dict of
    initialisers (by full `shapes` and `seed`; the same tensor is drawn on every rank), or a source that is open."""
    if isinstance(source, TensorSource):
        return source
    if isinstance(source, Mapping):

        def value(name: str) -> Tensor:
            if isinstance(source[name], Tensor):
                return source[name]
            return initialised(name, source[name], shapes.get(name), seed)

        return TensorSource("the dict of materialization_source()", tuple(source), value)
    if not isinstance(source, str | Path):
        raise BuildError(
            f"materialization_source() returned {type(source).__name__}; it must be a path, a dict of "
            "tensors or a dict of initialisers."
        )
    path = locate(str(source), revision)
    files = weight_files(path) if path.is_dir() else [path]
    if not files:
        raise BuildError(f"{path} holds no weights (*.safetensors or pytorch_model*.bin); check the path.")
    if absent := [file.name for file in files if not file.exists()]:
        raise BuildError(f"{path} is incomplete: its index names {', '.join(absent)}, not there; copy it again.")
    readers: dict[str, Callable[[str], Tensor]] = {}
    for file in files:
        names, read = _open_file(file)
        readers.update(dict.fromkeys(names, read))
    return TensorSource(str(path), tuple(readers), lambda name: readers[name](name))


def locate(source: str, revision: str | None = None) -> Path:
    """Return the local folder or file of a path or hub id, downloading a model of the hub when it is not cached."""
    path = Path(source).expanduser()
    if path.exists():
        return path
    check_path(source)
    from huggingface_hub import snapshot_download

    patterns = ["*.safetensors", "*.json", "*.model", "*.txt", "*.jinja", "*.py"]
    try:
        folder = Path(snapshot_download(source, revision=revision, allow_patterns=patterns))
        if not weight_files(folder):
            folder = Path(snapshot_download(source, revision=revision, allow_patterns=["pytorch_model*.bin*"]))
    except Exception as error:  # the hub's client raises many kinds; all mean that the weights are not here
        raise BuildError(
            f"{source!r} is neither a path on this machine nor a model that the hub or its local cache can "
            f"serve now ({type(error).__name__}); give a folder, or download it while the network is there."
        ) from error
    return folder


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


def initialised(name: str, fill: Callable[..., Any], shape: tuple[int, ...] | None, seed: int) -> Tensor:
    """Return a full float32 tensor that `fill` filled, if it takes an argument (as `torch.nn.init.normal_` does), or
    returned; the same on every rank. `shape` is None where the module has no parameter of that name."""
    if not callable(fill):
        raise BuildError(f"materialization_source()[{name!r}] is neither a tensor nor an initialiser.")
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:7], "big"))
        if not inspect.signature(fill).parameters:
            tensor = fill()
        else:
            empty = torch.zeros(shape or ())
            returned = fill(empty)
            tensor = returned if isinstance(returned, Tensor) else empty
    if not isinstance(tensor, Tensor):
        raise BuildError(f"the initialiser of {name!r} returned {type(tensor).__name__}; it must give a tensor.")
    return tensor


def loaded_silently(kind: Any, *args: Any, **options: Any) -> tuple[nn.Module, dict[str, Any]]:
    """Return a model that a class of transformers loads, without progress bars, and its report of the names."""
    from transformers.utils import logging

    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        return kind.from_pretrained(*args, output_loading_info=True, **options)
    finally:
        if bars:
            logging.enable_progress_bar()


def through_transformers(module: nn.Module, source: TensorSource) -> TensorSource:
    """Read a checkpoint whose names differ from the module's as transformers does: renamed, merged, split. The full
    model is in host memory while it is read."""
    from transformers import PreTrainedModel

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
    model, report = loaded_silently(plain, **place, config=module.config, ignore_mismatched_sizes=True)
    wrong = {kind: sorted(map(str, report[kind])) for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")}
    if any(wrong.values()):
        listed = "; ".join(f"{kind.split('_')[0]}: {', '.join(names[:5])}" for kind, names in wrong.items() if names)
        raise BuildError(f"the weights of {source.label} do not fit {plain.__name__}: {listed}.")
    tensors = dict(model.state_dict())
    return TensorSource(source.label, tuple(tensors), tensors.__getitem__)
