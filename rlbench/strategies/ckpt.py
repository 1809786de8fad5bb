"""The checkpoints of `save_ckpt`: one model, and what was given beside it, for any number of ranks.

    save_dir/
      global_step12/         a tag
        state/               parameters, buffers and optimizer state (torch.distributed.checkpoint)
        values.pt            plain values: optimizer settings, scheduler, client_state; read with weights_only
        random-0.pt …        random state of each rank
        MANIFEST.json        size and sha256 of each file (rlbench.checkpoint.folder)
      latest                 the tag to load

A checkpoint appears whole or not at all. Rotation removes the oldest of these checkpoints alone, after the new one is
whole. torch keeps the index of `state/` as a pickle: load checkpoints that you trust.
"""

from __future__ import annotations

import os
import re
import shutil
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from rlbench.checkpoint import folder as folders
from rlbench.checkpoint import rank_state
from rlbench.errors import CheckpointError
from rlbench.strategies.control import ControlGroup
from rlbench.units import format_bytes

KIND, STATE, VALUES, STAGE = "strategy", "state", "values.pt", "new"
TAG = re.compile(r"[\w][\w.@+=-]*")
NUMBERED = re.compile(r"global_step(\d+)$")
GB = 10**9


def write(
    control: ControlGroup,
    save_dir: str,
    tag: str | None,
    tensors: Mapping[str, Tensor],
    values: dict[str, Any],
    save_latest: bool,
    max_num: int | None,
    max_mem: float | None,
) -> tuple[str, list[str]]:
    """Write a checkpoint; collective. All ranks see one file system.

    Returns:
        Its folder, and the folders that rotation removed.

    Raises:
        CheckpointError: no room, no right to write, a bad tag, or values that could not be read again. What was
            there before is as it was.
    """
    leads, root = control.rank == 0, Path(save_dir)
    if max_num is not None and max_num < 1:
        raise CheckpointError(f"max_num={max_num}: at least the new checkpoint is kept; give 1 or more, or None.")

    def begin() -> tuple[Path, str] | None:
        if not leads:
            return None
        name = _next_tag(root) if tag is None else _checked_tag(tag)
        if (root / name).exists() and not _is_ours(root / name):
            raise CheckpointError(
                f"{root / name} is there and no checkpoint of strategy.save_ckpt; choose another tag."
            )
        aside, _ = folders.begin(root, name)
        (aside / STAGE).mkdir()
        return aside, name

    aside, name = next(p for p in control.gather(control.together("making room", begin)) if p is not None)
    stage = aside / STAGE

    def small_files() -> None:
        torch.save(rank_state.random_state(), stage / f"random-{control.rank}.pt")
        if leads:
            _save_plain(values, stage / VALUES)

    def seal() -> list[str]:
        if not leads:
            return []
        folders.publish(stage, aside / "whole", {"kind": KIND, "time": time.time(), "ranks": control.world_size})
        _put_in_place(aside / "whole", root / name)
        if save_latest:
            _point_latest(root, name)
        removed = _rotate(root, name, max_num, max_mem)
        shutil.rmtree(aside, ignore_errors=True)
        return [str(path) for path in removed]

    try:
        control.together("writing a checkpoint", _said(aside, small_files))
        _save_tensors(control, stage / STATE, tensors)
        removed = control.together("sealing a checkpoint", _said(aside, seal))
    except BaseException:
        if leads:  # what was written would go on taking the room that was wanting
            shutil.rmtree(aside, ignore_errors=True)
        raise
    return str(root / name), list(control.gather(removed)[0])


def find(load_dir: str) -> Path:
    """The checkpoint that `load_dir` names: itself; in it the one `latest` names; else the newest.

    Raises:
        CheckpointError: there is none.
    """
    root = Path(load_dir)
    if _is_ours(root):
        return root
    latest = root / folders.LATEST
    named = root / latest.read_text().strip() if latest.is_file() else None
    if named is not None and named.parent == root and _is_ours(named):
        return named
    kept = _ours(root)
    if not kept:
        seen = "does not exist" if not root.exists() else "is no checkpoint of strategy.save_ckpt and holds none"
        raise CheckpointError(f"{root} {seen}; give the folder that save_ckpt wrote into, or one of its tags.")
    return kept[-1]


def check(control: ControlGroup, folder: Path) -> None:
    """Compare every file with the manifest, on rank 0 for all; collective.

    Raises:
        CheckpointError: naming the first file that differs.
    """
    control.together("checking a checkpoint", lambda: folders.verify(folder) if control.rank == 0 else None)


def shapes_in(folder: Path) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Shape and dtype of every tensor of a checkpoint, by name."""
    metadata = dcp.FileSystemReader(folder / STATE).read_metadata().state_dict_metadata
    return {
        name: (entry.size, entry.properties.dtype)
        for name, entry in metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def read_values(folder: Path) -> dict[str, Any]:
    """The plain values of a checkpoint; nothing in it is executed."""
    return dict(torch.load(folder / VALUES, weights_only=True))


def read_tensors(control: ControlGroup, folder: Path, into: dict[str, Tensor]) -> None:
    """Fill tensors, sharded or not, with those of the same names; collective."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch says that it is alone where that is meant
            dcp.load(
                into,
                storage_reader=dcp.FileSystemReader(folder / STATE),
                process_group=control.group,
                no_dist=control.group is None,
            )
    except dcp.CheckpointException as error:
        raise CheckpointError(f"{folder} cannot be read ({error}).") from error


