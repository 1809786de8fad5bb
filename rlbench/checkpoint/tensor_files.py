"""Tensors as raw files in a folder, and an index in JSON that says which part of a sharded one each is.

A file holds one tensor, or small ones of a kind (the first two parts of their names), frozen ones apart from the
others. Where its bytes did not change since an earlier folder, it is a hard link to that folder's file. Nothing is
pickled.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from rlbench.checkpoint.flat_parts import flat_part, mark_of, whole_shape
from rlbench.checkpoint.folder import sync, writing
from rlbench.errors import CheckpointError

INDEX = "index.json"
SMALL_BYTES, FILE_BYTES = 1 << 21, 1 << 23
ALIGNED = 16  # where a tensor begins in its file
BETWEEN = np.zeros(ALIGNED, np.uint8)
PARTS = os.sysconf("SC_IOV_MAX")
DESCRIBED = ("at", "dtype", "shape", "shard")
FIRST_COMPARED_BYTES, COMPARED_BYTES = 1 << 12, 1 << 20


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
    spare: Sequence[Path] = (),
) -> Written:
    """Write the tensors, of sharded ones this rank's part, into a new folder; share with `before` what did not change.

    `between` is called with the bytes of the next file, and may raise. What is known to be `unchanged` is not read.
    Files are taken from folders that are `spare`, where they are nobody else's: memory written over is not asked of
    the system again, which takes several times as long as the copy.
    """
    earlier = _index(before) if before is not None else {}
    fresh = 0
    with writing(folder):
        folder.mkdir(mode=0o700, parents=True)
        index: dict[str, Any] = {} if before is None else _linked(folder, before, earlier, tensors, unchanged)
        used = {entry["file"] for entry in index.values()}
        free = (file for number in itertools.count() if (file := f"{number}.bin") not in used)
        with _Files(folder, spare, durable) as files:
            for names in _files_of({name: tensor for name, tensor in tensors.items() if name not in index}):
                entries, size = _entries(next(free), {name: tensors[name] for name in names})
                between(size)
                file, shared = entries[names[0]]["file"], _alike(before, earlier, entries, size)
                data = _laid_out(tensors, entries)
                if shared is not None and _equal(shared, data):
                    os.link(shared, f"{folder}/{file}")
                else:
                    files.write(file, size, data)
                    fresh += sum(map(_nbytes, entries.values()))
                index |= entries
        with new_file(folder / INDEX, durable) as indexed:
            indexed.write(json.dumps({name: index[name] for name in tensors}).encode())
        if durable:
            sync(folder)
    return Written(sum(_nbytes(entry) for entry in index.values()), fresh)


def _linked(
    folder: Path,
    before: Path,
    earlier: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    unchanged: Callable[[str], bool],
) -> dict[str, Any]:
    """Share the files before of which all tensors are unchanged and split as they are now; return what the index says
    of those."""
    by_file: dict[str, list[str]] = {}
    for name, entry in earlier.items():
        by_file.setdefault(entry["file"], []).append(name)
    index: dict[str, Any] = {}
    for file, names in by_file.items():
        if all(name in tensors and unchanged(name) and _is_of(tensors[name], earlier[name]) for name in names):
            os.link(f"{before}/{file}", f"{folder}/{file}")
            index |= {name: earlier[name] for name in names}
    return index


def _is_of(whole: Tensor, entry: Mapping[str, Any]) -> bool:
    """Whether a tensor is split as an index says."""
    return entry["shape"] == list(local_part(whole).shape) and entry["shard"] == _shard_of(whole)


class _Files:
    """Files written by as many threads as torch computes with: into memory, copying is what takes the time."""

    def __init__(self, folder: Path, spare: Sequence[Path], durable: bool) -> None:
        self._folder, self._spare, self._durable = folder, spare, durable
        self._threads = torch.get_num_threads()
        self._pool = ThreadPoolExecutor(self._threads)
        self._begun: deque[Future[None]] = deque()

    def __enter__(self) -> _Files:
        return self

    def write(self, name: str, nbytes: int, parts: Sequence[np.ndarray]) -> None:
        """Begin to write a file, once no more wait than there are threads: their bytes may be copies of a GPU's."""
        while len(self._begun) > self._threads:
            self._begun.popleft().result()
        self._begun.append(self._pool.submit(self._write, f"{self._folder}/{name}", nbytes, parts))

    def _write(self, path: str, nbytes: int, parts: Sequence[np.ndarray]) -> None:
        with _taken_or_new(path, nbytes, self._spare, self._durable) as file:
            _write_all(file.fileno(), parts)

    def __exit__(self, kind: object, *_: object) -> None:
        self._pool.shutdown(cancel_futures=kind is not None)  # waits: whoever asked may remove the folder then
        for begun in () if kind is not None else self._begun:
            begun.result()


def _write_all(file: int, parts: Sequence[np.ndarray]) -> None:
    """Write parts in a row, whatever the system takes at once: `PARTS` of them, and 2 GiB."""
    left = deque(part.data for part in parts)
    while left:
        taken = os.writev(file, list(itertools.islice(left, PARTS)))
        while left and taken >= left[0].nbytes:
            taken -= left.popleft().nbytes
        if taken:
            left[0] = left[0][taken:]


