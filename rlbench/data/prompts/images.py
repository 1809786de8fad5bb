"""Images of prompts as they travel: encoded as they came, checked by their headers, decoded where a model needs pixels.

Pillow is imported when an image first arrives; prompts of text never import it.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import re
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

import numpy as np

from rlbench.errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Image

MOST_BYTES = 32 * 2**20
"""Of one encoded image."""
MOST_PIXELS = 40_000_000
"""Of one image; beyond, it is not decoded: it may be a decompression bomb."""
FORMATS = ("PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF")
"""What is read: raster formats, nothing that can hold a script or name another file."""
FETCH_SECONDS = 20.0
DATA_URL = re.compile(r"data:([\w.+-]+/[\w.+-]+)?(?:;[\w-]+=[\w.-]+)*;base64,", re.ASCII)


@dataclass(frozen=True)
class EncodedImage:
    """One image: `data` as a file of a raster format has it, `digest` its SHA-256 in hex; `width`, `height` in pixels.

    Two are equal when their bytes are. A list of prompts that share one object is pickled with its bytes once.
    """

    data: bytes = field(compare=False, repr=False)
    digest: str
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
        if len(data) > MOST_BYTES:
            raise DataError(f"{what} has {len(data):,} bytes; at most {MOST_BYTES:,} are read: make it smaller")
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
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    if isinstance(value, Mapping) and ("bytes" in value or "path" in value):
        held = value.get("bytes") if value.get("bytes") is not None else value.get("path")
        if held is not None:
            return encoded_bytes(held, what, fetch)
    if isinstance(value, Mapping) and value.get("url") is not None:
        return encoded_bytes(value["url"], what, fetch)
    if isinstance(value, str):
        return _of_address(value, what, fetch)
    if isinstance(value, Path):
        return _of_file(value, what)
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


def _of_address(address: str, what: str, fetch: bool) -> bytes:
    if address.startswith("data:"):
        if (head := DATA_URL.match(address)) is None:
            raise DataError(f"{what}: its data URL {address[:40]!r}… has no base64 part: data:image/png;base64,…")
        try:
            return base64.b64decode(address[head.end() :], validate=True)
        except binascii.Error as error:
            raise DataError(f"{what}: its data URL is no base64: {error}") from None
    scheme = urlsplit(address).scheme.lower() if "://" in address[:32] else ""
    if scheme in ("http", "https"):
        if not fetch:
            raise DataError(
                f"{what} is at {address[:80]!r}, and nothing remote is read unless asked: give its bytes, or "
                "rb.data.load(…, fetch_images=True)"
            )
        return _fetched(address, what)
    if scheme not in ("", "file"):
        raise DataError(f"{what} is at {address[:80]!r}: wanted a path, a data URL or an http address")
    return _of_file(Path(unquote(urlsplit(address).path)) if scheme else Path(address), what)


def _of_file(path: Path, what: str) -> bytes:
    try:
        facts = path.expanduser().stat()
        if not stat.S_ISREG(facts.st_mode):
            raise DataError(f"{what}: {path} is no plain file")
        if facts.st_size > MOST_BYTES:
            raise DataError(f"{what}: {path} has {facts.st_size:,} bytes; at most {MOST_BYTES:,} are read")
        return path.expanduser().read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a null byte in the name
        raise DataError(f"{what}: {str(path)[:80]!r} cannot be read: {type(error).__name__}: {error}") from None


def _fetched(address: str, what: str) -> bytes:
    from urllib.request import Request, urlopen

    try:
        with urlopen(Request(address, headers={"User-Agent": "rlbench"}), timeout=FETCH_SECONDS) as answer:
            return bytes(answer.read(MOST_BYTES + 1))
    except (OSError, ValueError) as error:
        raise DataError(f"{what}: {address[:80]} cannot be read: {type(error).__name__}: {error}") from error


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
