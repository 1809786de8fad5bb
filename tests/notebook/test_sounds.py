"""What the viewer says of a prompt's sounds, and how they are played."""

from __future__ import annotations

import base64
import io
from dataclasses import replace

import numpy as np
import soundfile

from rlbench.data import EncodedSound, Prompt
from rlbench.notebook.rollouts.prompt_parts import prompt_parts
from rlbench.notebook.rollouts.rows import Shown
from tests.data.written import written

NAME = "[sound, 1.5 s at 16000 Hz]"
TONE = 0.5 * np.sin(2 * np.pi * 440 * np.arange(24_000) / 16_000)
SOUND = EncodedSound.from_any((TONE, 16_000))
PARTS = [{"type": "text", "text": "first"}, {"type": "audio"}, {"type": "text", "text": "what?"}]
ASKED = Prompt([{"role": "user", "content": PARTS}], sounds=(SOUND,))


def test_a_sound_is_named_by_its_length_and_rate_where_it_stands() -> None:
    shown = prompt_parts(ASKED)
    assert [(part.role, part.text, part.sound) for part in shown] == [
        ("user", "first", ""),
        ("user", NAME, ""),
        ("user", "what?", ""),
    ]
    assert prompt_parts(Prompt([1, 2], sounds=(SOUND,)))[0].text == NAME


def test_the_whole_prompt_holds_it_written_again_and_what_is_broken_is_named() -> None:
    shown = Shown(written([ASKED], [["a"]]))
    assert shown.head(0)["more"]
    _, part, _ = shown.whole_prompt(0)["parts"]
    kind, data = part["sound"].split(",")
    assert kind == "data:audio/mpeg;base64" and part["text"] == NAME and len(data) < 40_000
    heard, rate = soundfile.read(io.BytesIO(base64.b64decode(data)))
    loudest = np.abs(np.fft.rfft(heard)).argmax() * rate / len(heard)
    assert rate == 16_000 and abs(loudest - 440) < 5
    broken = replace(ASKED, sounds=(replace(SOUND, data=SOUND.data[:30]),))
    assert "not played" in prompt_parts(broken, played=True)[1].text
    long = EncodedSound.from_any((np.zeros(61 * 16_000, np.float32), 16_000))
    assert "60 of them here" in prompt_parts(replace(ASKED, sounds=(long,)), played=True)[1].text
