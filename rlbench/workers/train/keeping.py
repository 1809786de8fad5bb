"""The component of a rank that keeps its state and brings it back: snapshots, checkpoints, weights, exports."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from rlbench.checkpoint import hf_folder, rank_state, writer
from rlbench.checkpoint.rank_state import State
from rlbench.errors import CheckpointError
from rlbench.results import ExportedModel, Saved
from rlbench.strategies.sharding.materialize import materialize
from rlbench.strategies.sharding.sources import TensorSource, locate
from rlbench.trainers.ppo.state import TrainerState
from rlbench.weights.manifest import Manifest
from rlbench.weights.names import check_names
from rlbench.weights.shm import ShmReader
from rlbench.workers.train.parts import RankParts
from rlbench.workers.train.snapshots import RankSnapshots

KIND, POLICY, SESSION = "session", "policy", "session.json"
LEAVES_THE_STATE = frozenset(
    {
        "policy_forward",
        "policy_forward_backward",
        "release_weights",
        "state_checksum",
        "training_checksums",
        "held_trainer",
        "module_source_path",
        "write_snapshot",
        "drop_snapshots",
        "sweep_snapshots",
        "save_checkpoint",
        "hold_back",
    }
)
"""Verbs after which parameters and optimizers are what they were: a user's forward or loss in them is given gathered
copies. They may draw random numbers and write to buffers."""
SENDS_WEIGHTS = frozenset({"stage_weights", "announce_weights", "send_weights", "export_model"})
"""Verbs of which the same holds where no hook of the user's is given the parameters."""


