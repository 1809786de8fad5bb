"""Images of prompts as they travel: encoded as they came, checked by their headers, decoded where a model needs pixels.

Pillow is imported when an image first arrives; prompts of text never import it.
"""

from __future__ import annotations

import base64
import hashlib
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from rlbench.data.prompts.encoded import EncodedMedia, check_size, held_bytes
from rlbench.errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Image

MOST_PIXELS = 40_000_000
"""Of one image; beyond, it is not decoded: it may be a decompression bomb."""
FORMATS = ("PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF")
"""What is read: raster formats, nothing that can hold a script or name another file."""


@dataclass(frozen=True)
class EncodedImage(EncodedMedia):
    """One image: `data` as a file of a raster format has it; `width`, `height` in pixels.

    A list of prompts that share one object is pickled with its bytes once.
    """

    width: int
    height: int

    @classmethod
    def from_any(cls, value: Any, what: str = "the image", fetch: bool = False) -> EncodedImage:
        """Return the image that a value holds: a PIL image, a path, encoded bytes, a data URL, pixels as an
        (H, W), (H, W, 3) or (H, W, 4) uint8 array, or the `{"bytes": …, "path": …}` of `datasets`.

        Args:
            value: an `EncodedImage` comes back as it is.
            what: names it in errors, as "prompt 3, image 0".
            fetch: read http and https addresses too; without, they are refused.

        Raises DataError for what is no image, is broken, or is larger than MOST_BYTES or MOST_PIXELS.
        """
        if isinstance(value, EncodedImage):
            return value
        data = encoded_bytes(value, what, fetch)
        check_size(data, what)
        width, height = _checked_size(data, what)
        return cls(data, hashlib.sha256(data).hexdigest(), width, height)

    def pil(self) -> Image:
        """Return it decoded, as RGB, white where transparent. Raises DataError where its pixels are broken."""
        from PIL import Image

        try:
            with Image.open(io.BytesIO(self.data), formats=FORMATS) as image:
                if "A" not in image.getbands() and "transparency" not in image.info:
                    return image.convert("RGB")
                drawn = image.convert("RGBA")
            white = Image.new("RGBA", drawn.size, "white")
            return Image.alpha_composite(white, drawn).convert("RGB")
        except Exception as error:  # a decoder raises what it likes at hostile bytes
            raise DataError(f"the image {self} cannot be decoded: {type(error).__name__}: {error}") from error

    @property
    def media_type(self) -> str:
        """As a data URL names it: "image/png"."""
        from PIL import Image

        with Image.open(io.BytesIO(self.data), formats=FORMATS) as image:
            return Image.MIME[str(image.format)]

    @property
    def data_url(self) -> str:
        """The whole image as a `data:` URL."""
        return f"data:{self.media_type};base64,{base64.b64encode(self.data).decode()}"

    def __str__(self) -> str:
        return f"{self.width}×{self.height} ({self.digest[:8]})"


@dataclass(frozen=True)
class PlacedImage(EncodedImage):
    """An image that an environment showed: the run of tokens that stands for it begins at response token `at`. One
    that is no `PlacedImage` stands at a sequence's first placeholders."""

    at: int

    @classmethod
    def of(cls, image: EncodedImage, at: int) -> PlacedImage:
        """Return an image at its place; the bytes are shared."""
        return cls(image.data, image.digest, image.width, image.height, at)


def is_image(value: Any) -> bool:
    """Whether a value is a decoded or an encoded image, and nothing else: Pillow's, or an `EncodedImage`."""
    return isinstance(value, EncodedImage) or type(value).__module__.startswith("PIL.")


def counted_from(images: Sequence[EncodedImage], first: int) -> tuple[EncodedImage, ...]:
    """Return images whose places count from token `first` of those that they counted from so far, which may be below 0;
    those that have no place stay as they are."""
    return tuple(PlacedImage.of(i, i.at - first) if isinstance(i, PlacedImage) else i for i in images)


def unplaced(images: Sequence[EncodedImage]) -> tuple[EncodedImage, ...]:
    """Return images without their places, for a text that has one placeholder for each; the bytes are shared."""
    return tuple(EncodedImage(image.data, image.digest, image.width, image.height) for image in images)


def encoded_bytes(value: Any, what: str, fetch: bool = False) -> bytes:
    """Return a value's bytes as a file would hold them; PIL images and arrays become PNG. Raises DataError."""
    if (held := held_bytes(value, what, fetch, "image/png")) is not None:
        return held
    if isinstance(value, np.ndarray):
        value = _of_array(value, what)
    if type(value).__module__.startswith("PIL."):
        stream = io.BytesIO()
        kept = value if value.mode in ("1", "L", "LA", "P", "RGB", "RGBA") else value.convert("RGB")
        kept.save(stream, format="PNG")
        return stream.getvalue()
    raise DataError(
        f"{what} is a {type(value).__name__}: wanted a PIL image, a path, bytes, a data URL or uint8 pixels (H, W, 3)"
    )


def _of_array(pixels: np.ndarray, what: str) -> Any:
    from PIL import Image

    if pixels.dtype != np.uint8 or not (pixels.ndim == 2 or (pixels.ndim == 3 and pixels.shape[2] in (3, 4))):
        raise DataError(
            f"{what} is an array {pixels.shape} {pixels.dtype}: wanted (H, W), (H, W, 3) or (H, W, 4) uint8"
        )
    return Image.fromarray(np.ascontiguousarray(pixels))


def _checked_size(data: bytes, what: str) -> tuple[int, int]:
    """Width and height by the header, after the checks that need no pixels."""
    try:
        from PIL import Image
    except ModuleNotFoundError as error:
        raise DataError(f"{what}: images need Pillow: pip install pillow") from error
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            width, height = image.size
            image.verify()
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise DataError(f"{what} is too large to decode: {error}") from None
    except Exception as error:  # a decoder raises what it likes at hostile bytes
        kind = "SVG, which is no raster image" if b"<svg" in data[:1024].lower() else f"begins {data[:12]!r}"
        reason = type(error).__name__ if isinstance(error, Image.UnidentifiedImageError) else str(error)[:80]
        raise DataError(
            f"{what} is broken or no image: {len(data):,} bytes, {kind} ({reason}); wanted {', '.join(FORMATS)}"
        ) from None
    if width * height > MOST_PIXELS or not width * height:
        raise DataError(f"{what} has {width} × {height} pixels; between 1 and {MOST_PIXELS:,} are decoded")
    return width, height
