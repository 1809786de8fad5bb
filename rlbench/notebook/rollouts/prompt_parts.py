"""A prompt for a reader: its messages as text and images. Only images that cannot act are drawn.

Drawn are raster images in the prompt itself: `data:` URLs of types a browser decodes and nothing more (no SVG), and
PIL images, which are made small. Whatever would be fetched, from the network or a disk, is named instead.
"""

from __future__ import annotations

import base64
import binascii
import io
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from rlbench.data.prompts.prompt import Prompt, message_text, part_text

RASTER = re.compile(r"data:image/(png|jpeg|jpg|gif|webp);base64,([A-Za-z0-9+/=\s]*)", re.ASCII)
MOST_BYTES = 64_000  # of an image as it is sent; larger ones are made small
READ = ("PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF")
EDGE = 320  # pixels of the longer side of an image made small
MOST_PIXELS = 40_000_000  # beyond, an image is not decoded: it may be a bomb


class Part(NamedTuple):
    """One part of a message: `text`, or an image as a `data:` URL in `image`, with what it is in `text`."""

    role: str
    text: str
    image: str = ""


def prompt_parts(prompt: Prompt, edge: int = EDGE) -> list[Part]:
    """All parts in order; a text or token ids are one part without a role.

    Args:
        prompt: any.
        edge: images whose longer side, in pixels, exceeds this are made smaller.
    """
    content = prompt.content
    if isinstance(content, str) or not (content and isinstance(content[0], dict)):
        return [Part("", prompt.text)]
    return [part for message in content for part in _message_parts(message, edge)]


def images(prompt: Prompt, edge: int = EDGE) -> list[Part]:
    """Its images alone, as far as they can be drawn."""
    content = prompt.content
    if isinstance(content, str) or not (content and isinstance(content[0], dict)):
        return []
    return [part for part in prompt_parts(prompt, edge) if part.image]


def _message_parts(message: Mapping[str, Any], edge: int) -> list[Part]:
    role, content = str(message.get("role", "")), message.get("content")
    if not isinstance(content, list | tuple):
        return [Part(role, message_text(message))]
    return [_image_part(role, part, edge) or Part(role, part_text(part)) for part in content]


def _image_part(role: str, part: Any, edge: int) -> Part | None:
    """An image part as one that can be drawn, or named where it cannot; None for a part that is no image."""
    if not isinstance(part, Mapping) or not str(part.get("type", "")).startswith(("image", "input_image")):
        return None
    source = part.get("image_url", part.get("image", part.get("url")))
    if isinstance(source, Mapping):
        source = source.get("url")
    raw: Any = None
    if isinstance(source, str):
        match = RASTER.fullmatch(source)
        if match is None:
            return Part(role, f"[image, not shown: {source[:80]}]")
        try:
            raw = base64.b64decode(match[2])
        except (binascii.Error, ValueError):
            return Part(role, "[image, not shown: its base64 is broken]")
    elif isinstance(source, bytes | bytearray):
        raw = bytes(source)
    elif type(source).__module__.startswith("PIL."):
        raw = source
    if raw is None:
        return Part(role, f"[image, not shown: a {type(source).__name__}]")
    return _drawn(role, raw, edge)


def _drawn(role: str, raw: Any, edge: int) -> Part:
    """Decode and encode again, small: what a browser gets was written here."""
    try:
        from PIL import Image, UnidentifiedImageError
    except ModuleNotFoundError:
        return Part(role, "[image, not shown: pip install pillow]")
    try:
        image = Image.open(io.BytesIO(raw), formats=READ) if isinstance(raw, bytes) else raw
        width, height = image.size
        if width * height > MOST_PIXELS:
            return Part(role, f"[image {width} × {height}, not shown: too large to decode here]")
        small = image.convert("RGBA" if "A" in image.getbands() or "transparency" in image.info else "RGB")
        small.thumbnail((edge, edge))
    except (UnidentifiedImageError, OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        return Part(role, f"[image, not shown: {type(error).__name__}]")
    kind, data = "png", _encoded(small, "PNG")
    if len(data) > MOST_BYTES:
        kind, data = "jpeg", _encoded(small.convert("RGB"), "JPEG")
    return Part(role, f"image {width} × {height}", f"data:image/{kind};base64,{base64.b64encode(data).decode()}")


def _encoded(image: Any, kind: str) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, optimize=True)
    return stream.getvalue()
