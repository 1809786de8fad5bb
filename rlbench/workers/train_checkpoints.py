"""A rank's checkpoints: training state on disk by `torch.distributed.checkpoint`, loadable with any number of ranks.

Every rank writes its shards; rank 0 seals the folder and gives it its name (`rlbench.checkpoint.folder`).
"""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from rlbench.checkpoint import folder as folders
from rlbench.checkpoint import rank_state
from rlbench.errors import CheckpointError
from rlbench.nn import BaseTrainModule
from rlbench.strategies.control import ControlGroup
from rlbench.units import format_bytes

TENSORS, SESSION = "state", "session.json"


class RankCheckpoints:
    """Writes and reads the checkpoints of one rank; every method is collective."""

    def __init__(self, module: BaseTrainModule, control: ControlGroup) -> None:
        self._module = module
        self._control = control
        self._built_with = set(rank_state.tensors_of(module, {}))

    def save(
        self, root: str, name: str, session: dict[str, Any], max_num: int | None, max_gb: float | None
    ) -> dict[str, Any]:
        """Write a checkpoint; returns its `path`, `bytes`, and what rotation `removed`. All ranks see one file system.

        Args:
            root: folder of checkpoints.
            name: of this one; a number is put behind it where it is taken.
            session: plain values, kept as JSON.
            max_num, max_gb: see `rlbench.checkpoint.folder.rotate`.

        Raises:
            CheckpointError: no room, or no right to write, or a model that no load could build; the earlier ones are
                as they were.
        """
        self._control.together("looking at what is to be saved", self._need_model_as_built)
        leads = self._control.rank == 0
        places = self._control.together(
            "making room for a checkpoint", lambda: folders.begin(Path(root), name) if leads else None
        )
        aside, final = next(p for p in self._control.gather(places) if p is not None)
        facts = {"step": session["step"], "time": time.time(), "ranks": self._control.world_size}

        def seal() -> dict[str, Any]:
            if not leads:
                return {}
            try:
                (aside / SESSION).write_text(json.dumps(session))
                size = folders.publish(aside, final, facts)
            except OSError as error:
                raise _no_room(aside, error) from error
            removed = folders.rotate(Path(root), max_num, max_gb)
            return {"path": str(final), "bytes": size, "removed": [str(path) for path in removed]}

        try:
            self._write(aside)
            done = self._control.together("sealing a checkpoint", seal)
        except BaseException:
            if leads:  # what was written would go on taking the room that was wanting
                shutil.rmtree(aside, ignore_errors=True)
            raise
        return dict(self._control.gather(done)[0])

    def load(self, path: str) -> dict[str, Any]:
        """Bring this rank to the state of a checkpoint; returns `random`: whether its random state came along.

        Raises:
            CheckpointError: damaged, or of another model; found before anything is changed where it can be.
        """
        folder = Path(path)
        leads = self._control.rank == 0
        self._control.together("checking a checkpoint", lambda: folders.verify(folder) if leads else None)
        tensors = self._control.together("preparing to load", lambda: self._targets(folder))
        try:
            reader = dcp.FileSystemReader(folder / TENSORS)
            dcp.load(tensors, storage_reader=reader, process_group=self._control.group)
        except dcp.CheckpointException as error:
            raise CheckpointError(f"{folder} cannot be read ({error}). Nothing was loaded") from error
        own = folder / f"values-{self._control.rank}.pt"
        with_random = own.exists() and self._control.world_size == len(list(folder.glob("values-*.pt")))

        def put() -> None:
            values = torch.load(own if own.exists() else folder / "values-0.pt", weights_only=True)
            if not with_random:  # ranks that were not there have no random state to go on from: this one's stays
                values["random"] = rank_state.random_state()
            rank_state.load(self._module, tensors, values)

        self._control.together("loading a checkpoint", put)
        return {"random": with_random}

    def _need_model_as_built(self) -> None:
        """Refuse a checkpoint that could not be loaded: loading builds the model from its source, as it was built."""
        differ = sorted(set(rank_state.tensors_of(self._module, {})) ^ self._built_with)
        if differ:
            raise CheckpointError(
                f"{len(differ)} tensors of the module are others than it was built with (first {differ[0]}), and a "
                "checkpoint is loaded into the model as it is built: save what was added by itself "
                "(session.train.run), or make it in on_weights_materialized. session.snapshot() keeps all of it here"
            )

    def _write(self, aside: Path) -> None:
        own = aside / f"values-{self._control.rank}.pt"
        try:
            self._control.together("writing a checkpoint", lambda: torch.save(rank_state.values_of(self._module), own))
            dcp.save(
                rank_state.sharded_tensors_of(self._module),
                storage_writer=dcp.FileSystemWriter(aside / TENSORS),
                process_group=self._control.group,
            )
        except (
            OSError,
            RuntimeError,
            dcp.CheckpointException,
        ) as error:  # torch.save says RuntimeError of a full disk
            raise _no_room(aside, error) from error

    def _targets(self, folder: Path) -> dict[str, Tensor]:
        """Tensors of this engine's own sharding for everything the checkpoint holds."""
        metadata = dcp.FileSystemReader(folder / TENSORS).read_metadata().state_dict_metadata
        shapes = {
            name: (entry.size, entry.properties.dtype)
            for name, entry in metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        present = {
            name: torch.empty_like(tensor)
            for name, tensor in rank_state.sharded_tensors_of(self._module).items()
            if not name.startswith("optimizer/")
        }
        kept = {name for name in shapes if not name.startswith("optimizer/")}
        wrong = sorted(set(present) ^ kept) or [n for n in present if present[n].shape != shapes[n][0]]
        if wrong:
            raise CheckpointError(
                f"{folder} is a checkpoint of another model: {len(wrong)} tensors differ, first {wrong[0]}"
            )
        return present | rank_state.optimizer_tensors_like(self._module, shapes)


def _no_room(aside: Path, error: Exception) -> CheckpointError:
    room = os.statvfs(aside.parent)
    return CheckpointError(
        f"{aside.parent} could not be written ({error}); {format_bytes(room.f_bavail * room.f_frsize)} are free "
        "there: make room, or save elsewhere. Earlier checkpoints are as they were"
    )
