"""Ranks that split the tokens of each sequence between them: neighbours, as many as `sequence_parallel` says.

All ranks of a group are given the same sequences and run the model on a slice of the tokens each. What a token's layers
compute stays on its rank; attention alone looks across slices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlbench.strategies.ranks.rows import RowGroup


class SequenceGroup(RowGroup):
    """One rank's place among those that split sequences with it, and of its slice; `size` 1: nothing is split."""

    def to_heads(self, *tensors: Tensor) -> list[Tensor]:
        """Take (rows, heads, n, width) tensors of this slice to (rows, heads / size, size · n, width): some heads of
        all tokens, the first rank the first ones; collective, differentiable."""
        by_rank = [tensor.transpose(0, 1).unflatten(0, (self.size, -1)) for tensor in tensors]
        flat = [tensor.flatten(1) for tensor in by_rank]
        parts = self._exchanged(torch.cat(flat, dim=1)).split([one.shape[1] for one in flat], dim=1)
        came = (part.view(tensor.shape) for part, tensor in zip(parts, by_rank, strict=True))
        return [part.permute(2, 1, 0, 3, 4).flatten(2, 3) for part in came]

    def to_tokens(self, tensor: Tensor) -> Tensor:
        """Take (rows, size · n, heads / size, width) back to this slice, (rows, n, heads, width); collective,
        differentiable."""
        by_rank = tensor.unflatten(1, (self.size, -1)).transpose(0, 1)
        return self._exchanged(by_rank.flatten(1)).view(by_rank.shape).permute(1, 2, 0, 3, 4).flatten(2, 3)

    def shift(self, sent: Tensor, size: int, by: int) -> Callable[[], Tensor]:
        """Begin to send a flat tensor to the rank `by` places on (negative: before), and to take one of `size` from the
        rank as far on the other side; collective. Either may be empty. Call what it returns for what came.

        One all-to-all, not a send and a receive: peers that wait are found by how many collectives each has issued.
        """
        sends, takes = [0] * self.size, [0] * self.size
        sends[(self.index + by) % self.size], takes[(self.index - by) % self.size] = len(sent), size
        came = sent.new_empty(size)
        work = dist.all_to_all_single(came, sent, takes, sends, group=self._group, async_op=True)

        def arrived() -> Tensor:
            work.wait()
            return came

        return arrived

    def joined(self, own: Tensor, counts: Sequence[int]) -> Tensor:
        """Join rows, `counts` of them on each rank, in the order of the ranks; collective. The gradient of a rank's own
        rows is this rank's: all compute the same of the whole."""
        padded = own.detach().new_zeros(max(counts), *own.shape[1:])
        padded[: len(own)] = own.detach()
        parts = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(parts, padded, group=self._group)
        theirs = [part[:count] for part, count in zip(parts, counts, strict=True)]
        return torch.cat([*theirs[: self.index], own, *theirs[self.index + 1 :]])

    def own_heads(self, by_head: Tensor) -> Tensor:
        """Return of one number per head those of the heads that `to_heads` gives this rank."""
        return by_head.unflatten(0, (self.size, -1))[self.index]

    def copies(self, heads: int) -> int:
        """Return how often heads of keys and values are repeated, so that every rank gets as many."""
        return self.size // math.gcd(heads, self.size)

    def _exchanged(self, rows: Tensor) -> Tensor:
        """Send row i of (size, m) to rank i; returns the rows that came."""
        found: Tensor = _Exchange.apply(rows, self._group)
        return found


class _Exchange(torch.autograd.Function):
    """An all-to-all, whose gradient goes the way back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: Any) -> Tensor:
        ctx.group = group
        found = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
        dist.all_to_all_single(found, rows.contiguous(), group=group)
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _Exchange.apply(gradients[0], ctx.group), None


ALONE = SequenceGroup()
"""A rank that splits nothing."""
