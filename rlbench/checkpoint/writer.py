"""The one writer of training state: each rank writes its part of a folder, which appears whole or not at all.

    FOLDER/
      rank-0/          index.json and 0.bin, 1.bin, …: its tensors (`tensor_files`), under `PART/…`
        values.pt      what is no tensor: by part, `client_state` of the caller's, and the rank's random state
      rank-1/ …
      MANIFEST.json    of a checkpoint (`folder`)

A snapshot is such a folder in memory, for the ranks that wrote it. A checkpoint is one on a disk that all ranks see,
with a manifest, for any number of ranks. Values are read with `weights_only`: nothing in a checkpoint is executed.
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
from rlbench.checkpoint.rank_state import State, random_state, under, unplain
from rlbench.checkpoint.tensor_files import Written, is_first_replica, new_file, read_resharded, write_tensors
from rlbench.errors import CheckpointError, Stopped
from rlbench.results import Saved

VALUES = "values.pt"
Done = TypeVar("Done")
Published = TypeVar("Published")


class Ranks(Protocol):
    """The group of ranks that write and read together; its methods are collective."""

    rank: int
    world_size: int

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value, in rank order."""

    def together(self, doing: str, work: Callable[[], Any]) -> Any:
        """Run `work` on every rank; if it fails on one, it fails on all."""


@dataclass(frozen=True)
class Opened:
    """A folder's state for this rank, mapped, nothing of it loaded yet.

    `random`: this rank's random state; None where another number of ranks wrote it.
    """

    folder: Path
    tensors: Mapping[str, Tensor]
    parts: Mapping[str, Any]
    client_state: Mapping[str, Any]
    random: Mapping[str, Any] | None

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
    """Write a rank's states; returns the bytes of its tensors.

    Args:
        client_state: plain values of the caller's.
        replicas: whether also those parts of sharded tensors are written that an earlier rank has.
        durable: return only when the disk has it.
        writing: `write_tensors`, with what the caller asks of it.
    """
    tensors = {f"{part}/{n}": t for part, state in states.items() for n, t in state.tensors().items()}
    if not replicas:
        tensors = {name: tensor for name, tensor in tensors.items() if is_first_replica(tensor)}
    done = writing(folder, tensors, durable=durable)
    parts = {part: state.values() for part, state in states.items()}
    values = {"parts": parts, "client_state": dict(client_state), "random": random_state(), "ranks": ranks.world_size}
    buffer = io.BytesIO()
    try:
        torch.save(values, buffer)
        torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    except Exception as error:  # pickle raises many kinds; all mean a value that is not plain
        raise CheckpointError(
            f"{unplain(dict(client_state), 'client_state') or unplain(parts)} cannot be kept: only numbers, text, "
            "tensors, and lists and dicts of such are, since they are read without running code."
        ) from error
    with folders.writing(folder), new_file(folder / VALUES, durable) as file:
        file.write(buffer.getbuffer())
    return done


def read_part(ranks: Ranks, folder: Path, states: Mapping[str, State]) -> Opened:
    """Read the states of this rank, split as its modules are; no collective, and nothing is changed.

    Args:
        states: by part; others are left out.
    """
    own = folder / f"rank-{ranks.rank}"
    written = sorted(folder.glob("rank-*"), key=lambda path: (path != own, int(path.name.removeprefix("rank-"))))
    layouts = {part: state.layout() for part, state in states.items()}

    def layout(name: str) -> Tensor | None:
        part, _, rest = name.partition("/")
        return layouts[part](rest) if part in layouts else None

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
    publish: Callable[[], Published],
    stopped: Callable[[], bool] = lambda: False,
) -> tuple[Done, Published]:
    """Let every rank `write` its folder of `aside`, then `publish`; where one fails or is stopped, nothing is left.

    Raises:
        Stopped: a rank was, also while it wrote.
    """
    own = aside / f"rank-{ranks.rank}"

    def written() -> tuple[Done | None, bool]:
        try:
            return write(own), stopped()
        except Stopped:  # told below, to all
            return None, True

    def published() -> Published:
        with folders.writing(aside):
            return publish()

    try:
        done, is_stopped = ranks.together(f"writing {what}", written)
        if any(ranks.gather(is_stopped)):
            raise Stopped(f"{what} was stopped: nothing of it is kept, all is as before")
        return done, ranks.together(f"publishing {what}", published)
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
    files: Mapping[str, str] = {},
    replace: bool = False,
    latest: bool = True,
    max_num: int | None = None,
    max_gb: float | None = None,
) -> Saved:
    """Write a checkpoint; collective. All ranks see one file system.

    Args:
        root: folder of checkpoints.
        name: of this one; where it is taken, one of its kind gives way (`replace`), or a number is put behind it.
        states: by part.
        kind: who loads it; rotation looks at those of a kind alone.
        client_state: plain values, of rank 0.
        files: further files, by name.
        latest, max_num, max_gb: see `rlbench.checkpoint.folder.publish` and `rotate`.

    Raises:
        CheckpointError: no room, no right to write, or values that could not be read again. What was there before is as
            it was.
    """
    leads = ranks.rank == 0
    place = ranks.together(
        "making room for a checkpoint", lambda: folders.begin(root, name, kind if replace else None) if leads else None
    )
    aside, final = ranks.gather(place)[0]

    def seal() -> Saved | None:
        if not leads:
            return None
        for file, text in files.items():
            (aside / file).write_text(text)
        facts = {"kind": kind, "time": time.time(), "ranks": ranks.world_size}
        size = folders.publish(aside, final, facts, latest)
        return Saved(str(final), size, tuple(map(str, folders.rotate(root, max_num, max_gb, kind))))

    def write(own: Path) -> Written:
        return write_part(ranks, own, states, client_state if leads else {}, replicas=False)

    _, saved = whole_or_nothing(ranks, "a checkpoint", aside, write, seal)
    done: Saved = ranks.gather(saved)[0]
    return done


def open_checkpoint(ranks: Ranks, folder: Path, states: Mapping[str, State]) -> Opened:
    """Compare a checkpoint with its manifest and read it for this rank; collective. Nothing is changed.

    Raises:
        CheckpointError: damaged, naming the first file that is.
    """
    ranks.together("checking a checkpoint", lambda: folders.verify(folder) if ranks.rank == 0 else None)
    opened: Opened = ranks.together("reading a checkpoint", lambda: read_part(ranks, folder, states))
    return opened