def _files_of(tensors: Mapping[str, Tensor]) -> list[list[str]]:
    """Return the names that one file each holds: small ones of a kind together, as a file costs more than they do; what
    is frozen apart, as it would be written again with what is trained."""
    files: list[list[str]] = []
    room: dict[tuple[object, ...], tuple[int, list[str]]] = {}  # of the file that is open for a kind
    for name, whole in tensors.items():
        nbytes, kind = _size(local_part(whole)), (*name.split("/")[:2], whole.requires_grad)
        left, names = room.get(kind, (-1, []))
        if nbytes > SMALL_BYTES or nbytes > left:
            left, names = FILE_BYTES, []
            files.append(names)
        names.append(name)
        if nbytes <= SMALL_BYTES:
            room[kind] = left - nbytes, names
    return files


def _entries(file: str, tensors: Mapping[str, Tensor]) -> tuple[dict[str, dict[str, Any]], int]:
    """Return what the index says of the tensors of one file, and the size of that."""
    entries, at = {}, 0
    for name, whole in tensors.items():
        tensor = local_part(whole)
        dtype = str(tensor.dtype).removeprefix("torch.")
        entries[name] = {"file": file, "at": at, "dtype": dtype, "shape": list(tensor.shape), "shard": _shard_of(whole)}
        at += _size(tensor) + -_size(tensor) % ALIGNED
    return entries, at


def _laid_out(tensors: Mapping[str, Tensor], entries: Mapping[str, Any]) -> list[np.ndarray]:
    """Return the bytes of a file: each tensor's, filled up to where the next begins."""
    parts = [bytes_of(local_part(tensors[name])) for name in entries]
    return [part for data in parts for part in (data, BETWEEN[: -data.nbytes % ALIGNED]) if part.nbytes]


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Map the tensors of a folder; nothing is copied until they are read."""
    return {name: _mapped(folder, name, entry) for name, entry in _index(folder).items()}


def read_resharded(folders: Sequence[Path], layout: Callable[[str], Tensor | None]) -> dict[str, Tensor]:
    """Map this rank's part of all that ranks wrote, its own folder first, sharded as what `layout` gives."""
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
        in_a_row = isinstance(pieces[0][1]["shard"], dict)
        piece, entry = (_joined_flat if in_a_row else _joined)(name, pieces), {"shard": None}
    is_whole = entry["shard"] is None and like is not None and tuple(piece.shape) == whole_shape(like)
    return part_of(piece, like) if like is not None and is_whole else piece


def _joined(name: str, pieces: list[tuple[Path, dict[str, Any]]]) -> Tensor:
    """Put the parts of a tensor together that was split along dimensions."""
    by_place = {tuple(entry["shard"][1::3]): (folder, entry) for folder, entry in pieces}
    folder, entry = pieces[-1]
    dimensions, counts = entry["shard"][::3], entry["shard"][2::3]
    if len(by_place) != math.prod(counts):
        raise CheckpointError(
            f"{folder.parent} has {len(by_place)} of {math.prod(counts)} parts of {name}: some are missing"
        )
    parts = {place: _mapped(folder, name, entry) for place, (folder, entry) in sorted(by_place.items())}
    for dimension in reversed(dimensions):  # what was split last is joined first
        groups: dict[tuple[int, ...], list[Tensor]] = {}
        for place, part in parts.items():
            groups.setdefault(place[:-1], []).append(part)
        parts = {place: torch.cat(group, dim=dimension) for place, group in groups.items()}
    return parts[()]


def _joined_flat(name: str, pieces: list[tuple[Path, dict[str, Any]]]) -> Tensor:
    """Put the parts of a tensor together whose numbers lay in a row over the ranks."""
    by_place = {(e["shard"]["start"], e["shard"]["numel"]): (folder, e) for folder, e in pieces}
    folder, entry = pieces[-1]
    shape, held = entry["shard"]["shape"], sum(numel for _, numel in by_place)
    if held != math.prod(shape):
        raise CheckpointError(
            f"{folder.parent} has {held} of {math.prod(shape)} numbers of {name}: parts of it are missing"
        )
    return torch.cat([_mapped(place, name, entry) for _, (place, entry) in sorted(by_place.items())]).view(shape)


def _splits(tensor: DTensor) -> list[tuple[int, int, int]]:
    """Return (dimension, this rank's place, number of parts) of each split, in the order in which they are made: FSDP
    splits what tensor parallelism has split, though its mesh dimension comes first."""
    mesh, place = tensor.device_mesh, tensor.device_mesh.get_coordinate() or ()
    split: list[tuple[Any, int]] = [(p, axis) for axis, p in enumerate(tensor.placements) if not p.is_replicate()]
    if not all(hasattr(placement, "dim") for placement, _ in split):
        raise CheckpointError(
            f"a tensor placed as {tensor.placements} cannot be kept: its ranks do not hold parts of it"
        )
    split.sort(
        key=lambda one: not isinstance(one[0], Shard)
    )  # FSDP has a placement of its own for what it splits again
    return [(placement.dim, place[axis], mesh.size(axis)) for placement, axis in split]


