"""The experience that waits to be trained on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from rlbench.errors import DataError, StateError, nearest
from rlbench.strategies.base import StrategyBase
from rlbench.strategies.options.config import OptionError
from rlbench.trainers.experience.over_ranks import whitened
from rlbench.trainers.experience.values import PER_TOKEN, Experience

OF_BATCH = ("advantages",)


class NaiveReplayBuffer:
    """Experience of one rank, in the order it came (`items`); counted in sequences.

    Args:
        sample_batch_size: sequences that `sample` draws, and that iterating gives at a time.
        limit: newest sequences that are kept; 0: all.
        cpu_offload, packing_samples: the reference's; experience lies on the host without padding in any case, so that
            False and True are refused.
        seed: of `sample`.
    """

    def __init__(
        self,
        sample_batch_size: int,
        limit: int = 0,
        cpu_offload: bool = True,
        packing_samples: bool = False,
        seed: int = 0,
    ) -> None:
        if sample_batch_size < 1 or limit < 0:
            raise OptionError(
                f"sample_batch_size={sample_batch_size}, limit={limit}: they are numbers from 1 and from 0 on."
            )
        if not cpu_offload:
            raise OptionError("cpu_offload=False cannot be honoured: experience lies on the host. Leave it out.")
        if packing_samples:
            raise OptionError(
                "packing_samples=True has no effect on a buffer, where sequences have no padding in any case. Give it "
                "to the trainer."
            )
        self.sample_batch_size, self.limit = sample_batch_size, limit
        self.items: list[Experience] = []
        self._random = np.random.default_rng(seed)

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
        rows = self._random.choice(len(self), self.sample_batch_size, replace=False)
        return Experience.joined([self[int(row)] for row in rows])

    def clear(self) -> None:
        """Forget all sequences."""
        self.items = []

    def __len__(self) -> int:
        return sum(len(item) for item in self.items)

    def __getitem__(self, index: int) -> Experience:
        if not -len(self) <= index < len(self):
            raise IndexError(f"sequence {index} of {len(self)}")
        index %= len(self)
        for item in self.items:
            if index < len(item):
                return item.rows([index])
            index -= len(item)
        raise AssertionError("unreachable: the lengths of the items add up")

    def __iter__(self) -> Iterator[Experience]:
        """Iterate over the sequences in order, `sample_batch_size` at a time, the last perhaps of fewer."""
        size = self.sample_batch_size
        return (
            self.collate_fn([self[i] for i in range(start, min(start + size, len(self)))])
            for start in range(0, len(self), size)
        )

    @staticmethod
    def collate_fn(items: Sequence[Experience]) -> Experience:
        """Return the sequences of all items as one experience; ragged, so that nothing is padded."""
        return Experience.joined(items)

    def normalize(self, name: str, strategy: StrategyBase) -> None:
        """Whiten a column over the trained tokens of all sequences of all ranks, once; a rank may have none.
        Collective.

        Advantages that a maker gave are whitened already where its options say so: this is for other columns, and for
        advantages of your own.
        """
        known = [*OF_BATCH, *PER_TOKEN]
        if name not in known:
            raise DataError(f"normalize({name!r}){nearest(name, known)}: it is one of {', '.join(known)}")
        columns = [getattr(item.batch if name in OF_BATCH else item, name) for item in self.items]
        if any(column is None for column in columns):
            raise DataError(f"normalize({name!r}): the experience has no {name}")
        kept = [torch.from_numpy(c[i.batch.mask].astype(np.float64)) for c, i in zip(columns, self.items, strict=True)]
        whole = whitened(torch.cat([torch.zeros(0, dtype=torch.float64), *kept]), strategy.control)
        parts = torch.split(whole, [len(part) for part in kept]) if kept else ()
        for i, (item, part) in enumerate(zip(self.items, parts, strict=True)):
            values = np.zeros(item.batch.tokens, np.float32)
            values[item.batch.mask] = part.numpy()
            column: dict[str, Any] = {name: values}
            own = name in OF_BATCH
            self.items[i] = replace(item, batch=item.batch.replace(**column)) if own else replace(item, **column)

    def state(self) -> dict[str, Any]:
        """Return where the generator of `sample` stands, as plain JSON; the sequences are not in it."""
        return {"random": self._random.bit_generator.state}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on drawing from where `state` was taken."""
        self._random.bit_generator.state = state["random"]
