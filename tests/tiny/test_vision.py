"""The tiny vision-language model as others see it: its files, its task, how often it is right."""

import json

import pytest

from rlbench import tiny
from rlbench.errors import DataError
from rlbench.tiny import vision


def test_pictures_do_not_repeat_and_splits_do_not_mix():
    train, unseen = tiny.vision_prompts(64, seed=3), tiny.vision_prompts(64, "eval", seed=3)
    labels = {row["label"] for row in train}
    assert len(labels) == 64 and not labels & {row["label"] for row in unseen}
    assert train == tiny.vision_prompts(64, seed=3) != tiny.vision_prompts(64, seed=4)
    with pytest.raises(DataError, match="count=100000"):
        tiny.vision_prompts(100_000)
    with pytest.raises(DataError, match="'test'"):
        tiny.vision_prompts(1, "test")


def test_a_picture_shows_its_colours_in_reading_order():
    import io

    from PIL import Image

    picture = Image.open(io.BytesIO(vision.png("rgby")))
    assert picture.size == (56, 56)
    seen = [picture.getpixel(at) for at in ((5, 5), (50, 5), (5, 50), (50, 50))]
    assert seen == [vision.COLOURS[colour] for colour in "rgby"]


@pytest.mark.engine
@pytest.mark.curve
def test_is_a_small_qwen_vl_that_is_right_sometimes_on_unseen_pictures():
    from transformers import AutoModelForImageTextToText, AutoProcessor

    from rlbench.tiny.vision_model import WINDOW, greedy_accuracy

    folder = tiny.ensure("tiny-vision")
    model, processor = AutoModelForImageTextToText.from_pretrained(folder), AutoProcessor.from_pretrained(folder)
    assert model.config.model_type == "qwen2_5_vl"
    assert model.config.get_text_config().vocab_size == len(processor.tokenizer)
    assert WINDOW[0] <= greedy_accuracy(model, processor, tiny.vision_prompts(100, "eval", seed=7)) <= WINDOW[1]
    assert WINDOW[0] <= json.loads((folder / "rlbench_tiny.json").read_text())["accuracy"] <= WINDOW[1]
