"""Tensors as raw files in a folder, one file each, and an index in JSON. Nothing is pickled.

A tensor whose bytes did not change since an earlier folder is a hard link to that folder's file: it takes no memory
twice, and either folder may be removed without the other. Of a sharded tensor each rank writes its own part, and the
index says which part that is, so that any number of ranks can read it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from rlbench.checkpoint.folder import sync, writing
from rlbench.errors import CheckpointError

INDEX = "index.json"
COMPARED_BYTES = 1 << 20


@dataclass(frozen=True)
class Written:
    """What a folder holds: `nbytes` in all, `fresh` of them not shared with the folder before."""

    nbytes: int
    fresh: int


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor that may be sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def write_tensors(
    folder: Path,
    tensors: Mapping[str, Tensor],
    before: Path | None = None,
    durable: bool = False,
    between: Callable[[int], None] = lambda nbytes: None,
    unchanged: Callable[[str], bool] = lambda name: False,
) -> Written:
    """Write the tensors, of sharded ones this rank's part, into a new folder.

    Args:
        folder: must not exist; readable by the owner alone.
        tensors: any dtype and device.
        before: a folder written earlier, to share unchanged tensors with.
        durable: return only when the disk has it.
        between: called with the bytes of the next tensor before it is written; may raise to end the writing.
        unchanged: whether a tensor of this name is known to be what `before` holds: it is shared without being read.

    Raises:
        CheckpointError: no room, or the folder cannot be written; nothing is left of it that looks whole.
    """
    earlier = _index(before) if before is not None else {}
    index: dict[str, Any] = {}
    fresh = 0
    with writing(folder):
        folder.mkdir(mode=0o700, parents=True)
        for number, (name, whole) in enumerate(tensors.items()):
            tensor = local_part(whole)
            between(tensor.numel() * tensor.element_size())
            entry: dict[str, Any] = {
                "file": f"{number}.bin",
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "shape": list(tensor.shape),
                "shard": _shard_of(whole),
            }
            path, shared = folder / entry["file"], _alike(before, earlier.get(name), entry)
            data = None if shared is not None and unchanged(name) else _bytes_of(tensor)
            if shared is not None and (data is None or _equal(shared, data)):
                os.link(shared, path)
            else:
                assert data is not None
                with new_file(path, durable) as file:
                    file.write(data.data)
                fresh += data.nbytes
            index[name] = entry
        with new_file(folder / INDEX, durable) as file:
            file.write(json.dumps(index).encode())
        if durable:
            sync(folder)
    return Written(sum(_nbytes(entry) for entry in index.values()), fresh)


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Map the tensors of a folder; nothing is copied until they are read. The result must not be written to.

    Raises:
        CheckpointError: the folder is not there, not whole, or a file has another size than its index says.
    """
    return {name: _mapped(folder, name, entry) for name, entry in _index(folder).items()}


def read_resharded(folders: Sequence[Path], layout: Callable[[str], Tensor | None]) -> dict[str, Tensor]:
    """Read this rank's part of all tensors that ranks wrote, however many they were; as `read_tensors` otherwise.

    Args:
        folders: of all ranks, this one's own first where there is one: its part of what is not sharded counts.
        layout: gives a tensor sharded as the one of a name is to be; None, or one of another shape: not at all.
    """
    indexes = [(folder, _index(folder)) for folder in folders]
    names = dict.fromkeys(name for _, index in indexes for name in index)
    return {
        name: _resharded(name, [(folder, index[name]) for folder, index in indexes if name in index], layout(name))
        for name in names
    }


def _resharded(name: str, pieces: list[tuple[Path, dict[str, Any]]], like: Tensor | None) -> Tensor:
    wanted = None if like is None else _shard_of(like)
    for folder, entry in pieces:
        if entry["shard"] in (None, wanted):
            piece = _mapped(folder, name, entry)
            break
    else:
        by_place = {entry["shard"][1]: (folder, entry) for folder, entry in pieces}
        folder, entry = pieces[0]
        if len(by_place) != (wanted_parts := entry["shard"][2]):
            raise CheckpointError(
                f"{folder.parent} has {len(by_place)} of {wanted_parts} parts of {name}: one is missing"
            )
        parts = [_mapped(folder, name, entry) for _, (folder, entry) in sorted(by_place.items())]
        piece, entry = torch.cat(parts, dim=entry["shard"][0]), {"shard": None}
    if entry["shard"] is None and isinstance(like, DTensor) and piece.shape == like.shape:
        piece = distribute_tensor(piece, like.device_mesh, like.placements, src_data_rank=None).to_local()
    return piece


def _shard_of(tensor: Tensor) -> list[int] | None:
    """Return [dimension, place, number of shards] of this rank's part; None for a tensor that is whole here."""
    if not isinstance(tensor, DTensor):
        return None
    place = tensor.device_mesh.get_coordinate()
    assert place is not None
    axes = [axis for axis, placement in enumerate(tensor.placements) if not placement.is_replicate()]
    if not axes:
        return None
    placement = tensor.placements[axes[0]]
    if len(axes) > 1 or not isinstance(placement, Shard):
        raise CheckpointError(f"a tensor placed as {tensor.placements} cannot be kept: one dimension may be sharded")
    return [placement.dim, place[axes[0]], tensor.device_mesh.size(axes[0])]


def is_first_replica(tensor: Tensor) -> bool:
    """Whether no rank before this one holds the same part of a sharded tensor; what is not sharded is each rank's."""
    if not isinstance(tensor, DTensor):
        return True
    place = tensor.device_mesh.get_coordinate()
    assert place is not None
    return not any(at for at, placement in zip(place, tensor.placements, strict=True) if placement.is_replicate())


def _index(folder: Path) -> dict[str, Any]:
    try:
        return dict(json.loads((folder / INDEX).read_text()))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder} is no whole set of tensors: its {INDEX} cannot be read ({error})") from error


def _mapped(folder: Path, name: str, entry: dict[str, Any]) -> Tensor:
    path, wanted = folder / entry["file"], _nbytes(entry)
    size = path.stat().st_size if path.exists() else 0
    if size != wanted or not path.exists():
        raise CheckpointError(f"{path} ({name}) has {size} bytes, its index says {wanted}: it is cut or was changed")
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


@contextmanager
def new_file(path: Path, durable: bool) -> Iterator[BinaryIO]:
    """A new file for its owner alone; on disk when it is closed, if `durable`."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        yield file
        if durable:
            file.flush()
            os.fsync(file.fileno())
