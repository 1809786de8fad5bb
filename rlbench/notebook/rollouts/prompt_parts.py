"""A prompt for a reader: its messages as text, images, videos and sounds. What is shown or played is decoded and
written again, small: nothing that came with a prompt reaches a page, and nothing is fetched.
"""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from rlbench.data.prompts.images import EncodedImage
from rlbench.data.prompts.placing import IMAGE, SOUND, VIDEO
from rlbench.data.prompts.prompt import Prompt, is_chat, message_text, part_text
from rlbench.data.prompts.sounds import EncodedSound, as_mp3
from rlbench.data.prompts.videos import EncodedVideo
from rlbench.data.rollouts.pieces import SPECIAL, Pieces
from rlbench.errors import DataError
from rlbench.units import format_seconds

MOST_BYTES = 64_000  # of an image as it is sent; larger ones lose quality
PLAYED_RATE, PLAYED_SECONDS = 16_000, 60  # of a sound as it is sent
STRIP = 6  # frames of a video that are shown
EDGE = 640  # pixels of the longer side of an image made small
NAMED = re.compile("image|img", re.IGNORECASE)


class PromptPart(NamedTuple):
    """One part of a message: `text`, or an image as a `data:` URL in `image`, with what it is in `text`, and how many
    tokens of the prompt stand for it (0: not known), likewise some frames of a video, side by side; or a sound in
    `sound`, likewise."""

    role: str
    text: str
    image: str = ""
    tokens: int = 0
    sound: str = ""

    @property
    def chip(self) -> str:
        """The run of its tokens: `image ×16`."""
        return f"image ×{self.tokens}" if self.tokens else ""


def prompt_parts(prompt: Prompt, edge: int = EDGE, runs: Sequence[int] = (), played: bool = False) -> list[PromptPart]:
    """All parts in order, images at most `edge` pixels long; of a text or token ids, the images, videos or sounds and
    then the text.

    `runs`: how many tokens stand for each image, see `image_runs`; `played`: give sounds and frames of videos too,
    which are named in any case.
    """
    counts = runs or [0] * len(prompt.images)
    drawn = (image_part(image, edge)._replace(tokens=n) for image, n in zip(prompt.images, counts, strict=True))
    watched = (video_part(video, edge, played) for video in prompt.videos)
    heard = (sound_part(sound, played) for sound in prompt.sounds)
    if not is_chat(prompt.content):
        return [*drawn, *watched, *heard, PromptPart("", prompt.text)]
    held = ((IMAGE, drawn), (VIDEO, watched), (SOUND, heard))
    parts = []
    for message in prompt.content:
        role, told = str(message.get("role", "")), message.get("content")
        if not isinstance(told, list | tuple):
            parts.append(PromptPart(role, message_text(message)))
            continue
        for part in told:
            placed = next((own for kind, own in held if kind.is_part(part)), None)
            parts.append(PromptPart(role, part_text(part)) if placed is None else next(placed)._replace(role=role))
    return parts


def images(prompt: Prompt, edge: int = EDGE, runs: Sequence[int] = ()) -> list[PromptPart]:
    """Its images alone, as far as they can be drawn."""
    return [part for part in prompt_parts(prompt, edge, runs) if part.image]


def image_runs(ids: np.ndarray, pieces: Pieces, count: int) -> list[int]:
    """Return how many of a prompt's token ids stand for each of its `count` images: the runs of one special token that
    is named after images. Empty where no token has as many runs."""
    starts = np.flatnonzero(np.diff(ids, prepend=-1))
    lengths = np.diff([*starts, len(ids)])
    best: list[int] = []
    for token in np.unique(ids[starts]) if count else ():
        (piece,) = pieces([int(token)])
        runs = lengths[ids[starts] == token].tolist()
        if piece.kind == SPECIAL and NAMED.search(piece.shown) and len(runs) == count and sum(runs) > sum(best):
            best = runs
    return best


def image_part(image: EncodedImage, edge: int) -> PromptPart:
    """Decode an image and encode it again, small. One that cannot be is named."""
    try:
        small = image.pil()
    except DataError as error:
        return PromptPart("", f"[image, not shown: {error}]")
    small.thumbnail((edge, edge))
    return PromptPart("", f"image {image.width} × {image.height}", _image_url(small))


def video_part(video: EncodedVideo, edge: int, played: bool) -> PromptPart:
    """Name a video by its length and frames; where it is to be `played`, decode some of them, at even distances, and
    encode them again, side by side."""
    from PIL import Image

    if not played:
        return PromptPart("", f"[video, {video.named}]")
    try:
        frames = video.pixels(np.unique(np.linspace(0, video.frames - 1, min(STRIP, video.frames)).round().astype(int)))
    except DataError as error:
        return PromptPart("", f"[video, {video.named}, not shown: {error}]")
    strip = Image.fromarray(np.concatenate(list(frames), axis=1))
    strip.thumbnail((edge, edge))
    return PromptPart("", f"video, {video.named}", _image_url(strip))


def sound_part(sound: EncodedSound, played: bool) -> PromptPart:
    """Name a sound by its length and rate; where it is to be `played`, decode it and encode its beginning again."""
    named = f"sound, {format_seconds(sound.seconds)} at {sound.rate} Hz"
    if not played:
        return PromptPart("", f"[{named}]")
    try:
        samples = sound.samples(PLAYED_RATE)
        small = as_mp3(samples[: PLAYED_SECONDS * PLAYED_RATE], PLAYED_RATE)
    except DataError as error:
        return PromptPart("", f"[{named}, not played: {error}]")
    cut = len(samples) > PLAYED_SECONDS * PLAYED_RATE
    url = f"data:audio/mpeg;base64,{base64.b64encode(small).decode()}"
    return PromptPart("", f"[{named}{f', {PLAYED_SECONDS} of them here' if cut else ''}]", sound=url)


def _image_url(small: Any) -> str:
    """Return an image of Pillow's as a `data:` URL."""
    kind, data = "png", _encoded(small, "PNG")
    if len(data) > MOST_BYTES:
        kind, data = "jpeg", _encoded(small, "JPEG")
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def _encoded(image: Any, kind: str) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, optimize=True)
    return stream.getvalue()
