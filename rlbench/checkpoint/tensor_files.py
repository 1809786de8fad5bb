"""Tensors as raw files in a folder, one file each, and an index in JSON. Nothing is pickled.

A tensor whose bytes did not change since an earlier folder is a hard link to that folder's file: it takes no memory
twice, and either folder may be removed without the other.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlbench.checkpoint.folder import sync_folder
from rlbench.errors import CheckpointError

INDEX = "index.json"
COMPARED_BYTES = 1 << 20


@dataclass(frozen=True)
class Written:
    """What a folder holds: `nbytes` in all, `fresh` of them not shared with the folder before."""

    nbytes: int
    fresh: int


@torch.no_grad()
def write_tensors(
    folder: Path,
    tensors: Mapping[str, Tensor],
    before: Path | None = None,
    durable: bool = False,
    between: Callable[[int], None] = lambda nbytes: None,
    unchanged: Callable[[str], bool] = lambda name: False,
) -> Written:
    """Write the tensors into a new folder.

    Args:
        folder: must not exist; readable by the owner alone.
        tensors: dense, any dtype and device.
        before: a folder written earlier, to share unchanged tensors with.
        durable: return only when the disk has it.
        between: called with the bytes of the next tensor before it is written; may raise to end the writing.
        unchanged: whether a tensor of this name is known to be what `before` holds: it is shared without being read.

    Raises:
        CheckpointError: no room, or the folder cannot be written; nothing is left of it that looks whole.
    """
    known = _index(before) if before is not None else {}
    index: dict[str, Any] = {}
    fresh = 0
    try:
        folder.mkdir(mode=0o700, parents=True)
        for number, (name, tensor) in enumerate(tensors.items()):
            between(tensor.numel() * tensor.element_size())
            entry: dict[str, Any] = {
                "file": f"{number}.bin",
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "shape": list(tensor.shape),
            }
            path, shared = folder / entry["file"], _alike(before, known.get(name), entry)
            data = None if shared is not None and unchanged(name) else _bytes_of(tensor)
            if shared is not None and (data is None or _equal(shared, data)):
                os.link(shared, path)
            else:
                assert data is not None
                _write(path, data.data, durable)
                fresh += data.nbytes
            index[name] = entry
        _write(folder / INDEX, json.dumps(index).encode(), durable)
        if durable:
            sync_folder(folder)
    except OSError as error:
        raise CheckpointError(
            f"{folder} could not be written ({error.strerror}): make room there (session.snapshots shows what is "
            "kept, session.drop(snapshot) frees one), or write elsewhere"
        ) from error
    return Written(sum(_nbytes(entry) for entry in index.values()), fresh)


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Map the tensors of a folder; nothing is copied until they are read. The result must not be written to.

    Raises:
        CheckpointError: the folder is not there, not whole, or a file has another size than its index says.
    """
    return {name: _mapped(folder, name, entry) for name, entry in _index(folder).items()}


def _index(folder: Path) -> dict[str, Any]:
    try:
        return dict(json.loads((folder / INDEX).read_text()))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder} is no whole set of tensors: its {INDEX} cannot be read ({error})") from error


def _mapped(folder: Path, name: str, entry: dict[str, Any]) -> Tensor:
    path, wanted = folder / entry["file"], _nbytes(entry)
    found = path.stat().st_size if path.exists() else -1
    if found != wanted:
        raise CheckpointError(
            f"{path} ({name}) has {max(found, 0)} bytes, its index says {wanted}: it is cut or was changed"
        )
    dtype = getattr(torch, entry["dtype"])
    if wanted == 0:
        return torch.empty(entry["shape"], dtype=dtype)
    raw = np.memmap(path, np.uint8, mode="c")  # copy on write: torch wants writable memory, the file stays
    return torch.from_numpy(raw).view(dtype).reshape(entry["shape"])


def _alike(before: Path | None, old: dict[str, Any] | None, new: dict[str, Any]) -> Path | None:
    """The file of the folder before that may hold the same bytes: of that dtype and shape, and whole."""
    if before is None or old is None or any(old[key] != new[key] for key in ("dtype", "shape")):
        return None
    path = before / old["file"]
    return path if path.stat().st_size == _nbytes(new) > 0 else None


def _equal(path: Path, data: np.ndarray) -> bool:
    """Whether a file of that size holds the very same bytes."""
    held = np.memmap(path, np.uint8, mode="r")
    return all(  # in pieces: a trained tensor differs in the first
        np.array_equal(held[at : at + COMPARED_BYTES], data[at : at + COMPARED_BYTES])
        for at in range(0, data.nbytes, COMPARED_BYTES)
    )


def _bytes_of(tensor: Tensor) -> np.ndarray:
    flat = tensor.detach().contiguous().cpu().reshape(-1)
    return flat.view(torch.uint8).numpy() if flat.numel() else np.zeros(0, np.uint8)


def _nbytes(entry: Mapping[str, Any]) -> int:
    return int(np.prod(entry["shape"], dtype=np.int64)) * int(getattr(torch, entry["dtype"]).itemsize)


def _write(path: Path, data: bytes | memoryview, durable: bool) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)
        if durable:
            file.flush()
            os.fsync(file.fileno())
