"""Sounds of prompts: what is taken, in every form that people write them, and what hostile input meets."""

from __future__ import annotations

import base64
import io
import pickle
import struct
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import soundfile

import rlbench as rb
from rlbench.data import EncodedSound, Prompt, Rollouts, TrainBatch, as_prompts
from rlbench.data.prompts import encoded, sounds
from rlbench.data.prompts.columns import pictures_of
from rlbench.errors import DataError
from rlbench.weights.probe import probe_sound
from tests.data.values import generated, rollouts

RATE = 16_000
TONE = (0.5 * np.sin(2 * np.pi * 440 * np.arange(RATE // 4) / RATE)).astype(np.float32)


def file(samples: Any = TONE, rate: int = RATE, kind: str = "WAV", subtype: str | None = None) -> bytes:
    stream = io.BytesIO()
    soundfile.write(stream, samples, rate, format=kind, subtype=subtype)
    return stream.getvalue()


WAV = file()
SOUND = EncodedSound.from_any(WAV)
BASE64 = base64.b64encode(WAV).decode()


def asked(part: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [part, {"type": "text", "text": "what?"}]}]


PLACED = asked({"type": "audio"})


@pytest.mark.parametrize(
    "part",
    [
        {"type": "audio", "audio": WAV},
        {"type": "audio", "audio_url": f"data:audio/wav;base64,{BASE64}"},
        {"type": "audio_url", "audio_url": {"url": f"data:audio/wav;base64,{BASE64}"}},
        {"type": "input_audio", "input_audio": {"data": BASE64, "format": "wav"}},
        {"type": "audio", "audio": {"bytes": WAV, "path": None}},
    ],
)
def test_each_form_of_a_part_becomes_a_placeholder_and_one_sound(part: dict[str, Any]) -> None:
    (prompt,) = as_prompts([asked(part)])
    assert prompt.content == PLACED and prompt.sounds == (SOUND,) and prompt.media == (SOUND,) and not prompt.images
    assert prompt.text == "[audio] what?"


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": PLACED, "audios": [WAV]},
        {"prompt": PLACED, "audio": {"bytes": WAV, "path": None}},
        {"prompt": [{"role": "user", "content": "<audio>what?"}], "audio": WAV},
        {"prompt": [{"role": "user", "content": "what?"}], "multi_modal_data": {"audio": WAV}},
    ],
)
def test_sounds_beside_a_chat_stand_at_its_places_its_marks_or_in_front(row: dict[str, Any]) -> None:
    (prompt,) = as_prompts([row | {"label": "a", "id": 3}])
    assert (prompt.content, prompt.sounds, prompt.label, dict(prompt.meta)) == (PLACED, (SOUND,), "a", {"id": 3})
    (loaded,) = rb.data.load([row]) if "multi_modal_data" not in row else [prompt]
    assert (loaded.content, loaded.sounds) == (PLACED, (SOUND,))


@pytest.mark.parametrize(
    "samples",
    [(TONE, RATE), {"array": TONE, "sampling_rate": RATE}, (TONE.astype(np.float64), float(RATE)), [TONE, RATE]],
)
def test_samples_with_their_rate_come_back_to_the_last_bit(samples: Any) -> None:
    (prompt,) = as_prompts({"prompt": PLACED, "audio": samples})
    (sound,) = prompt.sounds
    assert np.array_equal(sound.samples(RATE), TONE)
    assert (sound.seconds, sound.rate, sound.channels) == (0.25, RATE, 1)
    assert np.array_equal(sound.decoded()["array"], TONE)
    peaks = sound.data.index(b"PEAK")
    assert sound.data[peaks + 12 : peaks + 16] == bytes(4), "the second of writing, which would tell equal sounds apart"


