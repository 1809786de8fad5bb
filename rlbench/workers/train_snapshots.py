"""A rank's snapshots: its whole training state written aside, published by one rename, read back in place.

A snapshot is a folder outside the process (shared memory, or disk on request), so that it outlives a rank that dies.
All ranks write; then they vote; then one rank of each host renames. Until then the folder is called `….partial`, and
nobody reads it.

    <folder>/rank-<number>/           the policy's tensors (`tensor_files`), and values.pt
      trainer-<its id>/               of the session's trainer, where there was one: its tensors, and values.pkl

A trainer's values are pickled, as its experience holds prompts and labels of the user's. Only ranks that hold that
trainer, or a healed one that took over its id, read them, and only from a folder that no other user can write to.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle
import torch
from torch import Tensor

from rlbench.checkpoint import rank_state
from rlbench.checkpoint.tensor_files import read_tensors, write_tensors
from rlbench.errors import CheckpointError, Stopped
from rlbench.nn import BaseTrainModule
from rlbench.private import others_access
from rlbench.strategies.control import ControlGroup, Verdict, ranks_apart
from rlbench.trainers.trainer_state import TrainerState

VALUES, TRAINER, TRAINER_VALUES = "values.pt", "trainer-", "values.pkl"
ID = re.compile(r"[0-9a-f]{8}(\.partial)?")
"""How the name of a snapshot's folder ends, written whole or not."""
Read = tuple[Mapping[str, Tensor], dict[str, Any]]
"""The tensors and the values of one part."""


@dataclass(frozen=True)
class Opened:
    """A snapshot that fits: the policy's part, and the trainer's where there is one to go back.

    `left`: why the trainer stays where it is; None where it goes back, or there is none.
    """

    policy: Read
    trainer: Read | None
    left: str | None