class Keeping:
    """Verbs of a built rank; all but `begins` are collective.

    Args:
        trainer: gives the state of the session's trainer; None without one.
        stop_requested: whether somebody asked to stop.
    """

    def __init__(
        self, parts: RankParts, trainer: Callable[[], TrainerState | None], stop_requested: Callable[[], bool]
    ) -> None:
        self._parts = parts
        self._trainer = trainer
        self._control = parts.strategy.control
        self._snapshots = RankSnapshots(parts.module, self._control, stop_requested)
        self._built_with = self._names()
        self._standing: set[str] | None = None
        """Snapshots that hold the parameters and optimizers of now; None where nobody tells which verbs are called."""

    def begins(self, verb: str) -> None:
        """Take note that `verb` is called now: it may change what the snapshots so far hold."""
        leaves_it = verb in LEAVES_THE_STATE or (verb in SENDS_WEIGHTS and not self._parts.sender.is_hooked)
        if self._standing is None or not leaves_it:
            self._standing = set()

    def write_snapshot(
        self, folder: str, before: str | None = None, durable: bool = False, stoppable: bool = True
    ) -> dict[str, int]:
        """Write the whole training state; see `RankSnapshots.write`."""
        self._parts.residency.need_kept("weights", "optimizer")
        unchanged = before in (self._standing or ())
        written = self._snapshots.write(
            folder, before, durable, self._trainer(), unchanged=unchanged, stoppable=stoppable
        )
        self._stands_at(folder)
        return written

    def read_snapshot(self, folder: str) -> dict[str, Any]:
        """Go back to a snapshot; see `RankSnapshots.put_back`.

        Gradients that wait for a step are dropped, but for those of a trainer that goes back, which wait as they did.
        """
        residency, trainer = self._parts.residency, self._trainer()
        residency.need_kept("weights", "optimizer", whole=False)
        opened = self._snapshots.open(folder, trainer)
        with self._replacing_weights(), residency.replacing(f"snapshot {Path(folder).name}"):
            done = self._snapshots.put_back(opened, trainer)
        if opened.left is None:
            self._stands_at(folder)
        return done

    def drop_snapshots(self, folders: list[str]) -> None:
        """Remove snapshots from this host."""
        self._snapshots.drop(folders)

    def sweep_snapshots(self, starts: list[str], kept: list[str]) -> None:
        """Remove from this host what is no snapshot any more, or never became one; see `RankSnapshots.sweep`."""
        self._snapshots.sweep(starts, kept)

    def save_checkpoint(
        self, root: str, name: str, session: str, max_num: int | None = None, max_gb: float | None = None
    ) -> Saved:
        """Write the whole training state to disk; see `rlbench.checkpoint.writer.save`.

        Args:
            session: values of the session's, as JSON.
        """
        self._parts.residency.need_kept("weights", "optimizer")
        self._control.together("looking at what is to be saved", self._need_model_as_built)
        states, files = {POLICY: State.of(self._parts.module)}, {SESSION: session}
        return writer.save(
            self._control, Path(root), name, states, kind=KIND, files=files, max_num=max_num, max_gb=max_gb
        )

    def load_checkpoint(self, path: str) -> dict[str, Any]:
        """Go on from a checkpoint, of whatever number of ranks; returns `random`: whether the random state came along.

        Raises:
            CheckpointError: damaged, or of another model; nothing is changed.
        """
        self._parts.residency.need("weights", "optimizer")
        state = State.of(self._parts.module)
        opened = writer.open_checkpoint(self._control, Path(path), {POLICY: state})
        part = opened.part(POLICY)
        self._control.together("comparing a checkpoint", lambda: state.check(*part, exact=False))
        with self._replacing_weights():
            self._control.together("loading a checkpoint", lambda: state.load(*part))
        if opened.random is not None:
            rank_state.set_random_state(opened.random)
        return {"random": opened.random is not None}

    def export_model(self, place: str, source: str | None, dtype: str | None = None) -> ExportedModel | None:
        """Write the weights as a Hugging Face folder, in `dtype` (None: the config's); only rank 0 returns."""
        module = self._parts.module
        self._parts.residency.need("weights")
        wanted = getattr(torch, dtype) if dtype else getattr(getattr(module, "config", None), "dtype", None)
        folder = Path(locate(source)) if source else None

        def take(tensors: Iterator[tuple[str, torch.Tensor]]) -> ExportedModel:
            cast = ((n, t.to(wanted) if wanted and t.is_floating_point() else t) for n, t in tensors)
            return hf_folder.write_folder(Path(place), hf_folder.streamed(module, cast, folder))

        return self._parts.sender.give("exporting the model", take)

    def save_weights(self, place: str, dtype: str | None) -> ExportedModel | None:
        """As `export_model`, with the tokenizer and settings of the folder the module came from, if it was one."""
        source = self._parts.module.materialization_source()
        return self.export_model(place, source if isinstance(source, str) and locate(source).is_dir() else None, dtype)

    def hold_back(self, reason: str | None) -> None:
        """Use weights and optimizer for nothing until a snapshot has replaced them, or, with None, go on with them."""
        self._parts.residency.torn = reason

    def whole_state(self) -> dict[str, torch.Tensor]:
        """Return the whole state dict on rank 0, in host memory; empty on the others."""
        self._parts.residency.need("weights")
        return hf_folder.gather_state(self._parts.module, keep=self._control.rank == 0)

    def load_weights(self, source: Any, own_names: bool) -> str:
        """Fill the parameters from a `materialization_source`, see `materialize`; gradients are dropped."""
        parts = self._parts
        parts.residency.need("weights")
        with self._replacing_weights():
            load = lambda: materialize(parts.module, source, parts.config.seed, own_names)  # noqa: E731
            return str(self._control.together("loading weights", load))

    def load_staged(self, staged: dict[str, Any]) -> str:
        """Take the weights that another engine, or an earlier one, staged in shared memory, without an optimizer.

        Args:
            staged: its manifest, as plain values.

        Raises:
            WeightSyncError: they are those of another architecture; the weights stay as they are.
        """
        parts, manifest, reader = self._parts, Manifest.from_json(staged), ShmReader()
        parts.residency.need("weights", whole=False)
        check_names(manifest.shapes, parts.sender.layout().shapes, owner="trainer")

        def load() -> str:
            tensors = {n: t for bucket in manifest.buckets for n, t in reader.read(bucket)}
            source = TensorSource("the staged weights", tuple(tensors), tensors.__getitem__, in_memory=True)
            return materialize(parts.module, source, parts.config.seed)

        try:
            with self._replacing_weights():
                return str(self._control.together("loading staged weights", load))
        finally:
            reader.close()

    def training_checksums(self) -> dict[str, str]:
        """Return sha256 of this rank's weights, optimizer and random state."""
        self._parts.residency.need_kept("weights")
        return rank_state.checksums(self._parts.module)

    def _stands_at(self, folder: str) -> None:
        if self._standing is not None:
            self._standing.add(folder)

    @contextmanager
    def _replacing_weights(self) -> Iterator[None]:
        """Drop the gradients that wait, and count what is held afterwards."""
        self._parts.policy.zero_grad()
        try:
            yield
        finally:
            self._parts.residency.measure()

    def _names(self) -> set[str]:
        return set(State(self._parts.module).tensors())

    def _need_model_as_built(self) -> None:
        """Refuse a checkpoint that could not be loaded: loading builds the model from its source, as it was built."""
        differ = sorted(self._names() ^ self._built_with)
        if differ:
            raise CheckpointError(
                f"{len(differ)} tensors of the module are others than it was built with (first {differ[0]}), and a "
                "checkpoint is loaded into the model as it is built: save what was added by itself "
                "(session.train.run), or make it in on_weights_materialized. session.snapshot() keeps all of it here"
            )