def test_a_path_and_the_audio_column_of_a_dataset_are_read_without_decoding(tmp_path: Path) -> None:
    path = tmp_path / "a.wav"
    path.write_bytes(WAV)
    assert EncodedSound.from_any(path) == EncodedSound.from_any(str(path)) == SOUND
    table = datasets.Dataset.from_dict({"prompt": ["what?"], "audio": [str(path)], "label": [1]})
    table = table.cast_column("audio", datasets.Audio())
    (prompt,) = rb.data.load(table, chat=True)
    assert (prompt.content, prompt.sounds) == (PLACED, (SOUND,))
    of_reference = {
        "prompt": asked({"type": "audio", "audio_url": str(path)}),
        "audio_path": str(path),
        "reference": "a",
    }
    (prompt,) = rb.data.load([of_reference], label="reference")  # a row of LightRFT's r1_aqa
    assert (prompt.content, prompt.sounds, prompt.label) == (PLACED, (SOUND,), "a")
    (named,) = rb.data.load([{"prompt": "what?", "clip": str(path)}], sounds="clip", chat=True)
    assert named.sounds == (SOUND,) and "clip" not in named.meta


def test_channels_are_mixed_and_rates_are_met_by_a_band_limited_resampler() -> None:
    both = EncodedSound.from_any((np.stack([TONE, -TONE]), RATE))
    assert both.channels == 2 and not both.samples(RATE).any()
    high = 48_000
    times = np.arange(high) / high
    low, beyond = np.sin(2 * np.pi * 440 * times), np.sin(2 * np.pi * 15_000 * times)
    heard = EncodedSound.from_any(((low + beyond) / 2, high)).samples(RATE)
    wanted = np.sin(2 * np.pi * 440 * np.arange(RATE) / RATE) / 2
    middle = slice(RATE // 10, -RATE // 10)
    assert len(heard) == RATE and heard.dtype == np.float32
    assert np.abs(heard - wanted)[middle].max() < 1e-3  # what 16 kHz cannot hold is gone, and not folded back


@pytest.mark.parametrize("kind", ["FLAC", "OGG", "MP3"])
def test_other_formats_are_decoded_and_the_probes_file_is_a_sound(kind: str) -> None:
    sound = EncodedSound.from_any(file(np.tile(TONE, 8), kind=kind))
    heard = sound.samples(RATE)
    assert sound.format == kind.lower() and abs(len(heard) - 8 * len(TONE)) < 3000 and heard.std() > 0.2
    assert sound.data_url.startswith("data:audio/")
    assert EncodedSound.from_any(probe_sound()).samples(RATE).std() > 0.1


NOT_FINITE = file(np.array([0.0, np.nan, 0.0], np.float32), subtype="FLOAT")


def sized(frames: int, rate: int) -> bytes:
    """A WAV file whose header says so, whatever it holds."""
    return (
        b"RIFF"
        + struct.pack("<I", 40)
        + b"WAVEfmt "
        + struct.pack("<IHHIIHH", 16, 1, 1, rate, 2 * rate, 2, 16)
        + b"data"
        + struct.pack("<I", 2 * frames)
        + b"\0\0" * min(frames, 8)
    )


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (b"", "broken or no sound"),
        (b"RIFF\0\0\0\0WAVE", "broken or no sound"),
        (b"\x89PNG\r\n\x1a\n" * 4, "broken or no sound"),
        (file(kind="AIFF"), "is AIFF: wanted WAV"),
        (sized(0, RATE), "0 samples"),
        (sized(8, 10), "10 samples a second"),
        (sized(8, 2_000_000), "2,000,000 samples a second"),
        ((np.zeros(0, np.float32), RATE), "not empty"),
        ((np.full(8, np.nan), RATE), "not finite"),
        ((np.zeros(8, np.int64), RATE), "int64"),
        ((np.zeros(8, np.float32), None), "a NoneType|sampling rate None"),
        ({"array": TONE}, "sampling rate None"),
        ({"array": TONE, "sampling_rate": True}, "sampling rate True"),
        ((np.zeros((40, 40), np.float32), RATE), "40 channels"),
        (TONE, "a ndarray"),
        ("no/such/file.wav", "cannot be read"),
        ("http://127.0.0.1/a.wav", "nothing remote is read unless asked"),
        ("data:audio/wav;base64,####", "no base64"),
        ({"data": "####", "format": "wav"}, "no base64"),
        (7, "is a int"),
    ],
)
def test_what_is_no_sound_is_refused_when_the_prompt_is_made(value: Any, said: str) -> None:
    with pytest.raises(DataError, match=said):
        EncodedSound.from_any(value)
    with pytest.raises(DataError, match="prompt 0: "):
        as_prompts([asked({"type": "audio", "audio": value})])


