"""Images or sounds in texts: a chat template writes one placeholder for each, which stands for all of its tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from rlbench.data.prompts.encoded import EncodedMedia
from rlbench.data.prompts.images import PlacedImage
from rlbench.errors import DataError

if TYPE_CHECKING:
    from rlbench.data.texts.rendering import Rendered

Media = TypeVar("Media", bound=EncodedMedia)


@dataclass(frozen=True, eq=False)
class MediaTokens(ABC, Generic[Media]):
    """Of one model. `token`: id of its placeholder; `processor`: the checkpoint's own processor of them; `name`: what
    they are, in errors."""

    token: int
    processor: Any
    name = ""

    @abstractmethod
    def count(self, one: Media) -> int:
        """Return how many tokens one takes. Raises DataError for one that the model cannot take."""

    def expanded(self, rendered: Rendered, media: Sequence[Media]) -> Rendered:
        """Return a text with its media, the placeholder of each repeated for all of its tokens, none of them trained.

        Raises DataError where the text has more or fewer placeholders than there are media.
        """
        counts = self._counts(rendered.tokens, media)
        return replace(
            rendered,
            tokens=np.repeat(rendered.tokens, counts),
            trained=np.repeat(rendered.trained & (rendered.tokens != self.token), counts),
            media=tuple(media),
        )

    def repeated(self, ids: Sequence[int], media: Sequence[Media]) -> list[int]:
        """Return token ids likewise, with the placeholder of each repeated; DataError as of `expanded`."""
        tokens = np.asarray(ids, np.int64)
        return np.repeat(tokens, self._counts(tokens, media)).tolist()  # type: ignore[no-any-return]

    def hold(self, ids: Sequence[int], media: Sequence[Media], prompt: int) -> bool:
        """Whether token ids have as many placeholders for each as this model gives it: those of another model of the
        same words may have more or fewer. `media`: the prompt's, of `prompt` tokens, then placed ones, counted from the
        first token."""
        places = np.asarray(ids, np.int64) == self.token
        counts = [self.count(one) for one in media]
        runs = [(one.at, count) for one, count in zip(media, counts, strict=True) if isinstance(one, PlacedImage)]
        if int(places[:prompt].sum()) != sum(counts[: len(counts) - len(runs)]):
            return False
        return all(places[at : at + count].sum() == count and not places[at + count :][:1].any() for at, count in runs)

    def _counts(self, tokens: np.ndarray, media: Sequence[Media]) -> np.ndarray:
        """How often each token of a rendered text (T,) is to stand there, (T,) int64."""
        places = tokens == self.token
        if int(places.sum()) != len(media):
            raise DataError(
                f"its text has {int(places.sum())} of the model's placeholders and {len(media)} {self.name}s: one for "
                "each"
            )
        counts = np.ones(len(places), np.int64)
        counts[places] = [self.count(one) for one in media]
        return counts
