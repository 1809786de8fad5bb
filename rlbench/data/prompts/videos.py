"""Videos of prompts as they travel: encoded as they came, checked by their headers, decoded where a model watches.

Files are read by OpenCV, which comes with vLLM and is imported when one first arrives; frames become a file of their
own, without a loss.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from typing import Any

import numpy as np

from rlbench.data.prompts.encoded import EncodedMedia, check_size, held_bytes
from rlbench.data.prompts.images import EncodedImage
from rlbench.data.prompts.video_files import (
    FORMATS,
    MOST_BYTES,
    MOST_FRAMES,
    MOST_PIXELS,
    RATES,
    checked_shape,
    decoded,
    file_of_frames,
    format_of,
)
from rlbench.errors import DataError
from rlbench.units import format_number, format_seconds


@dataclass(frozen=True)
class FrameSampling:
    """Which frames of a video its model gets; without any of these, those that the checkpoint's own processor takes.

    `fps`: so many a second, within its least and most; `num_frames`: so many, evenly over all; `max_frames`: at most.
    """

    fps: float | None = None
    num_frames: int | None = None
    max_frames: int | None = None

    @classmethod
    def of(cls, options: Mapping[str, Any], what: str) -> FrameSampling:
        """Return that of options by these names (`nframes` is `num_frames`); DataError for what none of them means."""
        given = {name: options[name] for name in OPTIONS if options.get(name) is not None}
        if "nframes" in given:
            given["num_frames"] = given.pop("nframes")
        for name, value in given.items():
            least = RATES[0] if name == "fps" else 2
            kinds = (int, float, np.number) if name == "fps" else (int, np.integer)
            if isinstance(value, bool) or not isinstance(value, kinds) or not least <= value <= MOST_FRAMES:
                wanted = "frames a second" if name == "fps" else "a number of frames, 2 at least"
                raise DataError(f"{what} has {name}={value!r}: wanted {wanted}")
            given[name] = value.item() if isinstance(value, np.generic) else value
        if {"fps", "num_frames"} <= given.keys():
            raise DataError(f"{what} has fps and num_frames: give one of them")
        return cls(**given)

    @property
    def asked(self) -> dict[str, Any]:
        """What is given, by name."""
        return {one.name: value for one in fields(self) if (value := getattr(self, one.name)) is not None}


OPTIONS = ("fps", "num_frames", "max_frames", "nframes")
AS_THE_CHECKPOINT = FrameSampling()


@dataclass(frozen=True)
class EncodedVideo(EncodedMedia):
    """One video: `data` as a file has it; `frames` of `width` × `height` pixels, `fps` of them a second. `digest` is of
    `sampling` too, where it asks for anything: two of one file are not the same to a model."""

    frames: int
    fps: float
    width: int
    height: int
    sampling: FrameSampling = AS_THE_CHECKPOINT

    @classmethod
    def from_any(cls, value: Any, what: str = "the video", fetch: bool = False) -> EncodedVideo:
        """Return the video that a value holds: a path, encoded bytes, a data URL, frames with their rate as
        `(frames, fps)`, `{"frames": …, "fps": …}` or vLLM's `(frames, {"fps": …})`, the `{"bytes": …, "path": …}` of
        `datasets`, or any of these as `{"video": …}` with options of `FrameSampling` beside.

        Args:
            value: an `EncodedVideo` comes back as it is. Frames are (frames, height, width, 3) uint8, or a list of what
                `EncodedImage.from_any` takes, all of one size. Beside frames `fps` is their own rate.
            what: names it in errors, as "prompt 3, video 0".
            fetch: read http and https addresses too; without, they are refused.

        Raises DataError for what is no video, is empty or broken, or is larger than MOST_BYTES or MOST_FRAMES.
        """
        options: dict[str, Any] = {}
        while isinstance(value, Mapping) and value.get("video") is not None:
            options |= {name: value[name] for name in OPTIONS if value.get(name) is not None}
            value = value["video"]
        if isinstance(value, EncodedVideo):
            return cls._made(value.data, what, FrameSampling.of(options, what)) if options else value
        if isinstance(value, Mapping) and value.get("frames") is not None:
            options |= {name: value[name] for name in OPTIONS if value.get(name) is not None}
            value = value["frames"]
        if is_timed(value):
            data = file_of_frames(value[0], _rate(value[0], value[1], what), what)
        elif is_frames(value) or (isinstance(value, list | tuple) and not value):
            data = file_of_frames(value, options.pop("fps", None), what)
        elif (held := held_bytes(value, what, fetch, "video/mp4", MOST_BYTES)) is not None:
            data = held
        else:
            raise DataError(
                f"{what} is a {type(value).__name__}: wanted a path, bytes, a data URL, or frames with their rate, as "
                "(frames, fps) or {'frames': …, 'fps': …}"
            )
        check_size(data, what, MOST_BYTES)
        return cls._made(data, what, FrameSampling.of(options, what))

    @classmethod
    def _made(cls, data: bytes, what: str, sampling: FrameSampling) -> EncodedVideo:
        shape = checked_shape(data, what)
        told = data + repr(astuple(sampling)).encode() if sampling.asked else data
        return cls(data, hashlib.sha256(told).hexdigest(), *shape, sampling)

    @property
    def seconds(self) -> float:
        """How long it is."""
        return self.frames / self.fps

    @property
    def data_url(self) -> str:
        """The whole video as a `data:` URL."""
        return f"data:{FORMATS[format_of(self.data)]};base64,{base64.b64encode(self.data).decode()}"

    def pixels(self, indices: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return frames decoded, (n, height, width, 3) uint8, RGB; `indices` ascend. The same on each process. Raises
        DataError where they are too many, or the file is broken behind its header."""
        wanted = [int(index) for index in indices]
        if len(wanted) * self.width * self.height > MOST_PIXELS:
            raise DataError(
                f"the video {self} has {len(wanted) * self.width * self.height:,} pixels in {len(wanted)} frames; at "
                f"most {MOST_PIXELS:,} are decoded: give fewer frames by fps or max_frames, or make it smaller"
            )
        try:
            found, count = decoded(self.data, (self.height, self.width), wanted)
        except DataError:
            raise
        except Exception as error:  # a decoder raises what it likes at hostile bytes
            raise DataError(f"the video {self} cannot be decoded: {type(error).__name__}: {error}") from error
        if len(found) < len(wanted):
            raise DataError(
                f"the video {self} is broken: {count} of its {self.frames} frames can be decoded. Write it anew, or "
                "give its frames"
            )
        return found

    def __str__(self) -> str:
        return f"{self.named} ({self.digest[:8]})"

    @property
    def named(self) -> str:
        """What it is, for people."""
        rate = format_number(self.fps)
        return f"{format_seconds(self.seconds)}, {self.frames} frames of {self.width}×{self.height}, {rate} a second"


