"""Ring attention (arXiv 2310.01889): from a slice of the row's tokens to one slice's keys and values at a time.

A rank begins with its own slice, then takes those before it, the nearest first, as far as its tokens look; partial
results are merged by the log-sum-exp of their scores. The backward goes the same way: it is sent keys and values again,
computes the scores anew from the log-sum-exp, and sends their gradients home. So between the passes a rank holds
nothing of other slices, and in them one slice's keys and values beside those on their way. Scores lie in tiles.

Each slice comes straight from the rank that owns it, not by way of those between: slices that nobody sees, the later
ones above all, are not sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlbench.strategies.ranks.sequence import SequenceGroup

QUERIES, KEYS = 256, 512
"""Of a tile of scores, at most."""
Block = tuple[Tensor, Tensor]
"""Keys and values of a slice, or their gradients; (rows, heads, n, width)."""


def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Sequence[int],
    ranks: SequenceGroup,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
) -> Tensor:
    """Attend from this rank's slice of a row of such sequences, (rows, heads, n, width) each → (rows, n, heads, width);
    collective, differentiable. What dropout drops is drawn from the host's generator."""
    layout = Layout(tuple(lengths), query.shape[2], ranks.size, sliding_window)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    seed = int(torch.randint(2**62, ())) if dropout else 0
    found: Tensor = _Attend.apply(query, key, value, s_aux, Ring(layout, ranks, scale, softcap, dropout, seed))
    return found


@dataclass(frozen=True)
class Tile:
    """Neighbouring keys of a slice; `masked`: some of the queries do not see some of them."""

    keys: slice
    masked: bool


