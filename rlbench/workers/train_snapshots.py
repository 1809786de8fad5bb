"""A rank's snapshots: its whole training state written aside, published by one rename, read back in place.

A snapshot is a folder outside the process (shared memory, or disk on request), so that it outlives a rank that dies.
All ranks write; then they vote; then one rank of each host renames. Until then the folder is called `….partial`, and
nobody reads it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from rlbench.checkpoint import rank_state
from rlbench.checkpoint.tensor_files import read_tensors, write_tensors
from rlbench.errors import CheckpointError, Stopped
from rlbench.nn import BaseTrainModule
from rlbench.strategies.control import ControlGroup, Verdict

VALUES = "values.pt"

class RankSnapshots:
    """Writes and reads the snapshots of one rank; every method is collective."""

    def __init__(
        self, module: BaseTrainModule, control: ControlGroup, stop_requested: Callable[[], bool]
    ) -> None:
        self._module = module
        self._control = control
        self._stop_requested = stop_requested

    def write(self, folder: str, before: str | None, durable: bool) -> dict[str, int]:
        """Write this rank's state; the snapshot appears under `folder` once all ranks have theirs.

        Args:
            folder: of the whole snapshot.
            before: an earlier one, whose unchanged tensors are shared.
            durable: return only when the disk has it.

        Returns:
            `bytes` and `fresh` (those not shared) of this rank.

        Raises:
            Stopped, CheckpointError: nothing is left of the snapshot.
        """
        final, aside = Path(folder), Path(f"{folder}.partial")
        own = f"rank-{self._control.rank}"
        shared = Path(before) / own if before is not None else None
        failure: Exception | None = None
        written: dict[str, int] = {}
        with self._removed_on_failure(aside):
            try:
                aside.mkdir(mode=0o700, parents=True, exist_ok=True)
                tensors = rank_state.tensors_of(self._module)
                known = shared if shared is not None and shared.is_dir() else None
                done = write_tensors(aside / own, tensors, known, durable, self._until_stopped())
                _save(rank_state.values_of(self._module), aside / own / VALUES, durable)
                written = {"bytes": done.nbytes, "fresh": done.fresh}
            except Stopped:
                pass  # the vote below tells the peers
            except Exception as error:  # a full disk on one rank: the peers must hear of it
                failure = error
            verdict = Verdict.FAILED if failure else Verdict.STOP if self._stop_requested() else Verdict.GO
            agreed = self._control.vote(verdict)
            if agreed is Verdict.FAILED:
                self._control.raise_together("writing a snapshot", failure)
            if agreed is Verdict.STOP:
                raise Stopped("the snapshot was stopped: nothing of it is kept, the session is as before")
            leads = self._leads()
            self._control.together(
                "publishing a snapshot", lambda: os.rename(aside, final) if leads else None
            )
        return written

    def read(self, folder: str) -> dict[str, str]:
        """Bring this rank to the state of a snapshot; returns its checksums. Gradients are the caller's to clear.

        Raises:
            CheckpointError: on every rank, before any is changed, where one cannot read its part.
        """
        own = Path(folder) / f"rank-{self._control.rank}"
        gathered = self._control.gather(own.is_dir())
        if not all(gathered):
            raise CheckpointError(
                f"snapshot {Path(folder).name} has no part for rank {gathered.index(False)} of {len(gathered)}: it was "
                "dropped, or written by an engine of another size"
            )
        tensors, values = self._control.together(
            "reading a snapshot", lambda: (read_tensors(own), torch.load(own / VALUES, weights_only=True))
        )
        self._control.together(
            "restoring a snapshot", lambda: rank_state.load(self._module, tensors, values)
        )
        return rank_state.checksums(self._module)

    def drop(self, folders: list[str]) -> None:
        """Remove snapshots; those that are not there are gone already."""
        leads = self._leads()
        for folder in folders if leads else ():
            shutil.rmtree(folder, ignore_errors=True)

    def checksums(self) -> dict[str, str]:
        """sha256 of this rank's weights, optimizer and random state."""
        return rank_state.checksums(self._module)

    def _leads(self) -> bool:
        """Whether this rank is the first of its host."""
        hosts = self._control.gather(socket.gethostname())
        return hosts.index(hosts[self._control.rank]) == self._control.rank

    def _until_stopped(self) -> Callable[[int], None]:
        """Ends the writing of this rank soon after a stop was asked for; the vote at the end makes it common."""

        def between(nbytes: int) -> None:
            if self._stop_requested():
                raise Stopped("stopped")

        return between

    @contextlib.contextmanager
    def _removed_on_failure(self, aside: Path) -> Iterator[None]:
        try:
            yield
        except BaseException:
            shutil.rmtree(aside / f"rank-{self._control.rank}", ignore_errors=True)
            with contextlib.suppress(OSError):  # another rank's part is still there: it removes its own
                aside.rmdir()
            raise


def _save(values: dict[str, Any], path: Path, durable: bool) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        torch.save(values, file)
        if durable:
            file.flush()
            os.fsync(file.fileno())
