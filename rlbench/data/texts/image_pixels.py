"""Images as a model of Qwen-VL's kind computes with them: their pixels, by the checkpoint's own processor."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlbench.data.prompts.images import EncodedImage
from rlbench.data.texts.image_tokens import count_tokens
from rlbench.data.texts.media_features import FeatureReader

if TYPE_CHECKING:
    from torch import Tensor


class PixelReader(FeatureReader[EncodedImage]):
    """Of images: patches (n, numbers) float32 and the grid (3,) int64."""

    def tokens(self, image: EncodedImage) -> int:
        """Return how many tokens an image takes."""
        return count_tokens(image, self.processor)

    def made(self, one: EncodedImage) -> tuple[Tensor, Tensor]:
        """Compute what `read` keeps."""
        features = self.processor(images=[one.pil()], return_tensors="pt")
        return features["pixel_values"], features["image_grid_thw"][0]
