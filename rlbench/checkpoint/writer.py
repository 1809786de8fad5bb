"""The one writer of training state: a folder with `rank-0/`, `rank-1/`, …, which appears whole or not at all.

Each has its tensors (`tensor_files`, as `PART/NAME`) and values.pt, read with `weights_only`. A snapshot is such a
folder in memory, for the ranks that wrote it; a checkpoint has a manifest and lies on a disk, for any number of ranks.
"""

from __future__ import annotations

import contextlib
import io
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from rlbench.checkpoint import folder as folders
from rlbench.checkpoint.rank_state import OPTIMIZER, State, random_state, under, unplain
from rlbench.checkpoint.tensor_files import Written, is_first_replica, new_file, read_resharded, write_tensors
from rlbench.errors import CheckpointError, Stopped
from rlbench.results import Saved

VALUES = "values.pt"
Done = TypeVar("Done")


class Ranks(Protocol):
    """The group of ranks that write and read together; its methods are collective."""

    rank: int
    world_size: int

    def gather(self, value: Any) -> list[Any]: ...  # of every rank, in rank order
    def together(self, doing: str, work: Callable[[], Any]) -> Any: ...  # where it fails on one rank, it fails on all


@dataclass(frozen=True)
class Opened:
    """A folder's state for this rank, mapped, nothing of it loaded yet."""

    folder: Path
    tensors: Mapping[str, Tensor]
    parts: Mapping[str, Any]
    client_state: Mapping[str, Any]
    random: Mapping[str, Any] | None  # of this rank; None where another number of ranks wrote it

    def part(self, name: str) -> tuple[dict[str, Tensor], Mapping[str, Any]]:
        """Return tensors and values of one part."""
        if name not in self.parts:
            raise CheckpointError(f"{self.folder} was saved without its {name}; it has {', '.join(self.parts)}")
        return under(name, self.tensors), self.parts[name]


def write_part(
    ranks: Ranks,
    folder: Path,
    states: Mapping[str, State],
    client_state: Mapping[str, Any] = {},
    *,
    replicas: bool = True,
    durable: bool = False,
    writing: Callable[..., Written] = write_tensors,
) -> Written:
    """Write a rank's states by `writing`, and plain values; `replicas`: also what earlier ranks hold."""
    tensors = {f"{part}/{n}": t for part, state in states.items() for n, t in state.tensors().items()}
    if not replicas:
        tensors = {name: tensor for name, tensor in tensors.items() if is_first_replica(tensor)}
    done = writing(folder, tensors, durable=durable)
    parts = {part: state.values() for part, state in states.items()}
    values = {"parts": parts, "client_state": dict(client_state), "random": random_state(), "ranks": ranks.world_size}
    if place := unplain(dict(client_state), "client_state") or unplain(parts):
        raise CheckpointError(
            f"{place} cannot be kept: only numbers, text, tensors, and lists and dicts of such are, since they are "
            "read without running code."
        )
    buffer = io.BytesIO()
    torch.save(values, buffer)
    with folders.writing(folder), new_file(folder / VALUES, durable) as file:
        file.write(buffer.getbuffer())
    return done


def read_part(ranks: Ranks, folder: Path, states: Mapping[str, State]) -> Opened:
    """Map the states of this rank, split as its modules are; no collective, and nothing is changed."""
    own = folder / f"rank-{ranks.rank}"
    written = sorted(folder.glob("rank-*"), key=lambda path: (path != own, int(path.name.removeprefix("rank-"))))
    layouts = {part: state.module_tensors() for part, state in states.items()}

    def layout(name: str) -> Tensor | None:
        part, _, rest = name.partition("/")
        if rest.startswith(OPTIMIZER):  # as its parameter
            rest = f"parameter/{rest.split('/', 2)[2].rpartition('/')[0]}"
        return layouts.get(part, {}).get(rest)

    values, first = _values_in(written[0]), folder / "rank-0"
    client_state = _values_in(first)["client_state"] if first.is_dir() else {}
    random = values["random"] if written[0] == own and values["ranks"] == ranks.world_size else None
    return Opened(folder, read_resharded(written, layout), values["parts"], client_state, random)


