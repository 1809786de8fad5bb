"""A checkpoint as a folder that appears whole or not at all, can be checked byte for byte, and rotates with its like.

    checkpoints/
      step-000012-v12/     one checkpoint: the writers' files, and MANIFEST.json with the size and sha256 of each
      latest               the name of the newest

It is written under `.NAME.HOST-PID.partial` and renamed once the disk has everything: a crash at any moment leaves the
earlier ones as they were, and never half of one under a final name. Only folders with our manifest are ever removed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import socket
from pathlib import Path
from typing import Any

from rlbench.errors import CheckpointError

MANIFEST = "MANIFEST.json"
LATEST = "latest"
FORMAT = 1
GB = 10**9


def begin(root: Path, name: str) -> tuple[Path, Path]:
    """Make room to write checkpoint `name` of `root`; returns (folder to write into, its later place).

    What a writer that is gone left half-written is removed; another session may be writing here just now, and is
    left alone. A name that is taken gets a number behind it.
    """
    try:
        root.mkdir(parents=True, exist_ok=True)
        for left in filter(_abandoned, root.glob(".*.partial")):
            shutil.rmtree(left)
        final, number = root / name, 2
        while final.exists():
            final, number = root / f"{name}-{number}", number + 1
        aside = _partial(final)
        aside.mkdir(mode=0o700)
    except OSError as error:
        raise CheckpointError(
            f"no checkpoint can be written in {root}: {error.strerror}; choose another path"
        ) from error
    return aside, final


def publish(aside: Path, final: Path, facts: dict[str, Any]) -> int:
    """Seal what was written into `aside` with a manifest, and give it its final name; returns its bytes.

    Args:
        aside, final: of `begin`.
        facts: plain values for a reader of the manifest (step, time, …).
    """
    files: dict[str, dict[str, Any]] = {}
    for path in sorted(p for p in aside.rglob("*") if p.is_file()):
        files[str(path.relative_to(aside))] = {"bytes": path.stat().st_size, "sha256": _digest(path)}
        _sync_file(path)
    manifest = {"rlbench_checkpoint": FORMAT, **facts, "files": files}
    _write_whole(aside / MANIFEST, json.dumps(manifest, indent=1))
    for folder in [aside, *(p for p in aside.rglob("*") if p.is_dir())]:
        sync_folder(folder)
    os.rename(aside, final)
    sync_folder(final.parent)
    _write_whole(final.parent / LATEST, final.name)
    return sum(entry["bytes"] for entry in files.values())


def manifest_of(folder: Path) -> dict[str, Any] | None:
    """The manifest of a checkpoint of ours; None where the folder is something else."""
    try:
        found = json.loads((folder / MANIFEST).read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and found.get("rlbench_checkpoint") == FORMAT else None


def checkpoints_in(root: Path) -> list[Path]:
    """The whole checkpoints of a folder, oldest first."""
    named = [p for p in root.iterdir() if p.is_dir() and not p.name.startswith(".")] if root.is_dir() else []
    found = [(m["time"], p) for p in named if (m := manifest_of(p))]
    return [path for _, path in sorted(found, key=lambda pair: (pair[0], pair[1].name))]


def find(path: Path) -> Path:
    """The checkpoint that `path` names: itself, or the newest in it.

    Raises:
        CheckpointError: there is none.
    """
    if manifest_of(path) is not None:
        return path
    found = checkpoints_in(path)
    if not found:
        raise CheckpointError(
            f"{path} is no checkpoint and holds none (a whole one has a {MANIFEST}); session.save({str(path)!r}) "
            "writes one"
        )
    return found[-1]


def verify(folder: Path) -> dict[str, Any]:
    """Compare every file with the manifest, and return it.

    Raises:
        CheckpointError: naming the first file that differs, and the checkpoint before it that is whole.
    """
    manifest = manifest_of(folder)
    if manifest is None:
        raise CheckpointError(f"{folder} has no readable {MANIFEST}: it is no checkpoint of rlbench")
    for name, entry in manifest["files"].items():
        path = folder / name
        seen = path.stat().st_size if path.is_file() else None
        wrong = (
            "is missing"
            if seen is None
            else f"has {seen} bytes, was written with {entry['bytes']}"
            if seen != entry["bytes"]
            else "does not have the content it was written with"
            if _digest(path) != entry["sha256"]
            else None
        )
        if wrong:
            others = [p for p in checkpoints_in(folder.parent) if p != folder]
            mend = f"the one before it is {others[-1]}" if others else "there is no other one beside it"
            raise CheckpointError(f"checkpoint {folder} is damaged: {name} {wrong}. Nothing was loaded; {mend}")
    return manifest


def rotate(root: Path, max_num: int | None, max_gb: float | None) -> list[Path]:
    """Remove the oldest of our checkpoints until at most `max_num` and `max_gb` gigabytes (10^9) are left.

    The newest always stays. Returns what was removed.
    """
    kept = checkpoints_in(root)
    removed = []
    while len(kept) > 1 and (
        (max_num is not None and len(kept) > max_num)
        or (max_gb is not None and sum(map(_bytes_of, kept)) > max_gb * GB)
    ):
        oldest = kept.pop(0)
        doomed = _partial(oldest)  # a crash in the middle leaves no half checkpoint under its name
        os.rename(oldest, doomed)
        shutil.rmtree(doomed)
        removed.append(oldest)
    return removed


def _partial(final: Path) -> Path:
    """Where this process writes `final` until it is whole."""
    return final.with_name(f".{final.name}.{socket.gethostname()}-{os.getpid()}.partial")


def _abandoned(partial: Path) -> bool:
    """Whether nobody writes there any more: its process, on this host, is gone, or is this one, which begins anew."""
    owner = re.search(r"\.([^/]*)-(\d+)\.partial$", partial.name)
    if owner is None or not partial.name.endswith(f".{socket.gethostname()}-{owner[2]}.partial"):
        return False
    return int(owner[2]) == os.getpid() or not Path(f"/proc/{owner[2]}").exists()


def sync_folder(folder: Path) -> None:
    """Return when the disk has the folder's entries."""
    _sync_file(folder)


def _bytes_of(folder: Path) -> int:
    return sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync_file(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_whole(path: Path, text: str) -> None:
    aside = path.with_name(f".{path.name}.new")
    with open(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.rename(aside, path)
