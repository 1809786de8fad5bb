"""Files of videos: containers that OpenCV reads, and frames as numpy writes them, which come back to the last bit.

OpenCV comes with vLLM and is imported when a container first arrives.
"""

from __future__ import annotations

import io
import math
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import numpy as np

from rlbench.data.prompts.images import EncodedImage
from rlbench.errors import DataError

MOST_BYTES = 128 * 2**20
"""Of one encoded video."""
MOST_FRAMES = 200_000
"""Of one file; two hours of thirty a second."""
MOST_PIXELS = 500_000_000
"""Over all frames that are decoded of one video, 1.5 GB: small files may hold hours."""
EDGES = (4, 16_384)
"""Pixels of a frame's width and height."""
RATES = (1e-3, 1e3)
"""Frames a second of what is read."""
FORMATS = {"mp4": "video/mp4", "mkv": "video/x-matroska", "avi": "video/x-msvideo", "npz": "application/x-npz"}
"""What is read, and its media type: containers that name no other file (mp4: QuickTime's too; mkv: WebM), and frames
as numpy writes them."""


def file_of_frames(frames: Any, rate: Any, what: str) -> bytes:
    """Write frames and their rate as a file that gives them back to the last bit."""
    known = isinstance(rate, int | float | np.number) and not isinstance(rate, bool)
    if not known or not math.isfinite(rate) or not RATES[0] <= rate <= RATES[1]:
        raise DataError(f"{what} has frames with the rate {rate!r}: give how many a second, as (frames, 2.0)")
    if not isinstance(frames, np.ndarray) or frames.dtype == object:
        drawn = [_picture(one, what) for one in frames]
        if (count := len({one.shape for one in drawn})) > 1:
            raise DataError(f"{what} has frames of {count} sizes: wanted one size")
        frames = np.stack(drawn) if drawn else np.zeros((0, 0, 0, 3), np.uint8)
    if frames.dtype != np.uint8 or frames.ndim != 4 or frames.shape[3] != 3 or not frames.size:
        raise DataError(
            f"{what} is an array {frames.shape} {frames.dtype}: wanted (frames, height, width, 3) uint8, and not empty"
        )
    _check_shape(len(frames), float(rate), frames.shape[2], frames.shape[1], what)
    if frames.size // 3 > MOST_PIXELS:
        raise DataError(f"{what} has {frames.size // 3:,} pixels in {len(frames)} frames; at most {MOST_PIXELS:,}")
    file = io.BytesIO()
    np.savez_compressed(file, frames=frames, fps=np.float64(rate))
    return file.getvalue()


def _picture(value: Any, what: str) -> np.ndarray:
    return np.asarray(EncodedImage.from_any(value, f"{what}, a frame").pil())


def decoded(data: bytes, shape: tuple[int, int], wanted: list[int]) -> tuple[np.ndarray, int]:
    """Return frames of (height, width) by their ascending numbers, (n, height, width, 3) uint8, RGB, and how many came
    before the file ended; whatever a decoder raises at hostile bytes."""
    if format_of(data) == "npz":
        return _read_frames(data)[0][wanted], wanted[-1] + 1
    cv2, at, done = _opencv("the video"), 0, 0
    found = np.empty((len(wanted), *shape, 3), np.uint8)
    with _opened(cv2, data) as file:
        while done < len(wanted) and file.grab():
            if at == wanted[done]:
                read, frame = file.retrieve()
                if not read or frame.shape != found.shape[1:]:
                    break
                frame = cv2.cvtColor(frame, cv2.COLOR_BGR2RGB)
                while done < len(wanted) and wanted[done] == at:
                    found[done], done = frame, done + 1
            at += 1
    return found[:done], at


def _read_frames(data: bytes) -> tuple[np.ndarray, float]:
    """Return frames and their rate as `_of_frames` wrote them; ValueError of another file."""
    with np.load(io.BytesIO(data), allow_pickle=False) as file:
        return file["frames"], float(file["fps"])


