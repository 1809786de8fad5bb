"""A task with pictures that can be generated and verified: name the colours of four squares in reading order.

A picture is 56×56 pixels: two by two squares of one colour each, which the model's tower sees as one token apiece. A
prompt's label is the right answer, as `rgby`. Pictures are split into train and eval by a checksum of their colours.
"""

from __future__ import annotations

import io
import itertools
import random
import zlib
from collections.abc import Iterator
from typing import Any

from rlbench.errors import DataError
from rlbench.tiny.tasks import EVAL_SHARE, SPLITS

COLOURS = {
    "r": (220, 40, 40),
    "g": (40, 180, 60),
    "b": (50, 80, 220),
    "y": (240, 220, 60),
    "w": (245, 245, 245),
    "k": (20, 20, 20),
}
SQUARES, SQUARE_PIXELS = 4, 28
QUESTION = "colours?"


def vision_prompts(count: int, split: str = "train", seed: int = 0) -> list[dict[str, Any]]:
    """Return `count` rows of one split, "train" or "eval": a chat with a picture (PNG bytes) and the right answer.

    None repeats; the same seed gives the same rows; `count` is at most the number of pictures of the split.
    """
    held = pictures(split)
    if split not in SPLITS or not 1 <= count <= held:
        raise DataError(f"vision_prompts: count={count} of split {split!r}: 1 to {held}, of {' or '.join(SPLITS)}.")
    chosen: dict[str, None] = {}
    drawn = stream(split, seed)
    while len(chosen) < count:
        chosen.setdefault(next(drawn))
    return [{"prompt": message(colours), "label": colours} for colours in chosen]


def pictures(split: str) -> int:
    """Return how many pictures a split has."""
    return sum(split_of("".join(colours)) == split for colours in itertools.product(COLOURS, repeat=SQUARES))


def vision_reward(rollout: Any) -> float:
    """Return 1.0 if the rollout's whole `.text` is its `.label`, else 0.0."""
    return float(rollout.text == rollout.label)


def stream(split: str, seed: int) -> Iterator[str]:
    """Yield the colours of random pictures of one split for ever; repeats happen."""
    source = random.Random(f"vision/{split}/{seed}")
    while True:
        colours = "".join(source.choices(list(COLOURS), k=SQUARES))
        if split_of(colours) == split:
            yield colours


def split_of(colours: str) -> str:
    """Return the split a picture belongs to."""
    return "eval" if zlib.crc32(colours.encode()) % EVAL_SHARE == 0 else "train"


def message(colours: str) -> list[dict[str, Any]]:
    """Return the chat about a picture."""
    parts = [{"type": "image", "image": png(colours)}, {"type": "text", "text": QUESTION}]
    return [{"role": "user", "content": parts}]


def png(colours: str) -> bytes:
    """Return the picture of four squares, in reading order, as a PNG file."""
    from PIL import Image

    picture = Image.new("RGB", (2 * SQUARE_PIXELS, 2 * SQUARE_PIXELS))
    for place, colour in enumerate(colours):
        top, left = (SQUARE_PIXELS * at for at in divmod(place, 2))
        picture.paste(COLOURS[colour], (left, top, left + SQUARE_PIXELS, top + SQUARE_PIXELS))
    file = io.BytesIO()
    picture.save(file, "PNG")
    return file.getvalue()
