"""A rank's snapshots: its whole training state written aside, published by one rename, read back in place.

A snapshot is a folder outside the process (shared memory, or disk on request), so that it outlives a rank that dies.
All ranks write; then they agree; then one rank of each host renames. Until then the folder is called `….partial`, and
nobody reads it.

    <folder>/rank-<number>/           the policy, see `rlbench.checkpoint.writer`
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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
from torch import Tensor

from rlbench.checkpoint import rank_state, writer
from rlbench.checkpoint.folder import writing
from rlbench.checkpoint.rank_state import State
from rlbench.checkpoint.tensor_files import Written, new_file, read_tensors, write_tensors
from rlbench.errors import CheckpointError, Stopped
from rlbench.nn import BaseTrainModule
from rlbench.private import others_access
from rlbench.strategies.ranks.control import ControlGroup, ranks_apart
from rlbench.trainers.ppo.state import TrainerState

POLICY, TRAINER, TRAINER_VALUES = "policy", "trainer-", "values.pkl"
ID = re.compile(r"[0-9a-f]{8}(\.partial)?")
"""How the name of a snapshot's folder ends, written whole or not."""
TrainerPart = tuple[Mapping[str, Tensor], dict[str, Any]]


@dataclass(frozen=True)
class OpenedSnapshot:
    """A snapshot that fits: the policy's part, and the trainer's where there is one to go back.

    `left`: why the trainer stays where it is; None where it goes back, or there is none.
    """

    policy: writer.Opened
    trainer: TrainerPart | None
    left: str | None


