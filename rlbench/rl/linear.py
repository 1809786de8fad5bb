"""Log-probs and entropies of sampled tokens straight from hidden states and the output matrix.

The logits `hidden @ weight.T + bias` exist one tile (some rows, some of the vocabulary) at a time, in the forward and
again in the backward: four matrix products where the plain way has three, and no (R, V) in main memory.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlbench.errors import LossError
from rlbench.rl import checks

TILES = 40
LEAST_TILE, MOST_TILE, MOST_TILE_GPU = 1 << 20, 1 << 20, 1 << 25  # smaller ones cost more than they hold
TILE_ROWS, TILE_ROWS_GPU = 2048, 8192
ALIGNED = 64
"""Columns of a tile are a multiple of so many."""
HALF = (torch.float16, torch.bfloat16)


def linear_token_stats(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    bias: Tensor | None = None,
    tile: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target and entropy of each distribution, without the (R, V) logits.

    With z = (hidden @ weight.T + bias) / temperature and p = softmax(z), per row
        logprob = z_y - logsumexp(z),   H = logsumexp(z) - sum_v p_v z_v,
        d logprob / dz = onehot(y) - p,   dH / dz = -p (log p + H),
    by tiles of the vocabulary with a running maximum (arXiv 1805.02867; without the logits: arXiv 2411.09009).

    Args:
        hidden: (R, D), any float dtype; `weight` (V, D), the output matrix; `bias` (V,) or None.
        targets: int64, each in [0, V); (R,), or (R, C), several tokens of each row.
        tile: logits held at once, in elements; None: a fortieth of R x V, within bounds that suit the device.

    Returns:
        logprobs, in the shape of `targets`, and entropy (R,), in nats; float32, or float64 for float64 input.
    """
    _check(hidden, weight, targets, temperature, bias, tile)
    chosen = targets.view(len(targets), -1)
    logprobs, entropy = _LinearTokenStats.apply(hidden, weight, bias, chosen, temperature, tile)
    return logprobs.view(targets.shape), entropy


@torch.no_grad()
def linear_top_ids(
    hidden: Tensor, weight: Tensor, count: int, bias: Tensor | None = None, tile: int | None = None
) -> Tensor:
    """Return the `count` tokens with the largest logits of each row, largest first, (R, count) int64, by tiles too."""
    checks.number("linear_top_ids", "count", count, 1, len(weight), whole=True)
    tiles = _Tiles.of(hidden, weight, tile)
    ids = torch.empty(len(hidden), count, dtype=torch.int64, device=hidden.device)
    with _own_dtypes(hidden):
        held = tiles.buffer(hidden)
        for rows in tiles.over_rows():
            states = hidden[rows].to(tiles.operands)
            best = torch.empty(len(states), 0, dtype=tiles.sums, device=hidden.device)
            found = ids[rows][:, :0]
            for columns in tiles.over_columns():
                z = _logits(states, weight[columns], bias, columns, 1.0, tiles, held)
                there = torch.arange(columns.start, columns.stop, device=ids.device).expand(len(states), -1)
                best, found = torch.cat([best, z], 1), torch.cat([found, there], 1)
                best, kept = best.topk(min(count, best.shape[1]), dim=1)
                found = found.gather(1, kept)
            ids[rows] = found
    return ids