def is_frames(value: Any) -> bool:
    """Whether a value is the frames of one video: an array of four dimensions, or a list of pictures."""
    if isinstance(value, np.ndarray):
        return value.ndim == 4 or (value.dtype == object and is_frames(value.tolist()))
    return isinstance(value, list | tuple) and len(value) > 0 and all(map(_is_picture, value))


def _is_picture(value: Any) -> bool:
    pixels = isinstance(value, np.ndarray) and value.dtype != object and value.ndim in (2, 3)
    return pixels or isinstance(value, EncodedImage) or type(value).__module__.startswith("PIL.")


def is_timed(value: Any) -> bool:
    """Whether a value is frames with their rate, `(frames, fps)` or `(frames, {"fps": …})`, and no two videos."""
    if not isinstance(value, list | tuple) or len(value) != 2 or not is_frames(value[0]):
        return False
    return isinstance(value[1], Mapping | int | float | np.number) and not isinstance(value[1], bool)


def _rate(frames: Any, told: Any, what: str) -> Any:
    """Return what is said of frames' rate: a number, or vLLM's metadata, whose rate is that of the file they are of."""
    if not isinstance(told, Mapping):
        return told
    if told.get("total_num_frames") not in (None, len(frames)):
        raise DataError(
            f"{what} has {len(frames)} frames out of {told['total_num_frames']}, as its metadata say: give their own "
            "rate, as (frames, 2.0)"
        )
    return told.get("fps")