def _shard_of(tensor: Tensor) -> list[int] | dict[str, Any] | None:
    """Return `_splits` in a row, as an index holds them, or the numbers of one that is split in a row; None for a
    tensor that is whole here."""
    if (part := flat_part(tensor)) is not None:
        return part.described()
    return [number for split in _splits(tensor) for number in split] or None if isinstance(tensor, DTensor) else None


def part_of(whole: Tensor, like: Tensor) -> Tensor:
    """Return this rank's part of a whole tensor that all ranks have, as `like` is sharded: a view. No collective."""
    if (flat := flat_part(like)) is not None:
        return whole.reshape(-1)[flat.start : flat.start + flat.numel]
    for dimension, place, count in _splits(like) if isinstance(like, DTensor) else ():
        parts = whole.chunk(count, dimension)
        whole = parts[place] if place < len(parts) else whole.narrow(dimension, 0, 0)
    return whole


def is_first_replica(tensor: Tensor) -> bool:
    """Whether no rank before this one holds the same part of a sharded tensor; what is not sharded is each rank's."""
    if (mark := mark_of(tensor)) is not None:
        return mark.replica == 0
    if not isinstance(tensor, DTensor):
        return True
    axes = zip(tensor.device_mesh.get_coordinate() or (), tensor.placements, strict=True)
    return not any(at for at, placement in axes if placement.is_replicate())


def _index(folder: Path) -> dict[str, Any]:
    try:
        return dict(json.loads((folder / INDEX).read_text()))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder} is no whole set of tensors: its {INDEX} cannot be read ({error})") from error


def _mapped(folder: Path, name: str, entry: dict[str, Any]) -> Tensor:
    path, nbytes = folder / entry["file"], _nbytes(entry)
    if not path.exists():
        raise CheckpointError(f"{path} ({name}) is missing, and its index names it")
    if (size := path.stat().st_size) < (wanted := entry["at"] + nbytes):
        raise CheckpointError(f"{path} ({name}) has {size} bytes, its index says {wanted}: it is cut or was changed")
    dtype = getattr(torch, entry["dtype"])
    if nbytes == 0:
        return torch.empty(entry["shape"], dtype=dtype)
    raw = np.memmap(
        path, np.uint8, "c", entry["at"], (nbytes,)
    )  # copy on write: torch wants writable memory, the file stays
    return torch.from_numpy(raw).view(dtype).reshape(entry["shape"])


def _alike(before: Path | None, old: Mapping[str, Any], new: Mapping[str, dict[str, Any]], size: int) -> str | None:
    """Return the file of the folder before that may hold the same bytes: of those tensors alone, and whole."""
    first = old.get(next(iter(new)))
    if before is None or first is None:
        return None
    for name, entry in new.items():
        there = old.get(name)
        if there is None or there["file"] != first["file"] or any(there[key] != entry[key] for key in DESCRIBED):
            return None
    path = f"{before}/{first['file']}"
    return path if os.stat(path).st_size == size > 0 else None


def _equal(path: str, parts: Sequence[np.ndarray]) -> bool:
    """Whether a file of that size holds the very same bytes; a trained tensor differs in the first."""
    with open(path, "rb", buffering=0) as file:
        size = FIRST_COMPARED_BYTES
        for data in parts:
            at = 0
            while at < data.nbytes:
                read = np.frombuffer(file.read(min(size, data.nbytes - at)), np.uint8)
                if not read.size or not np.array_equal(read, data[at : at + read.size]):
                    return False
                at, size = at + read.size, COMPARED_BYTES
    return True


def bytes_of(tensor: Tensor) -> np.ndarray:
    """Return the bytes of a tensor of any dtype and device, in order."""
    flat = _on_host(tensor.detach().contiguous()).reshape(-1)
    return flat.view(torch.uint8).numpy() if flat.numel() else np.zeros(0, np.uint8)


def _on_host(tensor: Tensor) -> Tensor:
    """Return a tensor in host memory; from a GPU through pinned memory, which torch keeps for the next of its size."""
    if not tensor.is_cuda:
        return tensor.cpu()
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor)


def _nbytes(entry: Mapping[str, Any]) -> int:
    return math.prod(entry["shape"]) * int(getattr(torch, entry["dtype"]).itemsize)


def _taken_or_new(path: str, nbytes: int, spare: Sequence[Path], durable: bool) -> AbstractContextManager[BinaryIO]:
    """Open for writing a file of that size that is spare, moved to `path`, or a new one."""
    for folder in () if durable else spare:
        taken = f"{folder}/{os.path.basename(path)}"
        with contextlib.suppress(FileNotFoundError):
            held = os.stat(taken)
            if held.st_size == nbytes and held.st_nlink == 1:
                os.rename(taken, path)
                return open(path, "r+b", buffering=0)
    return new_file(path, durable)


@contextmanager
def new_file(path: str | Path, durable: bool) -> Iterator[BinaryIO]:
    """Open a new file for its owner alone; the disk has it once it is closed, if `durable`."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        yield file
        if durable:
            file.flush()
            os.fsync(file.fileno())