@dataclass(frozen=True)
class _Tiles:
    """How (R, V) is cut, and in which dtypes the tiles are computed."""

    rows: int
    columns: int
    shape: tuple[int, int]
    sums: torch.dtype
    operands: torch.dtype
    alike: bool = False
    """One tile stands for all: on meta, where only the memory is asked for."""

    @classmethod
    def of(cls, hidden: Tensor, weight: Tensor, tile: int | None) -> _Tiles:
        count, size = len(hidden), len(weight)
        gpu = hidden.is_cuda
        most, most_rows = (MOST_TILE_GPU, TILE_ROWS_GPU) if gpu else (MOST_TILE, TILE_ROWS)
        held = tile or max(LEAST_TILE, min(most, count * size // TILES))
        rows = max(1, min(count, most_rows, held))
        # the slice of the weight may be copied to another dtype, so it counts as a tile too
        columns = max(1, min(size, held // max(rows, 1 if tile else hidden.shape[1])))
        if columns > ALIGNED:  # else matrix products take kernels that read a number at a time
            columns -= columns % ALIGNED
        common = torch.promote_types(hidden.dtype, weight.dtype)
        sums = torch.float32 if common in HALF else common
        # only CUDA multiplies half precision into float32
        operands = common if gpu else sums
        return cls(rows, columns, (count, size), sums, operands, hidden.is_meta)

    def over_rows(self) -> list[slice]:
        return self._slices(self.shape[0], self.rows)

    def over_columns(self) -> list[slice]:
        return self._slices(self.shape[1], self.columns)

    def _slices(self, size: int, step: int) -> list[slice]:
        return [slice(at, min(at + step, size)) for at in range(0, step if self.alike else size, step)]

    def buffer(self, hidden: Tensor) -> Tensor:
        return torch.empty(self.rows * self.columns, dtype=self.sums, device=hidden.device)


class _LinearTokenStats(torch.autograd.Function):
    """Keeps two numbers a row between forward and backward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        tile: int | None,
    ) -> tuple[Tensor, Tensor]:
        tiles = _Tiles.of(hidden, weight, tile)
        entropy, lse = torch.empty(2, len(hidden), dtype=tiles.sums, device=hidden.device)
        logprobs = torch.empty(targets.shape, dtype=tiles.sums, device=hidden.device)
        with _own_dtypes(hidden):
            held, spare = tiles.buffer(hidden), tiles.buffer(hidden)
            for rows in tiles.over_rows():
                states = hidden[rows].to(tiles.operands)
                running = _Running(targets[rows], tiles.sums)
                for columns in tiles.over_columns():
                    z = _logits(states, weight[columns], bias, columns, temperature, tiles, held)
                    running.add(z, columns, spare)
                logprobs[rows], entropy[rows], lse[rows] = running.result()
        ctx.save_for_backward(hidden, weight, bias, targets, lse, entropy)
        ctx.temperature, ctx.tiles = temperature, tiles
        return logprobs, entropy.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, lse, entropy = ctx.saved_tensors
        tiles: _Tiles = ctx.tiles
        by_logprob, by_entropy = (grad.to(tiles.sums) / ctx.temperature for grad in grads)
        with_entropy = not by_entropy.is_meta and bool((by_entropy != 0).any())
        to_hidden, to_weight, to_bias = ctx.needs_input_grad[:3]
        like = {"dtype": tiles.sums, "device": hidden.device}
        grad_hidden = torch.zeros(hidden.shape, **like) if to_hidden else None
        grad_weight = torch.empty_like(weight) if to_weight else None
        grad_bias = torch.empty_like(bias) if to_bias else None
        with _own_dtypes(hidden):
            held, spare = tiles.buffer(hidden), tiles.buffer(hidden)
            states = hidden.to(tiles.operands)
            for columns in tiles.over_columns():
                matrix = weight[columns].to(tiles.operands)
                sum_weight = torch.zeros(matrix.shape, **like) if to_weight else None
                sum_bias = torch.zeros(len(matrix), **like) if to_bias else None
                for rows in tiles.over_rows():
                    z = _logits(states[rows], matrix, bias, columns, ctx.temperature, tiles, held)
                    slope = _slope(
                        z.sub_(lse[rows, None]),
                        targets[rows],
                        by_logprob[rows],
                        by_entropy[rows] if with_entropy else None,
                        entropy[rows],
                        columns,
                        spare,
                    )
                    if sum_bias is not None:
                        sum_bias += slope.sum(0)
                    slope = slope.to(tiles.operands)
                    if grad_hidden is not None:
                        _add_product(grad_hidden[rows], slope, matrix)
                    if sum_weight is not None:
                        _add_product(sum_weight, slope.t(), states[rows])
                if grad_weight is not None:
                    grad_weight[columns] = sum_weight
                if grad_bias is not None:
                    grad_bias[columns] = sum_bias
        grad_hidden = None if grad_hidden is None else grad_hidden.to(hidden.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None, None


def _own_dtypes(hidden: Tensor) -> AbstractContextManager[Any]:
    """No autocast, which does not know meta; there the function runs for the memory it would take."""
    return nullcontext() if hidden.is_meta else torch.autocast(hidden.device.type, enabled=False)


class _Running:
    """Log-sum-exp, entropy and target logit of some rows, one tile of the vocabulary after the other."""

    def __init__(self, targets: Tensor, dtype: torch.dtype) -> None:
        self.targets = targets
        self.top = torch.full((len(targets),), torch.finfo(dtype).min, dtype=dtype, device=targets.device)
        self.total, self.weighted = torch.zeros(2, len(targets), dtype=dtype, device=targets.device)
        self.chosen = torch.zeros(targets.shape, dtype=dtype, device=targets.device)

    def add(self, z: Tensor, columns: slice, spare: Tensor) -> None:
        """Take in the tile `z` of logits, which is overwritten."""
        index, inside = _place(self.targets, columns, z)
        self.chosen = torch.where(inside, z.gather(1, index), self.chosen)
        top = torch.maximum(self.top, z.amax(1))
        shift = self.top - top
        z.sub_(top[:, None])
        e = torch.exp(z, out=_shaped(spare, z))
        scale = shift.exp()
        # weighted is sum_v e^(z_v - top) (z_v - top): differences, which keep their digits
        self.weighted = (self.weighted + shift * self.total) * scale
        self.total = self.total * scale + e.sum(1)
        self.weighted += e.mul_(z).sum(1)
        self.top = top

    def result(self) -> tuple[Tensor, Tensor, Tensor]:
        log_total = self.total.log()
        lse = self.top + log_total
        return self.chosen - lse[:, None], log_total - self.weighted / self.total, lse


def _logits(
    states: Tensor,
    matrix: Tensor,
    bias: Tensor | None,
    columns: slice,
    temperature: float,
    tiles: _Tiles,
    buffer: Tensor,
) -> Tensor:
    """One tile of logits over temperature, in `buffer`."""
    matrix = matrix.to(tiles.operands)
    z = buffer[: len(states) * len(matrix)].view(len(states), len(matrix))
    if tiles.operands is tiles.sums:
        torch.mm(states, matrix.t(), out=z)
    else:
        torch.mm(states, matrix.t(), out_dtype=tiles.sums, out=z)
    if bias is not None:
        z += bias[columns].to(tiles.sums)
    return z if temperature == 1.0 else z.div_(temperature)


def _slope(
    logp: Tensor,
    targets: Tensor,
    by_logprob: Tensor,
    by_entropy: Tensor | None,
    entropy: Tensor,
    columns: slice,
    spare: Tensor,
) -> Tensor:
    """Gradient of one tile of logits; the gradients that come in are already over temperature."""
    p = torch.exp(logp, out=_shaped(spare, logp))
    summed = by_logprob.sum(1)
    if by_entropy is None:
        p.mul_(-summed[:, None])
    else:
        # -p (g + h (log p + H)) = p (log p * -h + -(g + h H)), with g the sum over a row's targets
        p.mul_(logp.mul_(-by_entropy[:, None]).sub_((summed + by_entropy * entropy)[:, None]))
    index, inside = _place(targets, columns, p)
    return p.scatter_add_(1, index, torch.where(inside, by_logprob, 0.0))


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, summed in the dtype of `total`."""
    if left.dtype is total.dtype:
        total.addmm_(left, right)
    else:
        total += torch.mm(left, right, out_dtype=total.dtype)


def _place(targets: Tensor, columns: slice, tile: Tensor) -> tuple[Tensor, Tensor]:
    """Where each target lies in the tile, and whether it does (an index that does not is moved inside)."""
    index = targets - columns.start
    return index.clamp(0, tile.shape[1] - 1), (index >= 0) & (index < tile.shape[1])


def _shaped(buffer: Tensor, like: Tensor) -> Tensor:
    return buffer[: like.numel()].view(like.shape)


def _check(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, bias: Tensor | None, tile: int | None
) -> None:
    for name, value, wanted, fits in (
        ("hidden", hidden, "floats (R, D), none 0", hidden.dim() == 2 and hidden.numel() > 0),
        ("hidden", hidden, "floats", hidden.is_floating_point()),
        ("weight", weight, "floats (V, D), V >= 1", weight.is_floating_point() and len(weight) > 0),
        ("weight", weight, "(V, D), as wide as hidden", weight.shape[1:] == hidden.shape[1:]),
        ("targets", targets, "int64 (R,) or (R, C)", targets.shape[:1] == hidden.shape[:1] and targets.dim() < 3),
        ("targets", targets, "int64, one a row or more", targets.dtype is torch.int64 and targets.numel() > 0),
        ("bias", bias, "(V,)", bias is None or bias.shape == weight.shape[:1]),
    ):
        if value is not None and not fits:
            raise LossError(f"{name}: {value.dtype} of shape {tuple(value.shape)}; wanted {wanted}.")
    if targets.device.type == "cpu" and (int(targets.min()) < 0 or int(targets.max()) >= len(weight)):
        raise LossError(f"targets: {int(targets.min())} to {int(targets.max())}; the vocabulary has {len(weight)}.")
    checks.number("linear_token_stats", "temperature", temperature, 0.0, above=True)
    if tile is not None:
        checks.number("linear_token_stats", "tile", tile, 1)