def test_what_only_decoding_shows_is_told_then_and_large_ones_are_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match="not finite"):
        EncodedSound.from_any(NOT_FINITE).samples(RATE)
    monkeypatch.setattr(sounds, "MOST_SAMPLES", 100)
    with pytest.raises(DataError, match="4,000 samples in 1 channels; 1 to 100 are decoded"):
        EncodedSound.from_any(WAV)
    monkeypatch.setattr(encoded, "MOST_BYTES", 50)
    with pytest.raises(DataError, match="at most 50 are read"):
        EncodedSound.from_any(WAV)


def test_without_the_library_a_sound_is_refused_by_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    other = EncodedSound.from_any((TONE, 8000))
    monkeypatch.setitem(sys.modules, "soxr", None)
    with pytest.raises(DataError, match=r"needs soxr: pip install 'rlbench\[audio\]'"):
        other.samples(RATE)
    monkeypatch.setitem(sys.modules, "soundfile", None)
    with pytest.raises(DataError, match=r"need soundfile: pip install 'rlbench\[audio\]'"):
        EncodedSound.from_any(WAV)


def test_more_or_fewer_sounds_than_places_and_images_beside_sounds_are_refused() -> None:
    for row in ({"prompt": PLACED}, {"prompt": PLACED, "audios": [WAV, WAV]}):
        with pytest.raises(DataError, match="placeholders for sounds"):
            as_prompts([row])
    picture = {"type": "image", "image": np.zeros((4, 4, 3), np.uint8)}
    both = [{"role": "user", "content": [picture, {"type": "audio", "audio": WAV}]}]
    with pytest.raises(DataError, match="images and sounds"):
        as_prompts([both])


def test_files_joins_and_batches_keep_sounds(tmp_path: Path) -> None:
    other = EncodedSound.from_any((TONE, 8000))
    given = ((SOUND,), (other, SOUND), ())
    made = rollouts()
    contents = (PLACED, [{"role": "user", "content": [{"type": "audio"}] * 2}], "what?")
    prompts = zip(made.prompts, contents, given, strict=True)
    made = replace(made, prompts=tuple(replace(p, content=c, sounds=s) for p, c, s in prompts)).score(range(6))
    assert [rollout.sounds for rollout in made.flat] == [own for own in given for _ in range(2)]
    again = Rollouts.from_parquet(made.to_parquet(tmp_path / "r.parquet"))
    assert again.prompts == made.prompts and again.prompts[0].sounds[0].data == WAV
    batch = made.batch(lambda rewards, group: rewards)
    assert batch.sounds == tuple(own for own in given for _ in range(2)) and batch.media == ("sounds",)
    read = TrainBatch.from_parquet(batch.to_parquet(tmp_path / "b.parquet"))
    assert read.sounds == batch.sounds and read.key == batch.key != batch.replace(sounds=None).key
    assert batch.rows([3, 0]).sounds == ((other, SOUND), (SOUND,))
    joined = rb.data.join(batch, batch.replace(sounds=None))
    assert joined.sounds == (*batch.sounds, *[()] * 6)
    assert pickle.loads(pickle.dumps(batch)).sounds == batch.sounds
    with pytest.raises(DataError, match="sounds of 1 sequences for 6"):
        batch.replace(sounds=((SOUND,),))


def test_functions_written_for_trl_find_sounds_by_name_and_others_decode_none() -> None:
    made = Rollouts.merge([Prompt("a"), Prompt("b")], [generated([(0, 0, [1], "stop"), (1, 0, [2], "stop")])], {})
    first = replace(made.prompts[0], content=PLACED, sounds=(SOUND,))
    made = replace(made, prompts=(first, *made.prompts[1:]))

    def loud(completions, audios, audio, **columns):
        assert audios[1] == [] and audio[1] is None
        return [len(own[0]["array"]) if own else -1.0 for own in audios]

    assert made.score(loud).rewards.tolist() == [len(TONE), -1.0]
    assert made.score(lambda rollout: float(len(rollout.sounds))).rewards.tolist() == [1.0, 0.0]
    assert pictures_of(first, lambda audios: None)["audios"][0]["sampling_rate"] == RATE
    assert pictures_of(first, lambda images: None)["images"] == []
