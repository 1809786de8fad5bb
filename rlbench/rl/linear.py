"""Log-probs and entropies of sampled tokens straight from hidden states and the output matrix.

The logits `hidden @ weight.T + bias` exist one tile (some rows, some of the vocabulary) at a time, in the forward
and again in the backward. The forward walks the vocabulary with a running maximum and keeps two numbers a row;
the backward recomputes each tile: four matrix products where the plain way has three, and none of its passes over
(R, V) in main memory. Torch alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlbench.errors import LossError

TILES = 40
LEAST_TILE, MOST_TILE, MOST_TILE_GPU = 1 << 16, 1 << 20, 1 << 25
TILE_ROWS, TILE_ROWS_GPU = 2048, 8192
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
        d logprob / dz = onehot(y) - p,   dH / dz = -p (log p + H).
    The sum runs over tiles of the vocabulary with a running maximum (Milakov & Gimelshein, arXiv 1805.02867);
    that the logits need not be held is the idea of Wijmans et al., arXiv 2411.09009.
    Equal to the plain computation but for rounding; both outputs give gradients to hidden, weight and bias.

    Args:
        hidden: (R, D), any float dtype. Half precision is multiplied with float32 sums, and the logits stay
            float32.
        weight: (V, D), the output matrix.
        targets: (R,) int64, each in [0, V).
        temperature: divides the logits; > 0.
        bias: (V,), or None.
        tile: logits held at once, in elements; None: a fortieth of R x V, within bounds that suit the device.

    Returns:
        logprobs and entropy, both (R,), in nats; float32, or float64 for float64 input.
    """
    _check(hidden, weight, targets, temperature, bias, tile)
    return _LinearTokenStats.apply(hidden, weight, bias, targets, temperature, tile)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class _Tiles:
    """How (R, V) is cut, and in which dtypes the tiles are computed."""

    rows: int
    columns: int
    shape: tuple[int, int]
    sums: torch.dtype
    operands: torch.dtype

    @classmethod
    def of(cls, hidden: Tensor, weight: Tensor, tile: int | None) -> _Tiles:
        count, size = len(hidden), len(weight)
        gpu = hidden.is_cuda
        most, most_rows = (MOST_TILE_GPU, TILE_ROWS_GPU) if gpu else (MOST_TILE, TILE_ROWS)
        held = tile or max(LEAST_TILE, min(most, count * size // TILES))
        rows = max(1, min(count, most_rows, held))
        # the slice of the weight may be copied to another dtype, so it counts as a tile too
        columns = max(1, min(size, held // max(rows, 1 if tile else hidden.shape[1])))
        common = torch.promote_types(hidden.dtype, weight.dtype)
        sums = torch.float32 if common in HALF else common
        # only CUDA multiplies half precision into float32
        operands = common if gpu else sums
        return cls(rows, columns, (count, size), sums, operands)

    def over_rows(self) -> Iterator[slice]:
        return _slices(self.shape[0], self.rows)

    def over_columns(self) -> Iterator[slice]:
        return _slices(self.shape[1], self.columns)

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
        logprobs, entropy, lse = torch.empty(3, len(hidden), dtype=tiles.sums, device=hidden.device)
        with torch.autocast(hidden.device.type, enabled=False):
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
        return logprobs.clone(), entropy.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, lse, entropy = ctx.saved_tensors
        tiles: _Tiles = ctx.tiles
        by_logprob, by_entropy = (grad.to(tiles.sums) / ctx.temperature for grad in grads)
        with_entropy = bool((by_entropy != 0).any())
        to_hidden, to_weight, to_bias = ctx.needs_input_grad[:3]
        like = {"dtype": tiles.sums, "device": hidden.device}
        grad_hidden = torch.zeros(hidden.shape, **like) if to_hidden else None
        grad_weight = torch.empty_like(weight) if to_weight else None
        grad_bias = torch.empty_like(bias) if to_bias else None
        with torch.autocast(hidden.device.type, enabled=False):
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
        given = None if grad_hidden is None else grad_hidden.to(hidden.dtype)
        return given, grad_weight, grad_bias, None, None, None


class _Running:
    """Log-sum-exp, entropy and target logit of some rows, one tile of the vocabulary after the other."""

    def __init__(self, targets: Tensor, dtype: torch.dtype) -> None:
        self.targets = targets
        like = {"dtype": dtype, "device": targets.device}
        self.top = torch.full((len(targets),), torch.finfo(dtype).min, **like)
        self.total = torch.zeros(len(targets), **like)
        self.weighted = torch.zeros(len(targets), **like)
        self.chosen = torch.zeros(len(targets), **like)

    def add(self, z: Tensor, columns: slice, spare: Tensor) -> None:
        """Take in the tile `z` of logits, which is overwritten."""
        index, inside = _place(self.targets, columns, z)
        self.chosen = torch.where(inside, z.gather(1, index[:, None]).squeeze(1), self.chosen)
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
        return self.chosen - lse, log_total - self.weighted / self.total, lse


def _logits(
    states: Tensor,
    matrix: Tensor,
    bias: Tensor | None,
    columns: slice,
    temperature: float,
    tiles: _Tiles,
    buffer: Tensor,
) -> Tensor:
    """One tile of logits over temperature, in `buffer` where the operands have its dtype."""
    matrix = matrix.to(tiles.operands)
    if tiles.operands is tiles.sums:
        z = buffer[: len(states) * len(matrix)].view(len(states), len(matrix))
        torch.mm(states, matrix.t(), out=z)
    else:
        z = torch.mm(states, matrix.t(), out_dtype=tiles.sums)
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
    if by_entropy is None:
        p.mul_(-by_logprob[:, None])
    else:
        # -p (g + h (log p + H)) = p (log p * -h + -(g + h H))
        p.mul_(logp.mul_(-by_entropy[:, None]).sub_((by_logprob + by_entropy * entropy)[:, None]))
    index, inside = _place(targets, columns, p)
    return p.scatter_add_(1, index[:, None], torch.where(inside, by_logprob, 0.0)[:, None])


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


def _slices(size: int, step: int) -> Iterator[slice]:
    return (slice(start, min(start + step, size)) for start in range(0, size, step))


def _check(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, bias: Tensor | None, tile: int | None
) -> None:
    if hidden.dim() != 2 or not hidden.is_floating_point() or hidden.numel() == 0:
        raise LossError(f"hidden: {hidden.dtype} of shape {tuple(hidden.shape)}; give floats of shape (R, D), none 0.")
    if weight.dim() != 2 or not weight.is_floating_point() or weight.shape[1] != hidden.shape[1]:
        raise LossError(
            f"weight: {weight.dtype} of shape {tuple(weight.shape)}; give floats of shape "
            f"(V, {hidden.shape[1]}), as wide as hidden."
        )
    if len(weight) == 0:
        raise LossError("weight has no rows; a vocabulary has at least one token.")
    if targets.shape != hidden.shape[:1] or targets.dtype is not torch.int64:
        raise LossError(
            f"targets: {targets.dtype} of shape {tuple(targets.shape)}; give int64 of shape "
            f"({len(hidden)},), one for each row of hidden."
        )
    if not targets.is_cuda and (int(targets.min()) < 0 or int(targets.max()) >= len(weight)):
        raise LossError(
            f"targets: from {int(targets.min())} to {int(targets.max())}, the vocabulary has {len(weight)}."
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise LossError(f"bias: shape {tuple(bias.shape)}; give ({len(weight)},), one for each row of weight.")
    if not temperature > 0:
        raise LossError(f"temperature={temperature}: give one above 0.")
    if tile is not None and tile < 1:
        raise LossError(f"tile={tile}: a tile holds at least one logit; give None for a good size.")
