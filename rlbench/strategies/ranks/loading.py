"""A data loader for each rank's share of a data set."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sized
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, Sampler

from rlbench.errors import DataError

if TYPE_CHECKING:
    from rlbench.strategies.base import StrategyBase


class RankSampler(Sampler[int]):
    """Which items a rank reads: every `ranks`-th, of an order that all ranks share and that differs by epoch.

    An item is read once an epoch, or, where the last ones do not go round and `drop_last` is set, not at all;
    `torch.utils.data.DistributedSampler` repeats some. `consumed` items of the first epoch were read before, by all
    ranks together.
    """

    def __init__(
        self, count: int, rank: int, ranks: int, *, shuffle: bool, seed: int, drop_last: bool, consumed: int
    ) -> None:
        if not 0 <= consumed <= count:
            raise DataError(f"consumed_samples={consumed}: the data set has {count} items; give those of this epoch.")
        self._count, self._rank, self._ranks, self._drop_last = count, rank, ranks, drop_last
        self._shuffle, self._seed, self._consumed, self._epoch = shuffle, seed, consumed, 0

    def set_epoch(self, epoch: int, consumed_samples: int = 0) -> None:
        """Give the order of another epoch from now on, after the items that were read of it."""
        self._epoch, self._consumed = epoch, consumed_samples

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self._seed + self._epoch)
        order = torch.randperm(self._count, generator=generator) if self._shuffle else torch.arange(self._count)
        left = order[self._consumed :]
        if self._drop_last:
            left = left[: len(left) // self._ranks * self._ranks]
        return iter(left[self._rank :: self._ranks].tolist())

    def __len__(self) -> int:
        left = self._count - self._consumed
        return left // self._ranks if self._drop_last else -(-(left - self._rank) // self._ranks)


class Loading:
    """Makes the data loaders of a strategy."""

    def __init__(self, strategy: StrategyBase) -> None:
        self._strategy = strategy

    def setup_dataloader(
        self,
        replay_buffer: Sized,
        batch_size: int,
        pin_memory: bool = False,
        shuffle: bool = True,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        drop_last: bool = True,
        sampler: Sampler[int] | None = None,
        consumed_samples: int = 0,
    ) -> DataLoader[Any]:
        """Return a loader of this rank's share of a data set or replay buffer.

        Args:
            replay_buffer: what has a length and items.
            batch_size: items of one batch of this rank.
            pin_memory, collate_fn: of `torch.utils.data.DataLoader`.
            shuffle: by the strategy's seed and `loader.sampler.set_epoch(epoch)`.
            drop_last: leave out what does not fill a batch on every rank. False: ranks may have unequal counts, and
                what all of them must call (a backward, say) then hangs.
            sampler: in place of a rank's own.
            consumed_samples: items of this epoch that all ranks together have read before.
        """
        if sampler is None:
            strategy = self._strategy
            sampler = RankSampler(
                len(replay_buffer),
                strategy.data_rank,
                strategy.data_ranks,
                shuffle=shuffle,
                seed=strategy.seed,
                drop_last=drop_last,
                consumed=consumed_samples,
            )
        return DataLoader(
            replay_buffer,  # type: ignore[arg-type]
            batch_size=batch_size,
            sampler=sampler,
            drop_last=drop_last,
            collate_fn=collate_fn,
            pin_memory=pin_memory,
        )
