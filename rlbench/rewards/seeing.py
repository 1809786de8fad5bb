"""Rows of tokens with their images, as a sequence classifier of Qwen-VL's kind reads them in this process.

Pixels come from the checkpoint's own processor, positions in three dimensions from the model's own `get_rope_index`,
of each row apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rlbench.data.prompts.images import EncodedImage
from rlbench.data.texts.image_pixels import PixelReader
from rlbench.data.texts.image_tokens import ImageTokens
from rlbench.data.texts.media_features import placeholders_at, shown_at
from rlbench.rewards.last_tokens import padded

if TYPE_CHECKING:
    from torch import Tensor


class SeeingReader:
    """Of one model of `media_classifier`, and of how its checkpoint takes images."""

    def __init__(self, model: Any, source: str) -> None:
        self._model, self._tokens = model, ImageTokens.of(source)
        self._pixels = PixelReader(lambda: self._tokens.processor)

    def expanded(self, ids: Sequence[int], images: Sequence[EncodedImage]) -> list[int]:
        """Return a rendered text with each image's placeholder repeated for all of its tokens; see `ImageTokens`."""
        return self._tokens.repeated(ids, images)

    def outputs(self, rows: Sequence[Sequence[int]], images: Sequence[Sequence[EncodedImage]]) -> Tensor:
        """Return what the head says at each row's last token, (B, labels) float32.

        `images`: those of each row, whose placeholders stand in it, expanded; places count from the row's first token.
        """
        import torch

        from rlbench.rewards.shaped_head import scores_at_the_ends

        device = next(self._model.parameters()).device
        ids, mask = padded(rows, 0)
        pixels = [[self._pixels.read(image) for image in own] for own in images]
        positions, held = self._placed(rows, images, pixels, ids)
        more = {"position_ids": positions}
        flat = [one for own in pixels for one in own]
        if flat:
            more["pixel_values"] = torch.cat([patches for patches, _ in flat])
            more["image_grid_thw"] = torch.stack([grid for _, grid in flat])
        more = {name: tensor.to(device) for name, tensor in more.items()}
        with placeholders_at(self._model.base_model, held.to(device)):
            return scores_at_the_ends(self._model, ids.to(device), mask.to(device), **more)

    def _placed(
        self,
        rows: Sequence[Sequence[int]],
        images: Sequence[Sequence[EncodedImage]],
        pixels: Sequence[Sequence[tuple[Tensor, Tensor]]],
        ids: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Return positions (3, B, T) int64, and which tokens (B, T) stand for images."""
        import torch

        positions = torch.arange(ids.shape[1]).expand(3, *ids.shape).clone()
        held = torch.zeros_like(ids, dtype=torch.bool)
        for row, (shown, own) in enumerate(zip(images, pixels, strict=True)):
            if own:
                tokens, grids = ids[row, : len(rows[row])], torch.stack([grid for _, grid in own])
                counts = [self._pixels.tokens(image) for image in shown]
                here = torch.from_numpy(shown_at((tokens == self._tokens.token).numpy(), shown, counts, 0))
                held[row, : len(tokens)] = here
                indexed, _ = self._model.base_model.get_rope_index(tokens[None], here[None].int(), image_grid_thw=grids)
                positions[:, row, : len(tokens)] = indexed[:, 0]
        return positions, held
