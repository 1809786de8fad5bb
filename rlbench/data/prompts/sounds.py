"""Sounds of prompts as they travel: encoded as they came, checked by their headers, decoded where a model hears them.

soundfile is imported when a sound first arrives, soxr when one has another rate than its model: `rlbench[audio]`.
"""

from __future__ import annotations

import base64
import hashlib
import io
import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from rlbench.data.prompts.encoded import EncodedMedia, check_size, held_bytes, of_base64
from rlbench.errors import DataError
from rlbench.units import format_seconds

MOST_SAMPLES = 40_000_000
"""Of one sound, over its channels; beyond, it is not decoded: small files of compressed formats may hold hours."""
RATES = (1_000, 384_000)
"""Samples per second of what is read."""
MOST_CHANNELS = 32
FORMATS = ("WAV", "WAVEX", "FLAC", "OGG", "MP3")
"""What is read: formats that name no other file."""


@dataclass(frozen=True)
class EncodedSound(EncodedMedia):
    """One sound: `data` as a file has it; `frames` samples in each of its `channels`, `rate` of them a second."""

    frames: int
    rate: int
    channels: int

    @classmethod
    def from_any(cls, value: Any, what: str = "the sound", fetch: bool = False) -> EncodedSound:
        """Return the sound that a value holds: a path, encoded bytes, a data URL, samples with their rate as
        `(array, rate)` or `{"array": …, "sampling_rate": …}` of `datasets`, its `{"bytes": …, "path": …}`, or OpenAI's
        `{"data": base64, "format": "wav"}`.

        Args:
            value: an `EncodedSound` comes back as it is. Arrays are (samples,), or (samples, channels) with no more
                channels than samples (the other way round too), float in -1 to 1, or int16.
            what: names it in errors, as "prompt 3, sound 0".
            fetch: read http and https addresses too; without, they are refused.

        Raises DataError for what is no sound, is empty or broken, or is larger than MOST_BYTES or MOST_SAMPLES.
        """
        if isinstance(value, EncodedSound):
            return value
        data = sound_bytes(value, what, fetch)
        check_size(data, what)
        frames, rate, channels = _checked(data, what)
        return cls(data, hashlib.sha256(data).hexdigest(), frames, rate, channels)

    @property
    def seconds(self) -> float:
        """How long it is."""
        return self.frames / self.rate

    @property
    def format(self) -> str:
        """As a file's name ends: "wav", "flac", "ogg" or "mp3"."""
        soundfile = _soundfile(str(self))
        name = str(soundfile.info(io.BytesIO(self.data)).format).lower()
        return "wav" if name == "wavex" else name

    @property
    def data_url(self) -> str:
        """The whole sound as a `data:` URL."""
        kind = {"mp3": "mpeg"}.get(self.format, self.format)
        return f"data:audio/{kind};base64,{base64.b64encode(self.data).decode()}"

    def samples(self, rate: int) -> np.ndarray:
        """Return it decoded, its channels mixed into one, at this many samples a second: (n,) float32. The same on each
        process: it is resampled by soxr at its high quality. Raises DataError where the file is broken behind its
        header, or holds numbers that are not finite."""
        try:
            decoded, own = _soundfile(str(self)).read(io.BytesIO(self.data), dtype="float32", always_2d=True)
        except Exception as error:  # a decoder raises what it likes at hostile bytes
            raise DataError(f"the sound {self} cannot be decoded: {type(error).__name__}: {error}") from error
        if len(decoded) == 0 or not np.isfinite(decoded).all():
            kind = "numbers that are not finite" if len(decoded) else "no samples"
            raise DataError(f"the sound {self} holds {kind}: it would make every log-prob NaN")
        mixed = decoded.mean(axis=1, dtype=np.float32)
        return mixed if own == rate else _resampled(mixed, own, rate, str(self))

    def decoded(self) -> dict[str, Any]:
        """Return it as `datasets` gives a sound: `{"array": (n,) float32, "sampling_rate": …}`, one channel, its own
        rate."""
        return {"array": self.samples(self.rate), "sampling_rate": self.rate}

    def __str__(self) -> str:
        return f"{format_seconds(self.seconds)} at {self.rate} Hz ({self.digest[:8]})"


def as_mp3(samples: np.ndarray, rate: int) -> bytes:
    """Return one channel of samples (n,) as a small file, for people. DataError where the library writes none."""
    file, soundfile = io.BytesIO(), _soundfile("the sound")
    try:
        soundfile.write(file, samples, rate, format="MP3")
    except (ValueError, soundfile.LibsndfileError) as error:  # a libsndfile before 1.1
        raise DataError(f"MP3 cannot be written: {error}") from error
    return file.getvalue()