class RankSnapshots:
    """Writes and reads the snapshots of one rank; every method is collective."""

    def __init__(self, module: BaseTrainModule, control: ControlGroup, stop_requested: Callable[[], bool]) -> None:
        self._module = module
        self._control = control
        self._stop_requested = stop_requested
        hosts = control.gather(socket.gethostname())
        self._leads = hosts.index(hosts[control.rank]) == control.rank  # the first of its host

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
            unchanged: parameters and optimizers, and the trainer's, are known to be those of `before`.
            stoppable: whether a stop ends the writing.

        Returns:
            `bytes` and `fresh` (those not shared) of this rank.

        Raises:
            Stopped, CheckpointError: nothing is left of the snapshot.
        """
        aside = Path(f"{folder}.partial")
        earlier = None if before is None else Path(before) / f"rank-{self._control.rank}"

        def stopped() -> bool:
            return stoppable and self._stop_requested()

        def between(nbytes: int) -> None:
            if stopped():
                raise Stopped("stopped")

        def known(name: str) -> bool:
            return unchanged and "/buffer/" not in name  # a forward of the user's may have written to a buffer

        def write(own: Path) -> dict[str, int]:
            with writing(aside):
                aside.mkdir(mode=0o700, parents=True, exist_ok=True)
            shared = earlier if earlier is not None and earlier.is_dir() and _others_part(earlier)[1] is None else None
            writes = partial(write_tensors, between=between, unchanged=known)
            states = {POLICY: State.of(self._module)}
            parts = [
                writer.write_part(self._control, own, states, durable=durable, writing=partial(writes, before=shared))
            ]
            if trainer is not None:
                parts.append(_write_trainer(own, shared, trainer, writes, durable))
            return {"bytes": sum(part.nbytes for part in parts), "fresh": sum(part.fresh for part in parts)}

        written, _ = writer.whole_or_nothing(
            self._control,
            "a snapshot",
            aside,
            write,
            lambda: os.rename(aside, folder) if self._leads else None,
            stopped,
        )
        return dict(written)

    def open(self, folder: str, trainer: TrainerState | None = None) -> OpenedSnapshot:
        """Read a snapshot and see that it fits; nothing is changed yet.

        Args:
            trainer: that there is now. It goes back where the snapshot has it; else only the policy does.

        Raises:
            CheckpointError: on every rank, where one cannot read its part of the policy, or another user may have
                written it.
        """
        own = Path(folder) / f"rank-{self._control.rank}"
        self._control.together("looking at a snapshot", lambda: _need_ours(own))
        present = self._control.gather(own.is_dir())
        if not all(present):
            raise CheckpointError(
                f"snapshot {Path(folder).name} has no part for rank {present.index(False)} of {len(present)}: it was "
                "dropped, or written by an engine of another size"
            )

        def read() -> writer.Opened:
            state = State.of(self._module)
            opened = writer.read_part(self._control, Path(folder), {POLICY: state})
            state.check(*opened.part(POLICY))
            return opened

        policy = self._control.together("reading a snapshot", read)
        part, left = (None, None) if trainer is None else _read_trainer(own, trainer)
        reasons = [reason for reason in self._control.gather(left) if reason is not None]
        return OpenedSnapshot(policy, None if reasons else part, reasons[0] if reasons else None)

    def put_back(self, opened: OpenedSnapshot, trainer: TrainerState | None = None) -> dict[str, Any]:
        """Bring this rank to the state of a snapshot; gradients of the policy are the caller's to clear before.

        Returns:
            `checksums` of the policy; `trainer`: None without one, else its `optimizer_steps` now and `left`: why it
            stayed where it was, None where it went back.

        Raises:
            EngineError: of several ranks this one failed in the middle, and holds another state than they do; it ends.
            CheckpointError: the only rank failed in the middle; says what is inconsistent.
        """
        self._put(opened, trainer)
        went = None if trainer is None else {"optimizer_steps": trainer.optimizer_steps, "left": opened.left}
        return {"checksums": rank_state.checksums(self._module), "trainer": went}

    def _put(self, opened: OpenedSnapshot, trainer: TrainerState | None) -> None:
        """Put all parts back; the other ranks do it whatever happens here."""
        torn, random = "the policy is", opened.policy.random
        assert random is not None
        try:
            State.of(self._module).load(*opened.policy.part(POLICY))
            rank_state.set_random_state(random)
            torn = "the policy went back whole, the session's trainer is"
            if trainer is not None and opened.trainer is not None:
                trainer.load(*opened.trainer)
            elif trainer is not None:
                trainer.stay()
            rank_state.set_random_state(random)  # last: whatever was drawn meanwhile
        except Exception as error:  # no memory, or a class of the user's that refuses what it once gave
            failed = f"restoring a snapshot failed in the middle on rank {self._control.rank}"
            why = f"({type(error).__name__}: {error})"
            if self._control.world_size > 1:
                raise ranks_apart(f"{failed} {why}, and may have been done on others") from error
            raise CheckpointError(
                f"{failed} {why}: {torn} torn, partly the snapshot's and partly as before. Restore this snapshot, or "
                "another, before anything else; where that fails too, end the rank's process and session.heal()"
            ) from error

    def drop(self, folders: list[str]) -> None:
        """Remove snapshots; those that are not there are gone already."""
        for folder in folders if self._leads else ():
            shutil.rmtree(folder, ignore_errors=True)

    def sweep(self, starts: Sequence[str], kept: Sequence[str]) -> None:
        """Remove what ranks that died have left: whole snapshots and partial ones that nothing names.

        Args:
            starts: of their paths; what follows is an id.
            kept: folders to leave.
        """
        there = [path for start in starts for path in _snapshots_at(start)]
        self.drop([str(path) for path in there if str(path) not in kept])


def _write_trainer(
    own: Path, before: Path | None, trainer: TrainerState, writes: Callable[..., Written], durable: bool
) -> Written:
    """Write the trainer's part into this rank's folder."""
    folder = own / f"{TRAINER}{trainer.id}"
    earlier = before / folder.name if before is not None and (before / folder.name).is_dir() else None
    done = writes(folder, trainer.tensors(), before=earlier, durable=durable)
    try:
        blob = cloudpickle.dumps(trainer.values())
        shared = earlier is not None and (earlier / TRAINER_VALUES).read_bytes() == blob
        if earlier is not None and shared:
            os.link(earlier / TRAINER_VALUES, folder / TRAINER_VALUES)
        else:
            with new_file(folder / TRAINER_VALUES, durable) as file:
                file.write(blob)
    except Exception as error:  # no room, or a label that pickle refuses, of whatever kind
        raise CheckpointError(
            f"what waits in the trainer could not be kept in {folder} ({type(error).__name__}: {error}): make room "
            "there, or train on its experience first"
        ) from error
    return Written(done.nbytes + len(blob), done.fresh + (0 if shared else len(blob)))


def _read_trainer(own: Path, trainer: TrainerState) -> tuple[TrainerPart | None, str | None]:
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


def _snapshots_at(start: str) -> list[Path]:
    """Folders whose path is `start` and a snapshot's id, on this host."""
    folder, prefix = os.path.split(start)
    found = sorted(Path(folder).iterdir()) if os.path.isdir(folder) else []
    return [path for path in found if path.name.startswith(prefix) and ID.fullmatch(path.name[len(prefix) :])]