def _values_in(part: Path) -> dict[str, Any]:
    try:
        return dict(torch.load(part / VALUES, weights_only=True))
    except Exception as error:  # a damaged file raises many kinds
        raise CheckpointError(
            f"{part / VALUES} cannot be read ({type(error).__name__}): it is cut or was changed"
        ) from error


def whole_or_nothing(
    ranks: Ranks,
    what: str,
    aside: Path,
    write: Callable[[Path], Done],
    publish: Callable[[], Any],
    stopped: Callable[[], bool] = lambda: False,
) -> tuple[Done, Any]:
    """Let every rank `write` its folder of `aside`, then `publish`; where one fails or is stopped, nothing is left."""
    own = aside / f"rank-{ranks.rank}"

    def write_own() -> tuple[Done | None, bool]:
        try:
            return write(own), stopped()
        except Stopped:  # raised below, on all
            return None, True

    def publish_whole() -> Any:
        apart = [rank for rank in range(ranks.world_size) if not (aside / f"rank-{rank}").is_dir()]
        if ranks.rank == 0 and apart:
            raise CheckpointError(
                f"{what} of ranks on several nodes needs a folder that all of them see, and {aside.parent} on the node "
                f"of rank 0 has no part of rank {apart[0]}: set XDG_STATE_HOME (for snapshots) or the path to shared "
                "storage"
            )
        return publish()

    try:
        done, is_stopped = ranks.together(f"writing {what}", write_own)
        if any(ranks.gather(is_stopped)):
            raise Stopped(f"{what} was stopped: nothing of it is kept, all is as before")
        return done, ranks.together(f"publishing {what}", folders.writing(aside)(publish_whole))
    except BaseException:  # what was written would go on taking the room that was wanting
        shutil.rmtree(aside if ranks.rank == 0 else own, ignore_errors=True)
        with contextlib.suppress(OSError):  # another rank's part is still there: it removes its own
            aside.rmdir()
        raise


def save(
    ranks: Ranks,
    root: Path,
    name: str,
    states: Mapping[str, State],
    *,
    kind: str,
    client_state: Mapping[str, Any] = {},
    files: Mapping[str, str | bytes] = {},
    replace: bool = False,
    latest: bool = True,
    max_num: int | None = None,
    max_gb: float | None = None,
) -> Saved:
    """Write a checkpoint, further `files` beside it, into `root`, which all ranks see, and rotate its kind; collective.

    Where `name` is taken, one of its `kind` gives way (`replace`), or a number is put behind it.
    """
    leads = ranks.rank == 0
    kept = kind if replace else None
    place = ranks.together("making room", lambda: folders.begin(root, name, kept) if leads else None)
    aside, final = ranks.gather(place)[0]

    def seal() -> Saved | None:
        if not leads:
            return None
        for file, held in files.items():
            (aside / file).write_bytes(held.encode() if isinstance(held, str) else held)
        facts = {"kind": kind, "time": time.time(), "ranks": ranks.world_size}
        size = folders.publish(aside, final, facts, latest)
        return Saved(str(final), size, tuple(map(str, folders.rotate(root, max_num, max_gb, kind))))

    def write(own: Path) -> Written:
        return write_part(ranks, own, states, client_state if leads else {}, replicas=False)

    _, saved = whole_or_nothing(ranks, "a checkpoint", aside, write, seal)
    done: Saved = ranks.gather(saved)[0]
    return done


def open_checkpoint(ranks: Ranks, folder: Path, states: Mapping[str, State]) -> Opened:
    """Compare a checkpoint with its manifest and map it for this rank; collective. Nothing is changed."""
    ranks.together("checking a checkpoint", lambda: folders.verify(folder) if ranks.rank == 0 else None)
    opened: Opened = ranks.together("reading a checkpoint", lambda: read_part(ranks, folder, states))
    return opened
