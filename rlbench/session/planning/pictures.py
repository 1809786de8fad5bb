"""Pictures of a plan: how many a sequence shows and of which size, and the patches a checkpoint's processor makes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from rlbench.errors import BuildError, DataError

NAMED = re.compile(r"(?:(\d+)\s*x\s*)?(\d+)\s*x\s*(\d+)", re.IGNORECASE)
Grid = tuple[int, int, int]
"""Patches of a picture: in time, in height, in width."""


@dataclass(frozen=True)
class Pictures:
    """What each sequence shows: `count` pictures of `width` x `height` pixels."""

    count: int
    width: int
    height: int

    def __str__(self) -> str:
        return f"{self.count}x{self.width}x{self.height}"

    @classmethod
    def of(cls, text: str | None) -> Pictures | None:
        """Read `"2x1280x800"`, `"448x448"` (one picture); None: there are none. Raises BuildError."""
        if text is None:
            return None
        match = NAMED.fullmatch(text.strip()) if isinstance(text, str) else None
        sizes = (int(match[1] or 1), int(match[2]), int(match[3])) if match else (0,)
        if min(sizes) < 1:
            raise BuildError(
                f'images={text!r}: "2x1280x800" are two pictures in each sequence, 1280 pixels wide and 800 high, '
                '"448x448" is one'
            )
        return cls(*sizes)

    def grid(self, source: str) -> Grid:
        """Return the patches that the image processor of a checkpoint, a folder or a hub id, makes of one picture.

        Raises BuildError where there is no processor, or it takes no picture of that size.
        """
        return _grid(source, self.width, self.height)


@lru_cache(maxsize=64)
def _grid(source: str, width: int, height: int) -> Grid:
    from PIL import Image

    from rlbench.data.texts.image_tokens import ImageTokens

    try:
        processor = ImageTokens.of(source).processor
        features = processor(images=[Image.new("RGB", (width, height))], return_tensors="pt")
    except (DataError, ValueError) as error:
        raise BuildError(f"images={width}x{height} cannot be planned for {source!r}: {error}") from error
    frames, rows, columns = features["image_grid_thw"][0].tolist()
    return int(frames), int(rows), int(columns)
