"""What the viewer says of a prompt's sounds."""

from __future__ import annotations

import numpy as np

from rlbench.data import EncodedSound, Prompt
from rlbench.notebook.rollouts.prompt_parts import prompt_parts

SOUND = EncodedSound.from_any((np.zeros(24_000, np.float32), 16_000))


def test_a_sound_is_named_by_its_length_and_rate_where_it_stands() -> None:
    parts = [{"type": "text", "text": "first"}, {"type": "audio"}, {"type": "text", "text": "what?"}]
    shown = prompt_parts(Prompt([{"role": "user", "content": parts}], sounds=(SOUND,)))
    assert [(part.role, part.text, part.image) for part in shown] == [
        ("user", "first", ""),
        ("user", "[sound, 1.5 s at 16000 Hz]", ""),
        ("user", "what?", ""),
    ]
    assert prompt_parts(Prompt([1, 2], sounds=(SOUND,)))[0].text == "[sound, 1.5 s at 16000 Hz]"
