"""What models compute with of images and sounds, read once, and the tokens that stand for them in a row.

A sequence's images stand, in order, at its first placeholder tokens, those that an environment showed at their places;
a placeholder that a policy sampled is a token as others.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from rlbench.data.prompts.encoded import EncodedMedia
from rlbench.data.prompts.images import PlacedImage
from rlbench.errors import DataError

if TYPE_CHECKING:
    from torch import Tensor

Media = TypeVar("Media", bound=EncodedMedia)
MOST_CACHED = 256 * 2**20
"""Bytes of pixels that are kept from one forward to the next: samples of a prompt share its images."""


class FeatureReader(ABC, Generic[Media]):
    """What one model computes with, of each image or sound once. `load` gives the checkpoint's own processor of them,
    and is called when the first arrives."""

    def __init__(self, load: Callable[[], Any]) -> None:
        self._load = load
        self._read: OrderedDict[str, tuple[Tensor, Tensor]] = OrderedDict()

    def read(self, one: Media) -> tuple[Tensor, Tensor]:
        """Return the features of one, and what says how they lie; kept for the forwards that follow."""
        if one.digest not in self._read:
            self._read[one.digest] = self.made(one)
            while len(self._read) > 1 and sum(features.nbytes for features, _ in self._read.values()) > MOST_CACHED:
                self._read.popitem(last=False)
        self._read.move_to_end(one.digest)
        return self._read[one.digest]

    @abstractmethod
    def made(self, one: Media) -> tuple[Tensor, Tensor]:
        """Compute what `read` keeps."""

    @cached_property
    def processor(self) -> Any:
        """The checkpoint's own."""
        return self._load()


def shown_at(
    places: np.ndarray, images: Sequence[EncodedMedia | None], counts: Sequence[int], prompt: int, what: str = "image"
) -> np.ndarray:
    """Return which tokens of a sequence are its images', or sounds', (T,) bool.

    Args:
        places: (T,) bool, where the placeholder token stands.
        images: in order; each `PlacedImage` at its place, the others, before these, at the first placeholders.
        counts: tokens of each.
        prompt: tokens before the one that places count from.
        what: they are, in errors.

    Raises DataError where there is no placeholder token for one of an image's.
    """
    at = [None if not isinstance(image, PlacedImage) else prompt + image.at for image in images]
    starts = [start for start in at if start is not None]
    first = min([*starts, len(places)])
    if at != [None] * (len(at) - len(starts)) + sorted(starts):
        raise DataError(f"has images in another order than their places, {at}")
    wanted = sum(count for count, start in zip(counts, at, strict=True) if start is None)
    shown = places & (np.arange(len(places)) < first) & (places.cumsum() <= wanted)
    if shown.sum() < wanted:
        raise DataError(f"has {shown.sum()} {what} tokens, its {len(at) - len(starts)} {what}s {wanted}")
    for start, count in zip(starts, counts[len(at) - len(starts) :], strict=True):
        run = places[start : start + count]
        if run.sum() < count or shown[start : start + count].any():
            raise DataError(f"has {run.sum()} image tokens at {start}, where an image of {count} begins")
        shown[start : start + count] = True
    return shown


@contextmanager
def placeholders_at(backbone: Any, held: Tensor) -> Iterator[None]:
    """Have a backbone put its images at the tokens where `held` (B, T) is 1 (or True), its videos where it is 2,
    wherever else their placeholders stand; it asks by its own `get_placeholder_mask`."""

    def chosen(input_ids: Tensor, inputs_embeds: Tensor, **features: Any) -> tuple[Tensor, Tensor]:
        images, videos = ((held == number)[..., None].expand_as(inputs_embeds) for number in (1, 2))
        return images, videos

    backbone.get_placeholder_mask = chosen
    try:
        yield
    finally:
        del backbone.get_placeholder_mask