class RankSnapshots:
    """Writes and reads the snapshots of one rank; every method is collective."""

    def __init__(self, module: BaseTrainModule, control: ControlGroup, stop_requested: Callable[[], bool]) -> None:
        self._module = module
        self._control = control
        self._stop_requested = stop_requested

    def write(
        self,
        folder: str,
        before: str | None,
        durable: bool,
        trainer: TrainerState | None = None,
        *,
        unchanged: bool = False,
        stoppable: bool = True,
    ) -> dict[str, int]:
        """Write this rank's state; the snapshot appears under `folder` once all ranks have theirs.

        Args:
            folder: of the whole snapshot.
            before: an earlier one, whose unchanged tensors are shared where it is still there and its owner's alone.
            durable: return only when the disk has it.
            trainer: the session's, which is kept with the policy.
            unchanged: parameters and optimizers, and all of the trainer's tensors, are known to be those of `before`.
            stoppable: whether a stop ends the writing.

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
                known = shared if shared is not None and shared.is_dir() and _is_own(shared) else None
                between = self._until_stopped(stoppable)
                done = write_tensors(  # a forward of the user's may have written to a buffer
                    aside / own, tensors, known, durable, between, lambda n: unchanged and not n.startswith("buffer/")
                )
                _save(rank_state.values_of(self._module), aside / own / VALUES, durable)
                written = {"bytes": done.nbytes, "fresh": done.fresh}
                if trainer is not None:
                    more = self._write_trainer(aside / own, known, durable, trainer, between, unchanged)
                    written = {key: written[key] + more[key] for key in written}
            except Stopped:
                pass  # the vote below tells the peers
            except Exception as error:  # a full disk on one rank: the peers must hear of it
                failure = error
            stopped = stoppable and self._stop_requested()
            verdict = Verdict.FAILED if failure else Verdict.STOP if stopped else Verdict.GO
            agreed = self._control.vote(verdict)
            if agreed is Verdict.FAILED:
                self._control.raise_together("writing a snapshot", failure)
            if agreed is Verdict.STOP:
                raise Stopped("the snapshot was stopped: nothing of it is kept, the session is as before")
            leads = self._leads()
            self._control.together("publishing a snapshot", lambda: os.rename(aside, final) if leads else None)
        return written

    def _write_trainer(
        self,
        own: Path,
        before: Path | None,
        durable: bool,
        trainer: TrainerState,
        between: Callable[[int], None],
        unchanged: bool,
    ) -> dict[str, int]:
        """Write the trainer's part into this rank's folder."""
        name = f"{TRAINER}{trainer.id}"
        known = before / name if before is not None and (before / name).is_dir() else None
        done = write_tensors(own / name, trainer.tensors(), known, durable, between, lambda name: unchanged)
        kept = None if known is None else known / TRAINER_VALUES
        try:
            blob = cloudpickle.dumps(trainer.values())
            shared = kept is not None and kept.read_bytes() == blob
            if kept is not None and shared:
                os.link(kept, own / name / TRAINER_VALUES)
            else:
                with _opened(own / name / TRAINER_VALUES, durable) as file:
                    file.write(blob)
        except Exception as error:  # no room, or a label that pickle refuses, of whatever kind
            raise CheckpointError(
                f"what waits in the trainer could not be kept in {own / name} ({type(error).__name__}: {error}): make "
                "room there, or train on its experience first"
            ) from error
        return {"bytes": done.nbytes + len(blob), "fresh": done.fresh + (0 if shared else len(blob))}

    def open(self, folder: str, trainer: TrainerState | None = None) -> Opened:
        """Read a snapshot and see that it fits; nothing is changed yet.

        Args:
            trainer: that there is now. It goes back where the snapshot has it; else only the policy does.

        Raises:
            CheckpointError: on every rank, where one cannot read its part of the policy, or another user may have
                written it.
        """
        own = Path(folder) / f"rank-{self._control.rank}"
        self._control.together("looking at a snapshot", lambda: _need_ours(own))
        gathered = self._control.gather(own.is_dir())
        if not all(gathered):
            raise CheckpointError(
                f"snapshot {Path(folder).name} has no part for rank {gathered.index(False)} of {len(gathered)}: it was "
                "dropped, or written by an engine of another size"
            )

        def read() -> Read:
            tensors, values = read_tensors(own), torch.load(own / VALUES, weights_only=True)
            rank_state.check_fits(self._module, tensors, values["optimizers"])
            return tensors, values

        policy = self._control.together("reading a snapshot", read)
        part, left = (None, None) if trainer is None else _read_trainer(own, trainer)
        reasons = [reason for reason in self._control.gather(left) if reason is not None]
        return Opened(policy, None if reasons else part, reasons[0] if reasons else None)

    def put_back(self, opened: Opened, trainer: TrainerState | None = None) -> dict[str, Any]:
        """Bring this rank to the state of a snapshot; gradients of the policy are the caller's to clear before.

        Returns:
            `checksums` of the policy; `trainer`: None without one, else its `optimizer_steps` now and `left`: why it
            stayed where it was, None where it went back.

        Raises:
            EngineError: of several ranks this one failed in the middle, and holds another state than they do; it ends.
            CheckpointError: the only rank failed in the middle; says what is torn.
        """
        self._put(opened, trainer)
        told = None if trainer is None else {"optimizer_steps": trainer.optimizer_steps, "left": opened.left}
        return {"checksums": rank_state.checksums(self._module), "trainer": told}

    def _put(self, opened: Opened, trainer: TrainerState | None) -> None:
        """Put all parts back; the other ranks do it whatever happens here."""
        torn = "the policy is"
        try:
            rank_state.load(self._module, *opened.policy)
            torn = "the policy went back whole, the session's trainer is"
            if trainer is not None and opened.trainer is not None:
                trainer.load(*opened.trainer)
            elif trainer is not None:
                trainer.stay()
            rank_state.set_random_state(opened.policy[1]["random"])  # last: whatever was drawn meanwhile
        except Exception as error:  # no memory, or a class of the user's that refuses what it once gave
            said = f"restoring a snapshot failed in the middle on rank {self._control.rank}"
            why = f"({type(error).__name__}: {error})"
            if self._control.world_size > 1:
                raise ranks_apart(f"{said} {why}, and may have been done on others") from error
            raise CheckpointError(
                f"{said} {why}: {torn} torn, partly the snapshot's and partly as before. Restore this snapshot, or "
                "another, before anything else; where that fails too, end the rank's process and session.heal()"
            ) from error

    def drop(self, folders: list[str]) -> None:
        """Remove snapshots; those that are not there are gone already."""
        leads = self._leads()
        for folder in folders if leads else ():
            shutil.rmtree(folder, ignore_errors=True)

    def sweep(self, starts: Sequence[str], kept: Sequence[str]) -> None:
        """Remove what ranks that died have left: whole snapshots and partial ones that nothing names.

        Args:
            starts: of their paths; what follows is an id.
            kept: folders to leave.
        """
        there = [path for start in starts for path in _snapshots_at(start)]
        self.drop([str(path) for path in there if str(path) not in kept])

    def checksums(self) -> dict[str, str]:
        """sha256 of this rank's weights, optimizer and random state."""
        return rank_state.checksums(self._module)

    def _leads(self) -> bool:
        """Whether this rank is the first of its host."""
        hosts = self._control.gather(socket.gethostname())
        return hosts.index(hosts[self._control.rank]) == self._control.rank

    def _until_stopped(self, stoppable: bool) -> Callable[[int], None]:
        """Ends the writing of this rank soon after a stop was asked for; the vote at the end makes it common."""

        def between(nbytes: int) -> None:
            if stoppable and self._stop_requested():
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