def restore_random(control: ControlGroup, folder: Path) -> bool:
    """Go on with the random state this rank had; False (and nothing changed) where there were more or fewer ranks."""
    if len(list(folder.glob("random-*.pt"))) != control.world_size:
        return False
    rank_state.set_random_state(torch.load(folder / f"random-{control.rank}.pt", weights_only=True))
    return True


def _save_tensors(control: ControlGroup, folder: Path, tensors: Mapping[str, Tensor]) -> None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # as above
            dcp.save(
                dict(tensors),
                storage_writer=dcp.FileSystemWriter(folder),
                process_group=control.group,
                no_dist=control.group is None,
            )
    except (OSError, RuntimeError, dcp.CheckpointException) as error:
        raise _no_room(folder.parents[1], error) from error


def _save_plain(values: dict[str, Any], path: Path) -> None:
    """Write values, and prove that they can be read without running code."""
    try:
        torch.save(values, path)
        torch.load(path, weights_only=True)
    except OSError:
        raise
    except Exception as error:  # pickle raises many kinds; all mean a value that is not plain
        culprit = [key for key, value in values.get("client_state", {}).items() if not _is_plain(value, path)]
        what = f"client_state[{culprit[0]!r}]" if culprit else "the scheduler's or optimizer's state"
        raise CheckpointError(
            f"{what} cannot be kept ({str(error).splitlines()[0]}): only numbers, text, tensors, and lists and dicts "
            "of such are, since they are read without running code."
        ) from error


def _is_plain(value: Any, beside: Path) -> bool:
    trial = beside.with_suffix(".trial")
    try:
        torch.save(value, trial)
        torch.load(trial, weights_only=True)
    except Exception:  # as above
        return False
    finally:
        trial.unlink(missing_ok=True)
    return True


def _put_in_place(whole: Path, final: Path) -> None:
    """Give a whole checkpoint its name; one of the same tag goes when the new one is safe under a name of its own."""
    if not final.exists():
        os.rename(whole, final)
    else:
        number = next(n for n in range(2, 10**6) if not final.with_name(f"{final.name}-{n}").exists())
        safe = final.with_name(f"{final.name}-{number}")
        os.rename(whole, safe)
        os.rename(final, whole.with_name("replaced"))
        os.rename(safe, final)
    folders.sync_folder(final.parent)


def _rotate(root: Path, newest: str, max_num: int | None, max_mem: float | None) -> list[Path]:
    """Remove our oldest checkpoints until `max_num` and `max_mem` gigabytes (10^9 bytes) are left; the newest stays."""
    kept = [path for path in _ours(root) if path.name != newest] + [root / newest]
    removed = []
    while len(kept) > 1 and (
        (max_num is not None and len(kept) > max_num)
        or (max_mem is not None and sum(map(_nbytes, kept)) > max_mem * GB)
    ):
        oldest = kept.pop(0)
        doomed = oldest.with_name(f".{oldest.name}.removed")  # a crash leaves no half checkpoint under its name
        shutil.rmtree(doomed, ignore_errors=True)
        os.rename(oldest, doomed)
        shutil.rmtree(doomed)
        removed.append(oldest)
    return removed


def _ours(root: Path) -> list[Path]:
    """The checkpoints of `save_ckpt` in a folder, oldest first."""
    return [path for path in folders.checkpoints_in(root) if _is_ours(path)]


def _is_ours(folder: Path) -> bool:
    manifest = folders.manifest_of(folder)
    return manifest is not None and manifest.get("kind") == KIND


def _nbytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _point_latest(root: Path, name: str) -> None:
    aside = root / f".{folders.LATEST}.new"
    aside.write_text(name)
    os.replace(aside, root / folders.LATEST)


def _next_tag(root: Path) -> str:
    numbers = [int(m[1]) for path in _ours(root) if (m := NUMBERED.match(path.name))]
    return f"global_step{max(numbers, default=0) + 1}"


def _checked_tag(tag: str) -> str:
    if not TAG.fullmatch(tag):
        raise CheckpointError(
            f"tag={tag!r} cannot name a folder inside save_dir; use letters, digits and any of _ . - + = @"
        )
    return tag


def _said(aside: Path, work: Callable[[], Any]) -> Callable[[], Any]:
    """`work`, whose failures to write say how much room there is."""

    def run() -> Any:
        try:
            return work()
        except OSError as error:
            raise _no_room(aside, error) from error

    return run


def _no_room(aside: Path, error: Exception) -> CheckpointError:
    room = os.statvfs(aside.parent)
    return CheckpointError(
        f"{aside.parent} could not be written ({error}); {format_bytes(room.f_bavail * room.f_frsize)} are free there: "
        "make room, or save elsewhere. Earlier checkpoints are as they were."
    )
