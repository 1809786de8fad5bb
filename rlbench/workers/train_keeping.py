"""The verbs of a rank that keep its state and bring it back: snapshots, checkpoints, the model as a folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from rlbench.strategies.hf_folder import gather_state
from rlbench.strategies.materialize import materialize
from rlbench.strategies.sources import TensorSource, locate
from rlbench.weights.manifest import Manifest
from rlbench.weights.names import check_names
from rlbench.weights.shm import ShmReader
from rlbench.workers.train_checkpoints import RankCheckpoints
from rlbench.workers.train_export import write_model
from rlbench.workers.train_snapshots import RankSnapshots

if TYPE_CHECKING:
    from rlbench.nn import BaseTrainModule
    from rlbench.strategies.fsdp2 import FSDPV2Strategy
    from rlbench.trainers.policy_step import PolicyStep
    from rlbench.workers.train_config import TrainConfig
    from rlbench.workers.train_rank import TrainRank
    from rlbench.workers.train_stage import WeightSender
    from rlbench.workers.train_states import Residency


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


class KeepingVerbs:
    """What `TrainRank` inherits; all verbs but `begins` are collective."""

    _standing: set[str] | None = None
    """Snapshots that hold the parameters and optimizers of now; None where nobody tells which verbs are called."""
    _residency: Residency
    _policy: PolicyStep
    _sender: WeightSender | None
    _strategy: FSDPV2Strategy
    config: TrainConfig

    def _built(self) -> BaseTrainModule:
        raise NotImplementedError

    def _remeasure(self) -> None:
        raise NotImplementedError

    def _keep(self, snapshots: RankSnapshots, checkpoints: RankCheckpoints) -> None:
        self._snapshots, self._checkpoints = snapshots, checkpoints

    def begins(self, verb: str) -> None:
        """The host calls `verb` now: what was kept before holds the state of now no more, if that may change it."""
        leaves_it = verb in LEAVES_THE_STATE or (
            verb in SENDS_WEIGHTS and self._sender is not None and not self._sender.is_hooked
        )
        if self._standing is None or not leaves_it:
            self._standing = set()

    def write_snapshot(
        self, folder: str, before: str | None = None, durable: bool = False, stoppable: bool = True
    ) -> dict[str, int]:
        """Write the whole training state; see `RankSnapshots.write`."""
        self._built()
        self._residency.need_kept("weights", "optimizer")
        trainer, unchanged = cast("TrainRank", self)._trainer_state(), before in (self._standing or ())
        written = self._snapshots.write(folder, before, durable, trainer, unchanged=unchanged, stoppable=stoppable)
        self._stands_at(folder)
        return written

    def _stands_at(self, folder: str) -> None:
        if self._standing is not None:
            self._standing.add(folder)

    def read_snapshot(self, folder: str) -> dict[str, Any]:
        """Go back to a snapshot; gradients that wait for a step are dropped, but for those of a trainer that goes back,
        which wait as they did then. See `RankSnapshots.put_back`."""
        self._built()
        self._residency.need_kept("weights", "optimizer", whole=False)
        trainer = cast("TrainRank", self)._trainer_state()
        opened = self._snapshots.open(folder, trainer)
        self._policy.zero_grad()
        try:
            with self._residency.replacing(f"snapshot {Path(folder).name}"):
                done = self._snapshots.put_back(opened, trainer)
            if opened.left is None:
                self._stands_at(folder)
            return done
        finally:
            self._remeasure()

    def drop_snapshots(self, folders: list[str]) -> None:
        """Remove snapshots from this host."""
        self._built()
        self._snapshots.drop(folders)

    def sweep_snapshots(self, starts: list[str], kept: list[str]) -> None:
        """Remove from this host what is no snapshot any more, or never became one; see `RankSnapshots.sweep`."""
        self._built()
        self._snapshots.sweep(starts, kept)

    def save_checkpoint(
        self,
        root: str,
        name: str,
        session: dict[str, Any],
        max_num: int | None = None,
        max_gb: float | None = None,
    ) -> dict[str, Any]:
        """Write the whole training state to disk; see `RankCheckpoints.save`."""
        self._built()
        self._residency.need_kept("weights", "optimizer")
        return self._checkpoints.save(root, name, session, max_num, max_gb)

    def load_checkpoint(self, path: str) -> dict[str, Any]:
        """Go on from a checkpoint, of whatever number of ranks; see `RankCheckpoints.load`."""
        self._built()
        self._residency.need("weights", "optimizer")
        self._policy.zero_grad()
        try:
            return self._checkpoints.load(path)
        finally:
            self._remeasure()

    def export_model(self, place: str, source: str | None, dtype: str | None = None) -> dict[str, Any] | None:
        """Write the weights as a Hugging Face folder, in `dtype` (None: the config's); only rank 0 returns."""
        module = self._built()
        assert self._sender is not None
        self._residency.need("weights")
        wanted = getattr(torch, dtype) if dtype else getattr(getattr(module, "config", None), "dtype", None)
        folder = Path(locate(source)) if source else None

        def take(tensors: Iterator[tuple[str, torch.Tensor]]) -> dict[str, Any]:
            cast = ((n, t.to(wanted) if wanted and t.is_floating_point() else t) for n, t in tensors)
            return write_model(Path(place), module, cast, folder)

        return self._sender.give("exporting the model", take)

    def hold_back(self, reason: str | None) -> None:
        """Use weights and optimizer for nothing until a snapshot has replaced them, or, with None, go on with them."""
        self._built()
        self._residency.torn = reason

    def save_weights(self, place: str, dtype: str | None) -> dict[str, Any] | None:
        """As `export_model`, with the tokenizer and settings of the folder the module came from, if it was one."""
        source = self._built().materialization_source()
        return self.export_model(place, source if isinstance(source, str) and locate(source).is_dir() else None, dtype)

    def whole_state(self) -> dict[str, torch.Tensor]:
        """The whole state dict on rank 0, in host memory; empty on the others."""
        module = self._built()
        self._residency.need("weights")
        return gather_state(module, keep=self._strategy.is_rank_0())

    def load_weights(self, source: Any, own_names: bool) -> str:
        """Fill the parameters from a `materialization_source`, see `materialize`; gradients are dropped."""
        module = self._built()
        self._residency.need("weights")
        self._policy.zero_grad()
        try:
            load = lambda: materialize(module, source, self.config.seed, own_names)  # noqa: E731
            return str(self._strategy.control.together("loading weights", load))
        finally:
            self._remeasure()

    def load_staged(self, staged: dict[str, Any]) -> str:
        """Take the weights that another engine, or an earlier one, staged in shared memory; no optimizer comes with
        them.

        Args:
            staged: its manifest, as plain values.

        Raises:
            WeightSyncError: they are those of another architecture; the weights stay as they are.
        """
        module, manifest = self._built(), Manifest.from_json(staged)
        self._residency.need("weights", whole=False)
        assert self._sender is not None
        check_names(manifest.shapes, self._sender.layout().shapes, owner="trainer")
        self._policy.zero_grad()
        reader = ShmReader()

        def load() -> str:
            tensors = {n: t for bucket in manifest.buckets for n, t in reader.read(bucket)}
            source = TensorSource("the staged weights", tuple(tensors), tensors.__getitem__, in_memory=True)
            return materialize(module, source, self.config.seed)

        try:
            return str(self._strategy.control.together("loading staged weights", load))
        finally:
            reader.close()
            self._remeasure()

    def training_checksums(self) -> dict[str, str]:
        """sha256 of this rank's weights, optimizer and random state, as strings."""
        self._built()
        self._residency.need_kept("weights")
        return self._snapshots.checksums()
