"""A checkpoint as a folder that appears whole or not at all, can be checked byte for byte, and rotates with its like.

It is written under `.NAME.HOST-PID.partial` and renamed once the disk has everything; MANIFEST.json holds the size and
sha256 of each file. Only folders with our manifest are ever removed. `latest` beside them names the one to load.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import re
import shutil
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlbench.errors import CheckpointError
from rlbench.units import format_bytes

MANIFEST = "MANIFEST.json"
LATEST = "latest"
FORMAT = 2
GB = 10**9


@contextmanager
def writing(place: Path) -> Iterator[None]:
    """Turn an OSError of the block into a CheckpointError that says how much room there is."""
    try:
        yield
    except OSError as error:
        there = next(folder for folder in (place, *place.parents) if folder.is_dir())
        free = shutil.disk_usage(there).free
        raise CheckpointError(
            f"{place} could not be written ({error.strerror}); {format_bytes(free)} are free there: make room "
            "(session.drop(snapshot) frees one in memory), or choose another path. What was there is as it was"
        ) from error


def begin(root: Path, name: str, replace: str | None = None) -> tuple[Path, Path]:
    """Return the folder to write checkpoint `name` of `root` into, and its later place; kind `replace` gives way."""
    final = root / name
    with writing(root):
        root.mkdir(parents=True, exist_ok=True)
        for left in filter(_abandoned, root.glob(".*.partial")):
            shutil.rmtree(left)
        if replace is None:
            final = _free(final)
        elif final.exists() and manifest_of(final, replace) is None:
            raise CheckpointError(f"{final} is there and no checkpoint of a {replace}; choose another name (tag=).")
        aside = _partial(final)
        aside.mkdir(mode=0o700)
    return aside, final


def publish(aside: Path, final: Path, facts: dict[str, Any], latest: bool = True) -> int:
    """Seal what was written into `aside` with a manifest (and `facts` in it), and name it `final`; return its bytes.

    What is at `final` is replaced once the new one is safe under a name of its own. `latest`: `find` takes it now.
    """
    files: dict[str, dict[str, Any]] = {}
    for path in sorted(p for p in aside.rglob("*") if p.is_file()):
        files[str(path.relative_to(aside))] = {"bytes": path.stat().st_size, "sha256": _digest(path)}
        sync(path)
    manifest = {"rlbench_checkpoint": FORMAT, **facts, "latest": latest, "files": files}
    _write_whole(aside / MANIFEST, json.dumps(manifest, indent=1))
    for folder in [aside, *(p for p in aside.rglob("*") if p.is_dir())]:
        sync(folder)
    safe = _free(final)
    os.rename(aside, safe)
    if safe != final:
        _remove(final)
        os.rename(safe, final)
    sync(final.parent)
    if latest:
        _write_whole(final.parent / LATEST, final.name)
    return sum(entry["bytes"] for entry in files.values())


def manifest_of(folder: Path, kind: str | None = None) -> dict[str, Any] | None:
    """Return the manifest of a checkpoint (of that kind; None: of any); None where the folder is something else."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
    except (OSError, ValueError):
        return None
    ours = isinstance(manifest, dict) and manifest.get("rlbench_checkpoint") == FORMAT
    return manifest if ours and kind in (None, manifest.get("kind")) else None


def checkpoints_in(root: Path, kind: str | None = None) -> list[Path]:
    """Return the whole checkpoints of a folder, oldest first."""
    return [path for path, _ in _listed(root, kind)]


def find(path: Path, kind: str | None = None) -> Path:
    """Return the checkpoint that `path` names: itself, or the newest in it, of those written as `latest` if any was."""
    if manifest_of(path, kind) is not None:
        return path
    held = _listed(path, kind)
    if not held:
        raise CheckpointError(
            f"{path} {'holds no checkpoint' if path.exists() else 'does not exist'}: session.save(path), "
            "strategy.save_ckpt(model, path) and trainer.save(path) write one, each for its own load"
        )
    return ([folder for folder, manifest in held if manifest["latest"]] or [held[-1][0]])[-1]


def verify(folder: Path) -> dict[str, Any]:
    """Compare every file with the manifest, and return it; CheckpointError names the first file that differs."""
    manifest = manifest_of(folder)
    if manifest is None:
        raise CheckpointError(f"{folder} has no readable {MANIFEST}: it is no checkpoint of rlbench")
    if wrong := damage(folder, manifest):
        others = [p for p in checkpoints_in(folder.parent) if p != folder]
        remedy = f"the one before it is {others[-1]}" if others else "there is no other one beside it"
        raise CheckpointError(f"checkpoint {folder} is damaged: {wrong}. Nothing was loaded; {remedy}")
    return manifest


def damage(folder: Path, manifest: Mapping[str, Any]) -> str:
    """Return what is wrong with the first file that differs from the manifest; empty where none does."""
    for name, entry in manifest["files"].items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if (size := path.stat().st_size) != entry["bytes"]:
            return f"{name} has {size} bytes, was written with {entry['bytes']}"
        if _digest(path) != entry["sha256"]:
            return f"{name} does not have the content it was written with"
    return ""


def rotate(root: Path, max_num: int | None, max_gb: float | None, kind: str | None = None) -> list[Path]:
    """Remove (and return) the oldest checkpoints until at most `max_num` and `max_gb` (10^9 bytes) are left, or one."""
    left, removed = checkpoints_in(root, kind), []
    most, room = (math.inf if limit is None else limit for limit in (max_num, max_gb))
    sizes = {folder: sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) for folder in left}
    while len(left) > 1 and (len(left) > most or sum(map(sizes.__getitem__, left)) > room * GB):
        removed.append(left.pop(0))
        _remove(removed[-1])
    return removed


def sync(path: Path) -> None:
    """Return when the disk has the file, or the folder's entries."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _listed(root: Path, kind: str | None) -> list[tuple[Path, dict[str, Any]]]:
    folders = [p for p in root.iterdir() if p.is_dir() and not p.name.startswith(".")] if root.is_dir() else []
    listed = [(path, manifest) for path in folders if (manifest := manifest_of(path, kind))]
    return sorted(listed, key=lambda pair: (pair[1]["time"], pair[0].name))


def _free(path: Path) -> Path:
    """Return the path, with a number behind it where it is taken."""
    numbered = (path.with_name(f"{path.name}-{number}") for number in itertools.count(2))
    return next(p for p in itertools.chain([path], numbered) if not p.exists())


def _remove(folder: Path) -> None:
    """Remove a checkpoint; a crash in the middle leaves no half of it under its name."""
    doomed = _partial(folder)
    os.rename(folder, doomed)
    shutil.rmtree(doomed)


def _partial(final: Path) -> Path:
    """Return where this process writes `final` until it is whole."""
    return final.with_name(f".{final.name}.{socket.gethostname()}-{os.getpid()}.partial")


def _abandoned(partial: Path) -> bool:
    """Whether nobody writes there any more: its process, on this host, is gone, or is this one, which begins anew."""
    owner = re.search(rf"\.{re.escape(socket.gethostname())}-(\d+)\.partial$", partial.name)
    return owner is not None and (int(owner[1]) == os.getpid() or not Path(f"/proc/{owner[1]}").exists())


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write_whole(path: Path, text: str) -> None:
    aside = path.with_name(f".{path.name}.new")
    with open(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.rename(aside, path)
