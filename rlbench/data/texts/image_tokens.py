"""Images in texts: a chat template writes one placeholder for each, which stands for all of the image's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from rlbench.data.prompts.images import EncodedImage, PlacedImage
from rlbench.errors import DataError

if TYPE_CHECKING:
    from rlbench.data.texts.rendering import Rendered


def count_tokens(image: EncodedImage, processor: Any) -> int:
    """Return how many tokens an image takes, by its size; `processor`: that of images, of a family of Qwen-VL's."""
    patches = processor.get_number_of_image_patches(image.height, image.width, {})
    return int(patches) // int(processor.merge_size) ** 2


@dataclass(frozen=True, eq=False)
class ImageTokens:
    """Of one model. `token`: id of its placeholder; `processor`: the checkpoint's own processor of images."""

    token: int
    processor: Any

    @classmethod
    def of(cls, source: str) -> ImageTokens:
        """Read them from a checkpoint, a folder or hub id, once. Raises DataError where its model takes no images."""
        return _read(source)

    def expanded(self, rendered: Rendered, images: Sequence[EncodedImage]) -> Rendered:
        """Return a text with its images, the placeholder of each repeated for all of its tokens, none of them trained.

        Raises DataError where the text has more or fewer placeholders than there are images.
        """
        counts = self._counts(rendered.tokens, images)
        return replace(
            rendered,
            tokens=np.repeat(rendered.tokens, counts),
            trained=np.repeat(rendered.trained & (rendered.tokens != self.token), counts),
            images=tuple(images),
        )

    def repeated(self, ids: Sequence[int], images: Sequence[EncodedImage]) -> list[int]:
        """Return token ids likewise, with the placeholder of each image repeated; DataError as of `expanded`."""
        tokens = np.asarray(ids, np.int64)
        return np.repeat(tokens, self._counts(tokens, images)).tolist()  # type: ignore[no-any-return]

    def hold(self, ids: Sequence[int], images: Sequence[EncodedImage], prompt: int) -> bool:
        """Whether token ids have as many placeholders for each image as this model gives it: those of another model of
        the same words may have more or fewer. `images`: the prompt's, of `prompt` tokens, then placed ones, counted
        from the first token."""
        places = np.asarray(ids, np.int64) == self.token
        counts = [count_tokens(image, self.processor) for image in images]
        runs = [
            (image.at, count) for image, count in zip(images, counts, strict=True) if isinstance(image, PlacedImage)
        ]
        if int(places[:prompt].sum()) != sum(counts[: len(counts) - len(runs)]):
            return False
        return all(places[at : at + count].sum() == count and not places[at + count :][:1].any() for at, count in runs)

    def _counts(self, tokens: np.ndarray, images: Sequence[EncodedImage]) -> np.ndarray:
        """How often each token of a rendered text (T,) is to stand there, (T,) int64."""
        places = tokens == self.token
        if int(places.sum()) != len(images):
            raise DataError(
                f"its text has {int(places.sum())} of the model's placeholders and {len(images)} images: one for each"
            )
        counts = np.ones(len(places), np.int64)
        counts[places] = [count_tokens(image, self.processor) for image in images]
        return counts


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
