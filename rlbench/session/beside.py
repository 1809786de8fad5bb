"""What a session keeps beside its weights: old log-probs of the batches trained on lately, the place in a stream of
prompts. Both go back with a snapshot, and are found by a kernel that comes back and a control verb without one."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np

from rlbench.data import Mixture, PromptStream, TrainBatch
from rlbench.data.base.files import written_aside
from rlbench.dispatch.link import Link
from rlbench.errors import DataError, SessionError
from rlbench.runtime import registry

D = TypeVar("D", PromptStream, Mixture, None)
KEPT = 8


class Anchors:
    """The old log-probs of session `name`, by the identity of their tokens; `KEPT` batches of each state.

    In its folder lie `KEY.npy` per batch, and `kept.json`, which says which of them count now and at each snapshot.
    `returns`: how often the policy has gone back in this kernel.
    """

    def __init__(self, name: str) -> None:
        self._folder = registry.snapshot_folder(name) / "anchors"
        self.returns = 0

    def applied(self, batch: TrainBatch) -> TrainBatch:
        """Return the batch with the old log-probs known for its tokens; the batch itself on its first step."""
        if batch.old_logprobs is None and batch.key in self._read()["now"]:
            return batch.replace(old_logprobs=np.load(self._folder / f"{batch.key}.npy"))
        return batch

    def keep(self, batch: TrainBatch, logprobs: np.ndarray) -> None:
        """Remember the log-probs, flat float32, of a batch's first step."""
        kept = self._read()
        if batch.key not in kept["now"]:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with written_aside(self._folder / f"{batch.key}.npy") as aside, aside.open("wb") as file:
                np.save(file, logprobs)
            self._write([*kept["now"], batch.key][-KEPT:], kept["snapshots"])

    def note(self, taken: Sequence[str], dropped: Sequence[str] = ()) -> None:
        """Remember which there are now at the snapshots just `taken`, and no more which there were at the `dropped`."""
        kept = self._read()
        there = {snapshot: keys for snapshot, keys in kept["snapshots"].items() if snapshot not in dropped}
        then = there | (dict.fromkeys(taken, kept["now"]) if kept["now"] else {})
        if then != kept["snapshots"]:
            self._write(kept["now"], then)

    def go_back(self, snapshot: str | None) -> None:
        """Keep those there were at a snapshot alone: a batch seen first after it will be seen by another policy."""
        self.returns += 1
        kept = self._read()
        then = kept["snapshots"].get(snapshot, [])
        if then != kept["now"]:
            self._write(then, kept["snapshots"])

    def _read(self) -> dict[str, Any]:
        return registry.read_json(self._folder / "kept.json") or {"now": [], "snapshots": {}}

    def _write(self, now: list[str], snapshots: dict[str, list[str]]) -> None:
        """Publish what is kept, then remove the files that nothing names."""
        registry.write_json(self._folder / "kept.json", {"now": now, "snapshots": snapshots})
        named = {*now, *(key for keys in snapshots.values() for key in keys)}
        for file in self._folder.glob("[!.]*.npy"):
            if file.stem not in named:
                file.unlink()


class Followed:
    """The data that a session follows."""

    def __init__(self, link: Link) -> None:
        self.data: PromptStream | Mixture | None = None
        self._link = link

    def place_events(self) -> list[dict[str, Any]]:
        """Return what tells the monitor where the stream stands."""
        return [] if self.data is None else [{"do": "set", "key": "cursor", "value": self.data.state()}]

    def note_place(self) -> None:
        """Tell the monitor where the stream stands."""
        self._link.apply(*self.place_events())

    def move_place(self) -> None:
        """Put the stream where the session now stands."""
        if self.data is None or (place := self._place()) is None:
            return
        try:
            self.data.restore(place)
        except DataError as other:  # the weights went back, and other data is followed since: that stays
            warnings.warn(f"the data that is followed stays where it is: {other}", UserWarning, stacklevel=2)
            self.note_place()

    def follow(self, data: D, fresh: bool) -> D:
        """Follow `data`, from the place the session is at unless `fresh`; None: nothing."""
        if data is None:
            if fresh:
                raise SessionError("follow(None) forgets the place: fresh=True would have no effect on it")
            self.data = None
            self._link.set(cursor=None)
            return None
        if not isinstance(data, PromptStream | Mixture):
            kind = type(data).__name__
            raise SessionError(f"follow takes prompts.stream() or rb.data.mix(…), which have a place, got {kind}")
        if not fresh and (place := self._place()) is not None:
            try:
                data.restore(place)
            except DataError as other:
                said = f"{other}. To go on with other data in this session: session.follow(data, fresh=True)"
                raise DataError(said) from None
        self.data = data
        self.note_place()
        return data

    def _place(self) -> Any:
        return self._link.state("cursor")["cursor"]
