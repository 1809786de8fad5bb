"""Images in texts, as a model of Qwen-VL's kind counts their tokens: by their size."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from rlbench.data.prompts.images import EncodedImage
from rlbench.data.texts.media_tokens import MediaTokens
from rlbench.errors import DataError


def count_tokens(image: EncodedImage, processor: Any) -> int:
    """Return how many tokens an image takes, by its size; `processor`: that of images, of a family of Qwen-VL's."""
    patches = processor.get_number_of_image_patches(image.height, image.width, {})
    return int(patches) // int(processor.merge_size) ** 2


class ImageTokens(MediaTokens[EncodedImage]):
    """Of a model that sees."""

    name = "image"

    @classmethod
    def of(cls, source: str) -> ImageTokens:
        """Read them from a checkpoint, a folder or hub id, once. Raises DataError where its model takes no images."""
        return _read(source)

    def count(self, one: EncodedImage) -> int:
        """Return how many tokens an image takes."""
        return count_tokens(one, self.processor)


@lru_cache(maxsize=8)
def _read(source: str) -> ImageTokens:
    from transformers import AutoConfig, AutoImageProcessor

    try:
        token = getattr(AutoConfig.from_pretrained(source), "image_token_id", None)
        processor = None if token is None else AutoImageProcessor.from_pretrained(source)
    except (OSError, ValueError) as error:
        reason = str(error).strip().split("\n")[0][:200]
        raise DataError(f"it has images, and the tokenizer's model {source!r} cannot be read: {reason}") from error
    if token is None or not hasattr(processor, "get_number_of_image_patches"):
        raise DataError(f"it has images, and {source!r} is no model of Qwen-VL's kind that sees them")
    return ImageTokens(int(token), processor)
