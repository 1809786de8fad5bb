"""The component of a rank that keeps snapshots: its whole training state written aside, read back in place.

A snapshot is a folder outside the process (shared memory, or disk on request), so that it outlives a rank that dies.
All ranks write; then they agree; then one rank of each host renames. Until then it is called `….partial`.

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
import time
from collections.abc import Callable, Mapping, Sequence
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
from rlbench.private import others_access
from rlbench.strategies.ranks.control import ControlGroup, ranks_apart
from rlbench.trainers.ppo.state import TrainerState
from rlbench.workers.train.config import ID_LENGTH, AroundStep
from rlbench.workers.train.parts import RankParts
from rlbench.workers.train.policy import Policy
from rlbench.workers.train.setup import Setup, TrainingSetup
from rlbench.workers.train.trainer import HeldTrainer

POLICY, TRAINER, TRAINER_VALUES = "policy", "trainer-", "values.pkl"
ID = re.compile(rf"[0-9a-f]{{{ID_LENGTH}}}(\.partial)?")
"""How the name of a snapshot's folder ends, written whole or not."""
TrainerPart = tuple[Mapping[str, Tensor], dict[str, Any]]
LEAVES_THE_STATE = frozenset(
    {
        "policy_forward",
        "policy_forward_backward",
        "loss_states",
        "release_weights",
        "state_checksum",
        "training_checksums",
        "held_trainer",
        "held_beside",
        "trained_on",
        "module_source_path",
        "frozen_by",
        "write_snapshot",
        "drop_snapshots",
        "sweep_snapshots",
        "save_checkpoint",
        "hold_back",
        "kept_optim_step",
    }
)
"""Verbs after which parameters and optimizers are what they were, or that say themselves when they change: a user's
forward or loss in them is given gathered copies. They may draw random numbers and write to buffers."""
SENDS_WEIGHTS = frozenset(
    {"stage_weights", "announce_weights", "send_weights", "lend_snapshot", "export_model", "export_adapter"}
)
"""Verbs of which the same holds where no hook of the user's is given the parameters."""


