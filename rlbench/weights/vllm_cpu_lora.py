"""LoRA adapters in vLLM's CPU kernels, a matrix product for each adapter of a step.

vLLM's own copy an adapter's matrices for each token, and take the last place's for a token of no adapter (its index is
-1), so requests of the base came out as those of an adapter where both were in one step.

Output layers (`add_lora_logits`) are left to vLLM: `ReplicaWorkerMixin.load_model` has none of them take adapters.
"""

from __future__ import annotations

from typing import Any, TypeAlias

from torch import Tensor
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

Rows: TypeAlias = Tensor | slice
Factors: TypeAlias = tuple[int, int, Tensor, Tensor]
"""Of a slice of a layer's output: first column, width, Aᵀ (in, rank) and Bᵀ (rank, width)."""


def grouped(places: Tensor) -> list[tuple[int, Rows]]:
    """Return the adapters' places of a step with the tokens of each.

    Args:
        places: (tokens,), of the adapter of each token; -1 for none.
    """
    used = places.unique().tolist()
    if len(used) == 1:
        return [(used[0], slice(None))] if used[0] >= 0 else []
    return [(place, (places == place).nonzero().flatten()) for place in used if place >= 0]


class AdapterProducts(PunicaWrapperCPU):
    """What vLLM's layers ask of adapters: `shrink` by A and `expand` by B, prompts and answers alike."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._groups: list[tuple[int, Rows]] = []
        self._factors: dict[tuple[int, int], tuple[tuple[Tensor, ...], list[Factors]]] = {}

    def update_metadata(self, *args: Any, **options: Any) -> None:
        """Take in which token is of which adapter, for the step that follows."""
        super().update_metadata(*args, **options)
        self._groups = grouped(self.token_lora_indices)

    def add_lora_linear(
        self,
        y: Tensor,
        x: Tensor,
        lora_a_stacked: tuple[Tensor, ...],
        lora_b_stacked: tuple[Tensor, ...],
        scale: float,
        output_slices: tuple[int, ...],
        **options: Any,
    ) -> None:
        """Add scale · x Aᵀ Bᵀ to each slice of y's columns. Where one adapter has all tokens, as in most steps, by two
        products each and nothing beside them: the small layers of small models are mostly overhead."""
        if self._groups and not isinstance(self._groups[0][1], slice):
            super().add_lora_linear(y, x, lora_a_stacked, lora_b_stacked, scale, output_slices, **options)
            return
        columns, tokens = y.view(-1, y.shape[-1]), x.view(-1, x.shape[-1]).float()
        for place, _ in self._groups:
            for start, width, down, up in self._factors_of(place, lora_a_stacked, lora_b_stacked, output_slices):
                own = columns.narrow(1, start, width)
                own.addmm_((tokens @ down.to(tokens.dtype)).to(own.dtype), up.to(own.dtype), alpha=scale)

    def _factors_of(
        self, place: int, downs: tuple[Tensor, ...], ups: tuple[Tensor, ...], widths: tuple[int, ...]
    ) -> list[Factors]:
        """Return Aᵀ and Bᵀ of each slice as views, which stay those of whatever adapter is put in the place."""
        held = self._factors.get((id(downs), place))
        if held is None or held[0] is not downs:
            starts = [sum(widths[:i]) for i in range(len(widths))]
            matrices = [(a[place].flatten(0, -2), b[place].flatten(0, -2)) for a, b in zip(downs, ups, strict=True)]
            factors = [
                (start, width, a.T, b[:width, : len(a)].T)
                for start, width, (a, b) in zip(starts, widths, matrices, strict=True)
            ]
            held = self._factors[id(downs), place] = downs, factors
        return held[1]

    def _shrink(self, y: Tensor, x: Tensor, stacked: Tensor, scale: float) -> None:
        """Set y (tokens, rank) to scale · x Aᵀ; `stacked`: (places, 1, rank, in)."""
        y.zero_()
        for place, rows in self._groups:
            down = _matrix(stacked, place, y)
            y[rows, : len(down)] = (x[rows].to(y.dtype) @ down.T).mul_(scale)

    def _expand_slice(self, y: Tensor, x: Tensor, stacked: Tensor, offset: int, width: int, add_inputs: bool) -> None:
        """Add x Bᵀ to columns of y, or set them; `stacked`: (places, 1, width, rank)."""
        columns = y[:, offset : offset + width]
        for place, rows in self._groups:
            product = x[rows].to(y.dtype) @ _matrix(stacked, place, y)[:width].T
            columns[rows] = columns[rows] + product if add_inputs else product

    def _expand(self, y: Tensor, x: Tensor, stacked: Tensor, add_inputs: bool) -> None:
        self._expand_slice(y, x, stacked, 0, min(stacked.shape[-2], y.shape[-1]), add_inputs)

    _shrink_prefill = _shrink_decode = _shrink
    _expand_slice_prefill = _expand_slice_decode = _expand_slice
    _expand_prefill = _expand_decode = _expand


def _matrix(stacked: Tensor, place: int, like: Tensor) -> Tensor:
    matrix = stacked[place]
    return (matrix[0] if matrix.dim() == 3 else matrix).to(like.dtype)