@dataclass(frozen=True)
class Layout:
    """Which tokens of a row see which: those of their sequence up to themselves, of these the last `window` if given.

    The row is `count` slices of `size` tokens.
    """

    lengths: tuple[int, ...]
    size: int
    count: int
    window: int | None = None

    def first_seen(self, places: Tensor) -> Tensor:
        """Return the first place in the row that tokens at such places see."""
        starts = torch.tensor([0, *accumulate(self.lengths)])
        begun = starts[torch.searchsorted(starts, places, right=True) - 1]
        return begun if self.window is None else torch.maximum(begun, places - self.window + 1)

    @cached_property
    def reach(self) -> list[int]:
        """Of each slice, how many slices back its tokens look."""
        slices = torch.arange(self.count)
        found: list[int] = (slices - self.first_seen(slices * self.size) // self.size).tolist()
        return found

    def sees(self, index: int, back: int) -> bool:
        """Whether there is a slice `index`, and it sees the one so many before it."""
        return index < self.count and back <= self.reach[index]

    def strips(self, index: int, back: int) -> Iterator[tuple[slice, list[Tile]]]:
        """Give queries of slice `index`, some at a time, with the keys that they see of the slice so many before."""
        first = (index - back) * self.size
        seen = self.first_seen(torch.arange(index * self.size, (index + 1) * self.size)) - first
        for begin in range(0, self.size, QUERIES):
            end = min(begin + QUERIES, self.size)
            stop = min(back * self.size + end, self.size)
            tiles = []
            for start in range(max(int(seen[begin]), 0), stop, KEYS):
                keys = slice(start, min(start + KEYS, stop))
                whole = seen[end - 1] <= start and keys.stop <= back * self.size + begin + 1
                tiles.append(Tile(keys, not whole))
            if tiles:
                yield slice(begin, end), tiles


@dataclass(frozen=True)
class Ring:
    """How one call attends; the same in both passes. Queries have their heads as (heads of keys, those that share
    one); what is computed is in float32, or wider."""

    layout: Layout
    ranks: SequenceGroup
    scale: float
    softcap: float | None
    dropout: float
    seed: int

    def blocks(self, own: Block) -> Iterator[tuple[int, Block | None]]:
        """Give keys and values of this slice, then those of the slices before, with how far before; None: not seen. The
        next are on their way meanwhile; collective."""
        sent = _flat(own) if max(self.layout.reach) else own[0]
        coming, back = self._coming(sent, 1), 0
        yield back, own
        while coming is not None:
            came, back = coming(), back + 1
            coming = self._coming(sent, back + 1)
            yield back, _unflat(came, own) if len(came) else None

    def _coming(self, sent: Tensor, back: int) -> Callable[[], Tensor] | None:
        """Begin to send this slice's keys and values so many slices on; None where nobody looks so far back."""
        index, sees = self.ranks.index, self.layout.sees
        if back > max(self.layout.reach):
            return None
        taken = len(sent) if sees(index, back) else 0
        return self.ranks.shift(sent if sees(index + back, back) else sent[:0], taken, back)

    def going_home(self, gradients: Tensor, own: Tensor, back: int) -> Callable[[], Tensor]:
        """Begin to send gradients of a slice so many before, flat, or nothing, to its rank; collective. Call what it
        returns for what came for this rank's `own`, or nothing where nobody saw it."""
        size = len(own) if self.layout.sees(self.ranks.index + back, back) else 0
        return self.ranks.shift(gradients, size, -back)

    def strips(self, back: int) -> Iterator[tuple[slice, list[Tile]]]:
        """Give this slice's queries with the keys that they see of the slice so many before."""
        return self.layout.strips(self.ranks.index, back)

    def scores(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Score scaled queries by keys, (rows, heads of keys, those that share one, queries, keys)."""
        scores = _product(queries, keys.mT)
        return scores if self.softcap is None else scores.div_(self.softcap).tanh_().mul_(self.softcap)

    def hidden(self, queries: slice, tile: Tile, back: int, device: torch.device) -> Tensor:
        """Mask (queries, keys) of what is not seen."""
        size, index = self.layout.size, self.ranks.index
        places = torch.arange(index * size + queries.start, index * size + queries.stop)
        first, asking = self.layout.first_seen(places).to(device)[:, None], places.to(device)[:, None]
        keys = torch.arange(tile.keys.start, tile.keys.stop, device=device) + (index - back) * size
        return (keys < first) | (keys > asking)

    def kept(self, queries: slice, tile: Tile, back: int, shares: Tensor) -> Tensor | None:
        """Return by what dropout multiplies a tile's shares, the same whenever it is asked; None: by nothing."""
        if not self.dropout:
            return None
        size, index = self.layout.size, self.ranks.index
        asking, asked = index * size + queries.start, (index - back) * size + tile.keys.start
        generator = torch.Generator(shares.device).manual_seed(self.seed + asking * size * self.layout.count + asked)
        drawn = torch.rand(shares.shape, generator=generator, device=shares.device)
        return (drawn >= self.dropout).to(shares.dtype) / (1 - self.dropout)


class _Attend(torch.autograd.Function):
    """Both passes. Saved are this slice's queries, keys, values and result, and a number for each query and head."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, ring: Ring) -> Tensor:
        queries = _grouped(query, key)
        with torch.autocast(query.device.type, enabled=False):
            partial = _Partial.of(queries, value.shape[-1], sinks)
            for back, block in ring.blocks((key, value)):
                if block is not None:
                    _attend(ring, queries, block, back, partial)
            out = partial.out.div_(partial.total).flatten(1, 2).transpose(1, 2).to(query.dtype).contiguous()
            log_sum_exp = partial.total.log_().add_(partial.top)
        ctx.ring = ring
        ctx.save_for_backward(query, key, value, sinks, out, log_sum_exp)
        return out

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, out, log_sum_exp = ctx.saved_tensors
        ring: Ring = ctx.ring
        with torch.autocast(query.device.type, enabled=False):
            made = _Gradients.of(_grouped(query, key), key, gradient, out, log_sum_exp)
            home = torch.zeros(key.numel() + value.numel(), dtype=log_sum_exp.dtype, device=key.device)
            arriving: Callable[[], Tensor] | None = None
            for back, block in ring.blocks((key, value)):
                found = home if back == 0 else torch.zeros_like(home) if block is not None else home[:0]
                if block is not None:
                    _give_back(ring, made, block, back, _unflat(found, block))
                if arriving is not None:
                    _add(home, arriving())
                    arriving = None  # frees both its tensors before the next are made
                arriving = ring.going_home(found, home, back) if back else None
            if arriving is not None:
                _add(home, arriving())
            of_key, of_value = _unflat(home, (key, value))
            of_query = made.of_queries.mul_(ring.scale).flatten(1, 2)
            of_sinks = None if sinks is None else made.of_sinks(sinks)
        return of_query.to(query.dtype), of_key.to(key.dtype), of_value.to(value.dtype), of_sinks, None


@dataclass(frozen=True)
class _Partial:
    """What queries have found so far: values by exp(score - `top`), and the `total` of those."""

    out: Tensor
    top: Tensor
    total: Tensor

    @classmethod
    def of(cls, queries: Tensor, width: int, sinks: Tensor | None) -> _Partial:
        """Begin with nothing but the sinks, which have no values."""
        heads, dtype = queries.shape[:-1], _wide(queries)
        out = queries.new_zeros(*heads, width, dtype=dtype)
        if sinks is None:
            top = queries.new_full((*heads, 1), torch.finfo(dtype).min, dtype=dtype)
            return cls(out, top, torch.zeros_like(top))
        top = sinks.to(dtype).reshape(*heads[1:3], 1, 1).repeat(heads[0], 1, 1, heads[3], 1)
        return cls(out, top, torch.ones_like(top))


def _attend(ring: Ring, queries: Tensor, block: Block, back: int, partial: _Partial) -> None:
    """Merge what queries find in a slice so many before theirs."""
    dtype = partial.out.dtype
    for at, tiles in ring.strips(back):
        asking = queries[..., at, :].to(dtype) * ring.scale
        out, top, total = (one[..., at, :] for one in (partial.out, partial.top, partial.total))
        for tile in tiles:
            keys, values = (one[..., tile.keys, :].to(dtype) for one in block)
            scores = ring.scores(asking, keys)
            if tile.masked:
                scores.masked_fill_(ring.hidden(at, tile, back, scores.device), -torch.inf)
            highest = torch.maximum(top, scores.amax(-1, keepdim=True))
            shares = scores.sub_(highest).exp_()
            fading = (top - highest).exp_()
            top.copy_(highest)
            total.mul_(fading).add_(shares.sum(-1, keepdim=True))
            kept = ring.kept(at, tile, back, shares)
            out.mul_(fading).add_(_product(shares if kept is None else shares.mul_(kept), values))


@dataclass(frozen=True)
class _Gradients:
    """What the backward knows of each query: `gradient` of its result, the product of both, the log-sum-exp of its
    scores. `of_queries`: the gradients found so far."""

    queries: Tensor
    gradient: Tensor
    product: Tensor
    log_sum_exp: Tensor
    of_queries: Tensor

    @classmethod
    def of(cls, queries: Tensor, key: Tensor, gradient: Tensor, out: Tensor, log_sum_exp: Tensor) -> _Gradients:
        """Begin with gradients of 0; `gradient` and `out` are (rows, n, heads, width)."""
        dtype = log_sum_exp.dtype
        product = _grouped((gradient.to(dtype) * out).sum(-1, keepdim=True).transpose(1, 2), key)
        of_queries = torch.zeros(queries.shape, dtype=dtype, device=queries.device)
        return cls(queries, _grouped(gradient.transpose(1, 2), key), product, log_sum_exp, of_queries)

    def of_sinks(self, sinks: Tensor) -> Tensor:
        """Return the gradients of sinks, which take their share of each query's softmax and give nothing for it."""
        shares = (sinks.to(self.product.dtype).reshape(*self.product.shape[1:3], 1, 1) - self.log_sum_exp).exp_()
        return -(shares * self.product).sum((0, 3, 4)).view(sinks.shape).to(sinks.dtype)


def _give_back(ring: Ring, made: _Gradients, block: Block, back: int, found: Block) -> None:
    """Add to the gradients of queries, and to those `found` of a slice so many before theirs."""
    dtype = made.of_queries.dtype
    for at, tiles in ring.strips(back):
        asking, gradient = made.queries[..., at, :].to(dtype) * ring.scale, made.gradient[..., at, :].to(dtype)
        product, log_sum_exp, of_queries = (
            one[..., at, :] for one in (made.product, made.log_sum_exp, made.of_queries)
        )
        for tile in tiles:
            keys, values = (one[..., tile.keys, :].to(dtype) for one in block)
            of_keys, of_values = (one[..., tile.keys, :] for one in found)
            scores = ring.scores(asking, keys)
            slope = None if ring.softcap is None else 1 - (scores / ring.softcap).square_()
            shares = scores.sub_(log_sum_exp).exp_()
            if tile.masked:
                shares.masked_fill_(ring.hidden(at, tile, back, shares.device), 0.0)
            of_shares = _product(gradient, values.mT)
            kept = ring.kept(at, tile, back, shares)
            if kept is not None:
                of_shares.mul_(kept)
            of_values.add_(_turned(shares if kept is None else shares * kept, gradient))
            of_scores = of_shares.sub_(product).mul_(shares)
            if slope is not None:
                of_scores.mul_(slope)
            of_queries.add_(_product(of_scores, keys))
            of_keys.add_(_turned(of_scores, asking))


def _wide(tensor: Tensor) -> torch.dtype:
    """Return the dtype in which sums over keys are taken."""
    return torch.promote_types(tensor.dtype, torch.float32)


def _grouped(by_head: Tensor, key: Tensor) -> Tensor:
    """Take (rows, heads, n, width) to (rows, heads of keys, those that share one, n, width)."""
    return by_head.unflatten(1, (key.shape[1], -1))


def _product(grouped: Tensor, matrix: Tensor) -> Tensor:
    """Multiply (rows, heads of keys, those that share one, queries, m) by (rows, heads of keys, m, width)."""
    return (grouped.flatten(2, 3) @ matrix).unflatten(2, grouped.shape[2:4])


def _turned(grouped: Tensor, other: Tensor) -> Tensor:
    """Multiply (…, queries, keys), turned round, by (…, queries, width), summed over heads that share one of keys."""
    return grouped.flatten(2, 3).mT @ other.flatten(2, 3)


def _flat(block: Block) -> Tensor:
    return torch.cat([one.flatten() for one in block])


def _unflat(flat: Tensor, like: Block) -> Block:
    keys, values = flat.split([one.numel() for one in like])
    return keys.view(like[0].shape), values.view(like[1].shape)


def _add(home: Tensor, came: Tensor) -> None:
    if len(came):
        home.add_(came)
