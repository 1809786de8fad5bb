"""Images that an environment showed, where they stand in a completion: in the viewer, saved notebooks and pages."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rlbench.data import EncodedImage, Ragged, Rollouts
from rlbench.data.prompts.images import PlacedImage
from rlbench.notebook.rollouts.rows import Shown
from rlbench.notebook.rollouts.static import rollouts_view
from tests.data.written import spelling, written

PAD = 5
RUN = 600


@pytest.fixture
def shown(tmp_path: Path) -> Rollouts:
    """Two completions of one prompt; the first is shown a large image behind two tokens, then a small one."""
    tokenizer = spelling(tmp_path, ["a", "b", "c", "d", "e"], "<|image_pad|>")
    large, small = (EncodedImage.from_any(np.full((*size, 3), 90, np.uint8)) for size in ((400, 640), (8, 8)))
    ids = [[0, 1, *[PAD] * RUN, 2, *[PAD] * 4, 3, 4], [0, 1]]
    made = written(["look"], [["x", "y"]], tokenizer=tokenizer)
    flat = Ragged.from_rows(ids, np.int32)
    return replace(
        made,
        responses=flat,
        logprobs=np.zeros(len(flat.values), np.float32),
        observed_images=((PlacedImage.of(large, 2), PlacedImage.of(small, 3 + RUN)), ()),
    )


def test_a_run_of_tokens_is_one_chip_and_a_small_picture_stands_before_it(shown: Rollouts) -> None:
    row, span = Shown(shown).row(0)
    texts = [(t, text) for t, text in enumerate(row["pieces"]) if text]
    behind = RUN + 3
    assert texts == [
        *((0, "a"), (1, "b"), (2, f"image ×{RUN}"), (behind - 1, "c"), (behind, "image ×4")),
        *((behind + 4, "d"), (behind + 5, "e")),
    ]
    assert span == slice(0, RUN + 9) and len(row["kinds"]) == RUN + 9
    large, small = row["images"]
    assert (large["t"], large["tokens"], large["alt"]) == (2, RUN, "image 640 × 400")
    assert (small["t"], small["tokens"]) == (behind, 4) and large["src"].startswith("data:image/png;")
    assert Shown(shown).row(1)[0]["images"] == []


def test_what_is_asked_for_in_parts_says_each_image_once(shown: Rollouts) -> None:
    parts = [Shown(shown).row(0, start, 200, preview=False)[0] for start in range(0, RUN + 9, 200)]
    assert [image["t"] for part in parts for image in part["images"]] == [2, RUN + 3]
    whole = Shown(shown).row(0, 0, 2000, preview=False)[0]["pieces"]
    assert [piece for part in parts for piece in part["pieces"]] == whole


def test_saved_notebooks_and_pages_hold_it_small(shown: Rollouts, tmp_path: Path) -> None:
    saved = rollouts_view(shown)
    assert saved.count("<img") == 2 and f"image ×{RUN}" in saved and len(saved) < 40_000
    masked = replace(shown, mask=np.isin(shown.responses.values, [0, 1]), turns=np.zeros(len(shown.logprobs), np.int32))
    assert "<span class=off title=0></span>" not in rollouts_view(masked)
    page = shown.to_html(tmp_path / "page.html").read_text()
    assert page.count("<img") == 2 and len(re.findall(r"<i[ >]", page)) == len(shown.logprobs)
    assert "http://" not in page and "https://" not in page
