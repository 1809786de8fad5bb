"""Pictures of a pass that is run on the meta device: their patches have sizes alone, their grids are real numbers,
since a vision tower lays out its windows and positions by them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map

from rlbench.data.texts.media_features import placeholders_at
from rlbench.strategies.memory.live import LiveMemory
from rlbench.trainers.passes.images import patch_numbers

INDEXING = (torch.ops.aten.index.Tensor, torch.ops.aten.index_put.default, torch.ops.aten.index_put_.default)
Grids = Sequence[tuple[int, int, int]]


class OnMeta(TorchDispatchMode):
    """Lets tensors of the host meet those on meta: what a tower computes of grids, indices and positions, becomes sizes
    where it is combined with what has sizes alone.

    Args:
        chosen: elements that a mask chooses, the tokens of the pictures.
    """

    def __init__(self, chosen: int) -> None:
        super().__init__()
        self._chosen = chosen

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, all of it on meta if any of its tensors is."""
        given = (args, kwargs or {})
        if any(isinstance(value, Tensor) and value.is_meta for value in tree_iter(given)):
            given = tree_map(_sizes, given)
            if function in INDEXING:
                indexed, indices, *rest = given[0]
                given = ((indexed, [index for mask in indices for index in self._places(mask)], *rest), given[1])
        return function(*given[0], **given[1])

    def _places(self, index: Tensor | None) -> list[Tensor | None]:
        """Return an index, a mask (of k dimensions) as k of them, each as long as the elements it chooses."""
        if index is None or index.dtype != torch.bool:
            return [index]
        return [torch.empty(self._chosen, dtype=torch.int64, device="meta") for _ in index.shape]


def _sizes(value: Any) -> Any:
    here = isinstance(value, Tensor) and not value.is_meta and value.dim() > 0
    return torch.empty_like(value, device="meta") if here else value


def image_tokens(module: nn.Module, grids: Grids) -> int:
    """Return the tokens that stand for pictures in a row."""
    merge = int(module.config.vision_config.spatial_merge_size)  # type: ignore[union-attr]
    return sum(frames * rows * columns for frames, rows, columns in grids) // merge**2


@contextmanager
def pictures_shown(module: nn.Module, ids: Tensor, grids: Grids) -> Iterator[dict[str, Any]]:
    """Yield what a forward takes beside `ids` (1, T) on meta; within it the model puts the pictures in without looking
    for placeholders among the ids. Yields nothing where there are no pictures."""
    if not grids:
        yield {}
        return
    places = torch.zeros(3, *ids.shape, dtype=torch.int64, device="meta")
    with placeholders_at(module.model, torch.zeros_like(ids, dtype=torch.bool)):
        yield {"position_ids": places, **_patches(module, grids)}


def tower_peak(module: nn.Module, grids: Grids) -> int:
    """Return the bytes that the tower of a model on meta takes at its highest to encode pictures, without gradients,
    patches included. Raises whatever a tower does that looks at what tensors hold."""
    with (
        OnMeta(image_tokens(module, grids)),
        torch.no_grad(),
        LiveMemory([*module.parameters(), *module.buffers()]) as live,
    ):
        given = _patches(module, grids)
        module.model.visual(  # type: ignore[union-attr, operator]
            given["pixel_values"].to(next(module.parameters()).dtype), grid_thw=given["image_grid_thw"]
        )
    return live.peak


def _patches(module: nn.Module, grids: Grids) -> dict[str, Tensor]:
    counted = torch.tensor([list(grid) for grid in grids])
    patches = torch.zeros(int(counted.prod(-1).sum()), patch_numbers(module), device="meta")
    return {"pixel_values": patches, "image_grid_thw": counted}
