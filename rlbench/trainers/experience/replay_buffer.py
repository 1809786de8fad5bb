"""The experience that waits to be trained on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from rlbench.errors import DataError, StateError
from rlbench.options import refuse
from rlbench.strategies.base import StrategyBase
from rlbench.trainers.experience.over_ranks import whitened
from rlbench.trainers.experience.values import PER_TOKEN, Experience


class NaiveReplayBuffer:
    """Experience of one rank, in the order it came (`items`); counted in sequences.

    Iterating gives `sample_batch_size` at a time; the newest `limit` are kept, 0: all. Experience lies on the host
    without padding in any case: the reference's `cpu_offload=False` and `packing_samples=True` are refused.
    """

    def __init__(
        self,
        sample_batch_size: int,
        limit: int = 0,
        cpu_offload: bool = True,
        packing_samples: bool = False,
        seed: int = 0,
    ) -> None:
        refuse(
            (sample_batch_size < 1 or limit < 0, "sample_batch_size is a number from 1 on, limit one from 0 on"),
            (not cpu_offload, "cpu_offload=False cannot be honoured: experience lies on the host. Leave it out"),
            (packing_samples, "packing_samples=True has no effect on a buffer: give it to the trainer"),
        )
        self.sample_batch_size, self.limit = sample_batch_size, limit
        self.items: list[Experience] = []
        self.random = np.random.default_rng(seed)

    def append(self, experience: Experience) -> None:
        """Add sequences at the end; beyond the limit the oldest go."""
        self.items.append(experience)
        spare = len(self) - self.limit if self.limit else 0
        while spare > 0:
            oldest = self.items.pop(0)
            if len(oldest) > spare:
                self.items.insert(0, oldest.rows(np.arange(spare, len(oldest))))
            spare -= len(oldest)

    def sample(self) -> Experience:
        """Draw `sample_batch_size` different sequences at random."""
        if len(self) < self.sample_batch_size:
            raise StateError(f"the buffer holds {len(self)} sequences, {self.sample_batch_size} are drawn at a time")
        rows = self.random.choice(len(self), self.sample_batch_size, replace=False)
        return Experience.joined(self.items).rows(rows)

    def clear(self) -> None:
        """Forget all sequences."""
        self.items = []

    def __len__(self) -> int:
        return sum(len(item) for item in self.items)

    def __getitem__(self, index: int) -> Experience:
        place = range(len(self))[index]
        for item in self.items:
            if place < len(item):
                return item.rows([place])
            place -= len(item)
        raise AssertionError("unreachable: the lengths of the items add up")

    def __iter__(self) -> Iterator[Experience]:
        """Iterate over the sequences in order, `sample_batch_size` at a time, the last perhaps of fewer."""
        size = self.sample_batch_size
        starts = range(0, len(self), size)
        return (self.collate_fn([self[i] for i in range(at, min(at + size, len(self)))]) for at in starts)

    @staticmethod
    def collate_fn(items: Sequence[Experience]) -> Experience:
        """Return the sequences of all items as one experience; ragged, so that nothing is padded."""
        return Experience.joined(items)

    def normalize(self, name: str, strategy: StrategyBase) -> None:
        """Whiten a column over the trained tokens of all sequences of all ranks, once; collective.

        Advantages that a maker gave are whitened where its options say so: this is for other columns, and your own.
        """
        own = name == "advantages"
        columns: list[Any] = [getattr(item.batch if own else item, name, None) for item in self.items]
        if name not in ("advantages", *PER_TOKEN) or any(column is None for column in columns):
            raise DataError(f"normalize({name!r}): wanted a column there is: advantages, {', '.join(PER_TOKEN)}")
        flat = [torch.from_numpy(c[i.batch.mask].astype(np.float64)) for c, i in zip(columns, self.items, strict=True)]
        whole = whitened(torch.cat([torch.zeros(0, dtype=torch.float64), *flat]), strategy.control)
        parts = torch.split(whole, [len(part) for part in flat]) if flat else ()
        for i, (item, part) in enumerate(zip(self.items, parts, strict=True)):
            values = np.zeros(item.batch.tokens, np.float32)
            values[item.batch.mask] = part.numpy()
            column: dict[str, Any] = {name: values}
            self.items[i] = replace(item, batch=item.batch.replace(**column)) if own else replace(item, **column)