def _shape_of_frames(data: bytes) -> tuple[int, float, int, int]:
    """Return frames, rate, width and height of such a file, by its header; ValueError of another one."""
    with zipfile.ZipFile(io.BytesIO(data)) as file:
        if sorted(file.namelist()) != ["fps.npy", "frames.npy"] or file.getinfo("fps.npy").file_size > 1024:
            raise ValueError("it holds no frames and fps")
        with file.open("frames.npy") as member:
            version = np.lib.format.read_magic(member)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, _, dtype = read(member)
        rate = float(np.load(io.BytesIO(file.read("fps.npy")), allow_pickle=False))
    if dtype != np.uint8 or len(shape) != 4 or shape[3] != 3 or math.prod(shape) // 3 > MOST_PIXELS:
        raise ValueError(f"its frames are {shape} {dtype}")
    return shape[0], rate, shape[2], shape[1]


def format_of(data: bytes) -> str:
    """Name the container that a file begins as, "" of none that is read."""
    if data[4:8] in (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip"):
        return "mp4"
    if data[:4] == b"\x1aE\xdf\xa3":
        return "mkv"
    if data[:4] == b"RIFF" and data[8:12] == b"AVI ":
        return "avi"
    return "npz" if data[:4] == b"PK\x03\x04" else ""


def is_video_file(data: Any) -> bool:
    """Whether bytes begin as a video that is read."""
    return isinstance(data, bytes) and format_of(data) != ""


def checked_shape(data: bytes, what: str) -> tuple[int, float, int, int]:
    """Frames, rate, width and height by the header."""
    kind = format_of(data)
    if not kind:
        raise DataError(
            f"{what} is no video: {len(data):,} bytes, begins {data[:12]!r}; wanted MP4, QuickTime, WebM, Matroska or "
            "AVI"
        )
    try:
        shape = _shape_of_frames(data) if kind == "npz" else _shape_of_file(data, kind == "mkv", what)
    except DataError:
        raise
    except Exception as error:  # a reader raises what it likes at hostile bytes
        raise DataError(f"{what} is a broken video: {len(data):,} bytes ({str(error)[:80]})") from None
    _check_shape(*shape, what)
    return shape


def _shape_of_file(data: bytes, counts: bool, what: str) -> tuple[int, float, int, int]:
    """Ask OpenCV; `counts`: the container's header has no number of frames, and they are decoded to count them."""
    cv2 = _opencv(what)
    with _opened(cv2, data) as file:
        frames, rate = int(file.get(cv2.CAP_PROP_FRAME_COUNT)), float(file.get(cv2.CAP_PROP_FPS))
        width, height = int(file.get(cv2.CAP_PROP_FRAME_WIDTH)), int(file.get(cv2.CAP_PROP_FRAME_HEIGHT))
        if counts and 0 < frames <= MOST_FRAMES:
            frames = 0
            while frames <= MOST_FRAMES and file.grab():
                frames += 1
    return frames, rate, width, height


def _check_shape(frames: int, rate: float, width: int, height: int, what: str) -> None:
    if not 1 <= frames <= MOST_FRAMES:
        raise DataError(f"{what} has {frames:,} frames; 1 to {MOST_FRAMES:,} are read")
    if not RATES[0] <= rate <= RATES[1]:  # NaN too
        raise DataError(f"{what} has {rate} frames a second; {RATES[0]:g} to {RATES[1]:g} are read")
    if not all(EDGES[0] <= edge <= EDGES[1] for edge in (width, height)):
        raise DataError(f"{what} has frames of {width} × {height} pixels; {EDGES[0]} to {EDGES[1]:,} are read")


@contextmanager
def _opened(cv2: ModuleType, data: bytes) -> Iterator[Any]:
    """Open a file with OpenCV, by a name: of bytes in memory (5.0) it ends the process where those are broken."""
    with tempfile.NamedTemporaryFile(prefix="rlbench-video-") as named:
        named.write(data)
        named.flush()
        told = cv2.utils.logging.setLogLevel(cv2.utils.logging.LOG_LEVEL_SILENT)  # it would print beside what it raises
        try:
            file = cv2.VideoCapture(named.name, cv2.CAP_FFMPEG)
        finally:
            cv2.utils.logging.setLogLevel(told)
        try:
            if not file.isOpened():
                raise ValueError("it cannot be opened")
            yield file
        finally:
            file.release()


def _opencv(what: str) -> ModuleType:
    try:
        import cv2
    except (ModuleNotFoundError, ImportError) as error:  # ImportError: a library that it binds is not there
        raise DataError(f"{what}: video files need OpenCV: pip install opencv-python-headless ({error})") from error
    return cv2  # type: ignore[no-any-return]