def _read_trainer(own: Path, trainer: TrainerState) -> tuple[Read | None, str | None]:
    """The trainer's part of a rank's folder; without one that fits, why there is none. Never raises: the policy goes
    back all the same."""
    part = own / f"{TRAINER}{trainer.id}"
    if not part.is_dir():
        other = any(own.glob(f"{TRAINER}*"))
        return None, "the snapshot is of another trainer" if other else "the snapshot was made before the trainer"
    try:
        read = read_tensors(part), cloudpickle.loads((part / TRAINER_VALUES).read_bytes())
        trainer.check(*read)
    except Exception as error:  # a damaged file, other prompts, another critic: told to whoever asked
        return None, f"its part of the snapshot does not fit: {error}"
    return read, None


def _need_ours(own: Path) -> None:
    """Refuse what another user may have written: its values are unpickled, and the names in shared memory are no
    secret."""
    part, others = _others_part(own)
    if others is not None:
        raise CheckpointError(
            f"{part} is not read: a snapshot is its owner's, with all files, and writable by nobody else, and this is "
            f"{others}. Restore another snapshot, and session.drop this one"
        )


def _others_part(own: Path) -> tuple[Path, str | None]:
    """Look through a rank's folder for what another user may have written: where, and how (None: nothing is)."""
    for part in (own.parent, own, *own.rglob("*")):
        with contextlib.suppress(FileNotFoundError):  # said by whoever needs it
            others = others_access(part.lstat())
            if others is not None:
                return part, others
    return own, None


def _is_own(own: Path) -> bool:
    """Whether a rank's folder is free of what another user may have written."""
    return _others_part(own)[1] is None


def _snapshots_at(start: str) -> list[Path]:
    """Folders whose path is `start` and a snapshot's id, on this host."""
    folder, prefix = os.path.split(start)
    found = sorted(Path(folder).iterdir()) if os.path.isdir(folder) else []
    return [path for path in found if path.name.startswith(prefix) and ID.fullmatch(path.name[len(prefix) :])]


def _save(values: dict[str, Any], path: Path, durable: bool) -> None:
    with _opened(path, durable) as file:
        torch.save(values, file)


@contextlib.contextmanager
def _opened(path: Path, durable: bool) -> Iterator[Any]:
    """A new file for its owner alone; on disk when it is closed, if `durable`."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        yield file
        if durable:
            file.flush()
            os.fsync(file.fileno())