def sound_bytes(value: Any, what: str, fetch: bool = False) -> bytes:
    """Return a value's bytes as a file would hold them; samples become WAV. Raises DataError."""
    if isinstance(value, Mapping) and value.get("data") is not None:
        held = value["data"]
        return held if isinstance(held, bytes) else of_base64(str(held), f"{what}: its data")
    if isinstance(value, Mapping) and value.get("array") is not None:
        return _of_samples(value["array"], value.get("sampling_rate"), what)
    if isinstance(value, tuple | list) and len(value) == 2 and not isinstance(value[0], str | bytes):
        return _of_samples(value[0], value[1], what)
    if hasattr(value, "get_all_samples"):  # what datasets decodes a column of sounds with
        made = value.get_all_samples()
        return _of_samples(np.asarray(made.data), made.sample_rate, what)
    if (held := held_bytes(value, what, fetch, "audio/wav")) is not None:
        return held
    raise DataError(
        f"{what} is a {type(value).__name__}: wanted a path, bytes, a data URL, or samples with their rate, as "
        "(array, rate) or {'array': …, 'sampling_rate': …}"
    )


def _of_samples(array: Any, rate: Any, what: str) -> bytes:
    """Write samples as a WAV file that gives them back to the last bit."""
    samples = np.asarray(array)
    if samples.dtype == np.float64:
        samples = samples.astype(np.float32)
    if samples.ndim == 2 and samples.shape[0] < samples.shape[1]:
        samples = samples.T  # (channels, samples), as torch's libraries have it
    if samples.ndim not in (1, 2) or samples.dtype not in (np.float32, np.int16) or samples.size == 0:
        raise DataError(
            f"{what} is an array {np.shape(array)} {samples.dtype}: wanted (samples,) or (samples, channels), float "
            "in -1 to 1 or int16, and not empty"
        )
    if samples.dtype == np.float32 and not (np.abs(samples) <= 1e4).all():
        raise DataError(f"{what} holds numbers that are not finite, or beyond 10,000: wanted float in -1 to 1")
    if isinstance(rate, bool) or not isinstance(rate, int | float | np.number) or not math.isfinite(rate):
        raise DataError(f"{what} has the sampling rate {rate!r}: give it beside the samples, as (array, 16000)")
    _check_shape(len(samples), int(rate), 1 if samples.ndim == 1 else samples.shape[1], what)
    file = io.BytesIO()
    subtype = "PCM_16" if samples.dtype == np.int16 else "FLOAT"
    _soundfile(what).write(file, samples, int(rate), format="WAV", subtype=subtype)
    return _undated(file.getvalue())


def _undated(data: bytes) -> bytes:
    """Return a WAV file without the second in which it was written, which libsndfile puts before the peaks of samples
    that are float: equal samples are one sound."""
    at = data.find(b"PEAK", 0, data.find(b"data"))
    return data if at < 0 else data[: at + 12] + bytes(4) + data[at + 16 :]


def _checked(data: bytes, what: str) -> tuple[int, int, int]:
    """Frames, rate and channels by the header."""
    soundfile = _soundfile(what)
    try:
        info = soundfile.info(io.BytesIO(data))
    except Exception as error:  # a decoder raises what it likes at hostile bytes
        raise DataError(
            f"{what} is broken or no sound: {len(data):,} bytes, begins {data[:12]!r} ({str(error)[:80]}); wanted "
            f"{', '.join(FORMATS)}"
        ) from None
    if info.format not in FORMATS:
        raise DataError(f"{what} is {info.format}: wanted {', '.join(FORMATS)}")
    _check_shape(info.frames, info.samplerate, info.channels, what)
    return int(info.frames), int(info.samplerate), int(info.channels)


def _check_shape(frames: int, rate: int, channels: int, what: str) -> None:
    if not 1 <= frames or frames * channels > MOST_SAMPLES:
        raise DataError(f"{what} has {frames:,} samples in {channels} channels; 1 to {MOST_SAMPLES:,} are decoded")
    if not RATES[0] <= rate <= RATES[1] or not 1 <= channels <= MOST_CHANNELS:
        raise DataError(
            f"{what} has {rate:,} samples a second in {channels} channels; {RATES[0]:,} to {RATES[1]:,} in 1 to "
            f"{MOST_CHANNELS} are read"
        )


def _resampled(samples: np.ndarray, rate: int, wanted: int, what: str) -> np.ndarray:
    try:
        import soxr
    except ModuleNotFoundError as error:
        raise DataError(
            f"{what} has {rate} samples a second and its model {wanted}; that needs soxr: pip install 'rlbench[audio]'"
        ) from error
    return np.ascontiguousarray(soxr.resample(samples, rate, wanted, quality="HQ"), np.float32)


def _soundfile(what: str) -> ModuleType:
    try:
        import soundfile
    except (ModuleNotFoundError, OSError) as error:  # OSError: the library that it binds is not there
        raise DataError(f"{what}: sounds need soundfile: pip install 'rlbench[audio]' ({error})") from error
    return soundfile  # type: ignore[no-any-return]
