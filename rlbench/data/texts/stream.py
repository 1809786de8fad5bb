"""A cursor over a batch of texts: takes the next ones, epoch by epoch, and says where it stands as plain JSON.

What a loss compares stays together: the two responses of a pair, and a judged one with the responses behind it that
are judged neither way (KTO's reference point). Such a unit counts as one.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any, Self

import numpy as np

from rlbench.data.batches.batch import TrainBatch
from rlbench.data.prompts.stream import PromptStream
from rlbench.errors import Suggesting


class TextStream(Suggesting):
    """Takes texts from a batch in an order of each epoch's own, without end or for so many epochs.

    Made by `batch.stream(seed=0)`; the order is a function of seed and epoch alone. `epoch`, `position`, `taken` and
    `ended` are those of a `PromptStream`.
    """

    def __init__(self, batch: TrainBatch, seed: int = 0, shuffle: bool = True, epochs: int | None = None) -> None:
        self.batch = batch
        on_end = "repeat" if epochs is None else "stop"
        self._units = _UnitStream(_Units(batch), seed, shuffle, on_end, epochs)  # type: ignore[arg-type]

    def __len__(self) -> int:
        """How many texts (of pairs: pairs) an epoch has."""
        return len(self._units.prompts)

    def take(self, n: int) -> TrainBatch:
        """The next `n` texts, or pairs, over the end of an epoch where it repeats; fewer, or none, where it ends."""
        taken: list[Any] = self._units.take(n)
        batch = self.batch.rows(np.concatenate([np.zeros(0, np.int64), *taken]))
        if batch.pair is None:
            return batch
        number = np.repeat(np.arange(len(taken), dtype=np.int32), [len(unit) for unit in taken])
        return batch.replace(pair=np.where(batch.pair >= 0, number, -1))  # one pair may come twice, as two

    def batches(self, n: int) -> Iterator[TrainBatch]:
        """Yield `take(n)` until it ends; the last one may be smaller."""
        while len(batch := self.take(n)):
            yield batch

    @property
    def epoch(self) -> int:
        """Passes completed."""
        return self._units.epoch

    @property
    def position(self) -> int:
        """Texts taken in this pass."""
        return self._units.position

    @property
    def taken(self) -> int:
        """Texts taken so far, over all epochs."""
        return self._units.taken

    @property
    def ended(self) -> bool:
        """Whether nothing is left to take."""
        return self._units.ended

    def copy(self) -> Self:
        """Another stream of the same texts, at the same place; each goes on by itself."""
        made = copy.copy(self)
        made._units = self._units.copy()
        return made

    def state(self) -> dict[str, Any]:
        """Where it stands, as plain JSON; `restore` takes it, in any process."""
        return self._units.state()

    def restore(self, state: Mapping[str, Any]) -> Self:
        """Go to where `state` was taken, and return the stream; DataError for a state of other texts or options."""
        self._units.restore(state)
        return self

    def __repr__(self) -> str:
        return repr(self._units).replace("PromptStream", "TextStream").replace("prompts", "texts")


class _Units:
    """What is taken of a batch at once, as a stream wants its things."""

    name = ""

    def __init__(self, batch: TrainBatch) -> None:
        self._batch = batch
        first = np.arange(len(batch))  # of each row the first row of its unit
        if batch.preference is not None:
            first = np.maximum.accumulate(np.where(batch.preference == 0, 0, first))
        if batch.pair is not None:
            _, begins, inverse = np.unique(batch.pair, return_index=True, return_inverse=True)
            first = np.where(batch.pair >= 0, begins[inverse], first)
        order = np.argsort(first, kind="stable")
        self.prompts = np.split(order, np.flatnonzero(np.diff(first[order])) + 1) if len(batch) else []

    def __len__(self) -> int:
        return len(self.prompts)

    @cached_property
    def fingerprint(self) -> str:
        """Identity of the texts, and of what of them is trained."""
        digest = hashlib.sha256(self._batch.key.encode())
        for part in (self._batch.mask, self._batch.preference, self._batch.pair):
            digest.update(b"" if part is None else np.ascontiguousarray(part).tobytes())
        if (said := self._batch.verdicts) is not None:
            digest.update(repr(said.heads).encode() + np.ascontiguousarray(said.values).tobytes())
        return digest.hexdigest()[:16]


class _UnitStream(PromptStream):
    KIND = "texts"
