"""Old log-probs of the batches trained on lately, by the identity of their tokens.

They lie in the session's folder, so that a kernel that comes back, and a control verb without one, go on with the
ratios the batch had: `KEY.npy` per batch, and `kept.json`, which says which of them count now and which at each
snapshot. That file is the one owner; it is read whenever it is asked and replaced by a rename.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from rlbench.data import TrainBatch
from rlbench.runtime import registry

KEPT = 8


class Anchors:
    """The old log-probs of session `name`; `KEPT` batches of each state."""

    def __init__(self, name: str) -> None:
        self._folder = registry.snapshot_folder(name) / "anchors"

    def applied(self, batch: TrainBatch) -> TrainBatch:
        """The batch with the old log-probs known for its tokens; the batch itself on its first step."""
        if batch.old_logprobs is None and batch.key in self._read()["now"]:
            return batch.replace(old_logprobs=np.load(self._file(batch.key)))
        return batch

    def keep(self, batch: TrainBatch, logprobs: np.ndarray) -> None:
        """Remember the log-probs, flat float32, of a batch's first step."""
        kept = self._read()
        if batch.key in kept["now"]:
            return
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        aside = self._folder / f".{batch.key}.{os.getpid()}.npy"
        np.save(aside, logprobs)
        aside.rename(self._file(batch.key))
        self._write(kept | {"now": [*kept["now"], batch.key][-KEPT:]})

    def mark(self, snapshot: str) -> None:
        """Remember which there are at a snapshot."""
        kept = self._read()
        if kept["now"]:
            self._write(kept | {"snapshots": kept["snapshots"] | {snapshot: kept["now"]}})

    def go_back(self, snapshot: str | None) -> None:
        """Keep those there were at a snapshot alone: a batch seen first after it will be seen by another policy."""
        kept = self._read()
        then = kept["snapshots"].get(snapshot, [])
        if then != kept["now"]:
            self._write(kept | {"now": then})

    def forget(self, snapshot: str) -> None:
        """The snapshot is dropped."""
        kept = self._read()
        if snapshot in kept["snapshots"]:
            self._write(kept | {"snapshots": {k: v for k, v in kept["snapshots"].items() if k != snapshot}})

    def _file(self, key: str) -> Path:
        return self._folder / f"{key}.npy"

    def _read(self) -> dict[str, Any]:
        return registry.read_json(self._folder / "kept.json") or {"now": [], "snapshots": {}}

    def _write(self, kept: dict[str, Any]) -> None:
        """Publish what is kept, then remove the files that nothing names."""
        registry.write_json(self._folder / "kept.json", kept)
        named = {*kept["now"], *(key for keys in kept["snapshots"].values() for key in keys)}
        for file in self._folder.glob("[!.]*.npy"):
            if file.stem not in named:
                file.unlink()