class Snapshots:
    """Verbs of a built rank; all but `begins` are collective."""

    def __init__(
        self,
        parts: RankParts,
        trainer: HeldTrainer,
        policy: Policy,
        setup: TrainingSetup,
        stop_requested: Callable[[], bool],
    ) -> None:
        self._residency, self._policy, self._sender = parts.residency, parts.policy, parts.sender
        self._policy_verbs, self._setup = policy, setup
        self._module, self._control = parts.module, parts.strategy.control
        self._trainer, self._stop_requested = trainer, stop_requested
        self._leads = self._control.rank == 0
        self._standing: set[str] | None = None
        """Snapshots that hold the parameters and optimizers of now; None where nobody tells which verbs are called."""

    def begins(self, verb: str) -> None:
        """Take note that `verb` is called now: it may change what the snapshots so far hold."""
        leaves_it = verb in LEAVES_THE_STATE or (verb in SENDS_WEIGHTS and not self._sender.is_hooked)
        if self._standing is None or not leaves_it:
            self._standing = set()

    def write_snapshot(
        self,
        folder: str,
        before: str | None = None,
        durable: bool = False,
        stoppable: bool = True,
        spare: Sequence[str] = (),
    ) -> dict[str, int]:
        """Write the whole training state, under `folder` once all ranks have theirs; return `bytes` and `fresh` (those
        that are not shared with `before`, an earlier one). `durable`: return only when the disk has it. `spare`:
        snapshots that nobody goes back to, whose memory may be written over."""
        self._residency.need_kept("weights", "optimizer")
        unchanged = before in (self._standing or ())
        trainer = self._trainer.trainer_state()
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
            policy = partial(writes, before=shared, spare=[Path(one) / own.name for one in spare])
            states = {POLICY: State.of(self._module)}
            parts = [writer.write_part(self._control, own, states, durable=durable, writing=policy)]
            if trainer is not None:
                parts.append(_write_trainer(own, shared, trainer, writes, durable))
            return {"bytes": sum(part.nbytes for part in parts), "fresh": sum(part.fresh for part in parts)}

        publish = lambda: os.rename(aside, folder) if self._leads else None  # noqa: E731
        written, _ = writer.whole_or_nothing(self._control, "a snapshot", aside, write, publish, stopped)
        if self._standing is not None:
            self._standing.add(folder)
        return dict(written)

    def kept_optim_step(self, options: dict[str, Any], around: AroundStep) -> dict[str, Any]:
        """Step as `policy_optim_step`, between two snapshots; returns also what was written `before` and `after`, or
        why it `failed` (the room was wanting), and of the seconds those of the `copies`."""
        begin = time.perf_counter()
        before = self._tried(around.before, around.earlier, around.spare)
        kept_s, self._standing = time.perf_counter() - begin, set()
        try:
            done = self._policy_verbs.policy_optim_step(options)
        except BaseException:  # nobody would name it
            self.drop_snapshots([around.before])
            raise
        begin = time.perf_counter()
        after = self._tried(around.after, None if "failed" in before else around.before, around.spare)
        self.drop_snapshots(around.spare)
        seconds = done["seconds"] | {"copies": kept_s + time.perf_counter() - begin}
        return done | {"before": before, "after": after, "seconds": seconds}

    def _tried(self, folder: str, earlier: str | None, spare: Sequence[str]) -> dict[str, Any]:
        """Write a snapshot; where the room is wanting, once more without what is spare."""
        try:
            return self.write_snapshot(folder, earlier, stoppable=False, spare=spare)
        except CheckpointError as error:
            if any(self._control.gather(any(map(os.path.isdir, spare)))):
                self.drop_snapshots(list(spare))
                return self._tried(folder, earlier, ())
            return {"failed": str(error)}

    def read_snapshot(self, folder: str, setup: Setup | None = None) -> dict[str, Any]:
        """Go back to a snapshot, the trainer too where it is there (`left` says why not), with the gradients that wait
        in it; others are dropped. `setup`: what was trained by then, None: as now. Returns `checksums` of the policy,
        where the `trainer` is, and what `TrainingSetup.set_up` returns as `setup`."""
        self._residency.need_kept("weights", "optimizer", whole=False)
        with self._setup.becoming(setup) as dropped:
            trainer = None if dropped else self._trainer.trainer_state()
            policy, part, left = self._opened(folder, trainer)
        self._policy.zero_grad()
        try:
            with self._residency.replacing(f"snapshot {Path(folder).name}"):
                self._put_back(policy, part, trainer)
        finally:
            self._residency.measure()
        if left is None and self._standing is not None:
            self._standing.add(folder)
        went = None if trainer is None else {"optimizer_steps": trainer.optimizer_steps, "left": left}
        found = {**self._setup.facts(), "trainer": dropped}
        return {"checksums": rank_state.checksums(self._module), "trainer": went, "setup": found}

    def _opened(
        self, folder: str, trainer: TrainerState | None
    ) -> tuple[writer.Opened, TrainerPart | None, str | None]:
        """Read a snapshot and see that it fits: its policy, the trainer's part, and why that stays where it is."""
        own = Path(folder) / f"rank-{self._control.rank}"
        policy = opened_policy(self._control, State.of(self._module), folder, State.check)
        part, left = (None, None) if trainer is None else _read_trainer(own, trainer)
        reasons = [reason for reason in self._control.gather(left) if reason is not None]
        return (policy, None, reasons[0]) if reasons else (policy, part, None)

    def _put_back(self, policy: writer.Opened, part: TrainerPart | None, trainer: TrainerState | None) -> None:
        """Put all parts back; the other ranks do it whatever happens here."""
        torn = "the policy is"
        random = policy.random or rank_state.random_state()  # of another number of ranks: each goes on drawing its own
        try:
            State.of(self._module).load(*policy.part(POLICY))
            rank_state.set_random_state(random)
            torn = "the policy went back whole, the session's trainer is"
            if trainer is not None and part is not None:
                trainer.load(*part)
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

    def drop_snapshots(self, folders: list[str]) -> None:
        """Remove snapshots; those that are not there are gone already."""
        for folder in folders if self._leads else ():
            shutil.rmtree(folder, ignore_errors=True)

    def sweep_snapshots(self, starts: list[str], named: list[str]) -> None:
        """Remove what ranks that died have left: snapshots, whole and partial, at `starts` that are not `named`."""
        for start in starts:
            folder, prefix = os.path.split(start)
            names = os.listdir(folder) if os.path.isdir(folder) else []
            mine = [name for name in names if name.startswith(prefix) and ID.fullmatch(name[len(prefix) :])]
            self.drop_snapshots([path for name in mine if (path := os.path.join(folder, name)) not in named])

    def hold_back(self, reason: str | None) -> None:
        """Use weights and optimizer for nothing until a snapshot has replaced them, or, with None, go on with them."""
        self._residency.torn = reason


def opened_policy(
    control: ControlGroup,
    state: State,
    folder: str,
    check: Callable[[State, dict[str, Tensor], Mapping[str, Any]], Any],
) -> writer.Opened:
    """Map a snapshot's policy as this rank's module is split, and let `check` see that it fits; collective."""

    def need_ours() -> None:
        """Its values are unpickled, and the names in shared memory are no secret."""
        part, others = _others_part(Path(folder) / f"rank-{control.rank}")
        if others is not None:
            raise CheckpointError(
                f"{part} is not read: a snapshot is its owner's, with all files, and writable by nobody else, and "
                f"this is {others}. Restore another snapshot, and session.drop this one"
            )

    control.together("looking at a snapshot", need_ours)
    present = control.gather(any(Path(folder).glob("rank-*")))
    if not all(present):
        raise CheckpointError(
            f"snapshot {Path(folder).name} is not there for rank {present.index(False)} of {len(present)}: it was "
            "dropped, or lies on another node"
        )

    def read() -> writer.Opened:
        opened = writer.read_part(control, Path(folder), {POLICY: state})
        check(state, *opened.part(POLICY))
        return opened

    opened: writer.Opened = control.together("reading a snapshot", read)
    return opened


def _write_trainer(
    own: Path, before: Path | None, trainer: TrainerState, writes: Callable[..., Written], durable: bool
) -> Written:
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
    """Read the trainer's part; without one that fits, say why. Never raises: the policy goes back all the same."""
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


def _others_part(own: Path) -> tuple[Path, str | None]:
    """Look through a rank's folder for what another user may have written: where, and how (None: nothing is)."""
    for part in (own.parent, own, *own.rglob("*")):
        with contextlib.suppress(FileNotFoundError):  # said by whoever needs it
            others = others_access(part.lstat())
            if others is not None:
                return part, others
    return own, None
