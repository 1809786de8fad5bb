"""What the viewer says of a prompt's videos, and which frames it shows."""

from __future__ import annotations

import base64
import io
from dataclasses import replace

import numpy as np
from PIL import Image

from rlbench.data import EncodedVideo, Prompt
from rlbench.notebook.rollouts.prompt_parts import prompt_parts
from rlbench.notebook.rollouts.rows import Shown
from tests.data.written import written
from tests.watching import PLACE

SHADES = np.arange(11, dtype=np.uint8) * 20
VIDEO = EncodedVideo.from_any((np.broadcast_to(SHADES[:, None, None, None], (11, 60, 80, 3)), 2.0))
NAME = "video, 5.5 s, 11 frames of 80×60, 2 a second"
PARTS = [{"type": "text", "text": "first"}, PLACE, {"type": "text", "text": "what?"}]
ASKED = Prompt([{"role": "user", "content": PARTS}], videos=(VIDEO,))


def test_a_video_is_named_by_its_length_and_frames_where_it_stands() -> None:
    shown = [(part.role, part.text, part.image) for part in prompt_parts(ASKED)]
    assert shown == [("user", "first", ""), ("user", f"[{NAME}]", ""), ("user", "what?", "")]
    assert prompt_parts(Prompt([1, 2], videos=(VIDEO,)))[0].text == f"[{NAME}]"


def test_the_whole_prompt_holds_some_frames_written_again_and_what_is_broken_is_named() -> None:
    shown = Shown(written([ASKED], [["a"]]))
    assert shown.head(0)["more"] and not shown.head(0)["images"]
    _, part, _ = shown.whole_prompt(0)["parts"]
    kind, data = part["image"].split(",")
    assert kind == "data:image/png;base64" and part["text"] == NAME
    strip = np.asarray(Image.open(io.BytesIO(base64.b64decode(data))))
    assert strip.shape == (60, 480, 3)
    assert strip[30, 40::80, 0].tolist() == [0, 40, 80, 120, 160, 200], "the first, the last, and four between"
    broken = replace(ASKED, videos=(replace(VIDEO, data=VIDEO.data[:90]),))
    assert "not shown" in prompt_parts(broken, played=True)[1].text
    assert prompt_parts(replace(ASKED, videos=(EncodedVideo.from_any((VIDEO.pixels([3]), 1.0)),)), played=True)[1].image
