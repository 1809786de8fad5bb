"""Prompts with images: every form people write them in, where they stand, and what does not fit."""

import pickle
import subprocess
import sys

import numpy as np
import pandas
import pytest
from PIL import Image

import rlbench as rb
from rlbench.data import EncodedImage, Prompt, PromptSet, as_prompts, load
from rlbench.errors import DataError

RED, BLUE = (EncodedImage.from_any(Image.new("RGB", (4, 4), colour)) for colour in ("red", "blue"))
PLACE = {"type": "image"}


def says(text):
    return {"type": "text", "text": text}


def user(*parts):
    return [{"role": "user", "content": list(parts)}]


@pytest.mark.parametrize(
    "row",
    [
        user({"type": "image", "image": RED.pil()}, says("or"), {"type": "image", "image": BLUE.data}),
        user(
            {"type": "image_url", "image_url": {"url": RED.data_url}},
            says("or"),
            {"type": "image", "url": BLUE.data_url},
        ),
        user({"type": "input_image", "image_url": RED.data_url}, says("or"), {"type": "image", "image": BLUE}),
        {"prompt": user(PLACE, says("or"), PLACE), "images": [RED.pil(), BLUE]},
        {"prompt": user(PLACE, says("or"), PLACE), "image": [RED, {"bytes": BLUE.data, "path": None}]},
        {"prompt": user(PLACE, says("or"), {"type": "image", "image": BLUE}), "images": RED},
        {"prompt": [{"role": "user", "content": "<image>or<image>"}], "images": (RED, BLUE)},
        {"prompt": user(PLACE, says("or"), PLACE), "multi_modal_data": {"image": [RED, BLUE]}},
        Prompt(user(PLACE, says("or"), PLACE), images=(RED, BLUE)),
    ],
)
def test_a_chat_keeps_places_and_the_prompt_the_images(row):
    (prompt,) = as_prompts([row])
    assert prompt.content == user(PLACE, says("or"), PLACE)
    assert [np.asarray(i.pil()).tolist() for i in prompt.images] == [np.asarray(i.pil()).tolist() for i in (RED, BLUE)]
    assert prompt.text == "[image] or [image]" and "images" not in prompt.meta and "image" not in prompt.meta


def test_images_without_a_place_stand_before_the_first_user_message():
    chat = [
        {"role": "system", "content": "look"},
        {"role": "user", "content": "what?"},
        {"role": "user", "content": "?"},
    ]
    (prompt,) = as_prompts([{"prompt": chat, "images": [RED, BLUE]}])
    assert prompt.content == [chat[0], user(PLACE, PLACE, says("what?"))[0], chat[2]]
    assert as_prompts([{"prompt": chat, "images": []}])[0].content == chat


def test_texts_and_token_ids_hold_the_models_own_places():
    text, ids = as_prompts([{"prompt": "<pad> what?", "images": RED}, {"prompt_token_ids": [7, 1], "images": [RED]}])
    assert (text.content, ids.content, text.images, ids.images) == ("<pad> what?", [7, 1], (RED,), (RED,))


@pytest.mark.parametrize(
    ("row", "token"),
    [
        ({"prompt": user(PLACE, says("a")), "images": [RED, BLUE]}, "1 placeholders for images and 2"),
        (user(PLACE, says("a")), "1 placeholders for images and 0"),
        ({"prompt": [{"role": "user", "content": "<image>"}], "images": [RED, BLUE]}, "1 marks"),
        ({"prompt": [{"role": "system", "content": "a"}], "images": RED}, "no user message"),
        (user({"type": "image", "image": b"<svg/>"}), "image 0 is broken"),
        (
            user(says("a"), {"type": "image_url", "image_url": {"url": "https://images.example/x.png"}}),
            "image 0 .*remote",
        ),
        ({"prompt": "a", "multi_modal_data": {"depth": 1}}, "multi_modal_data of depth"),
    ],
)
def test_what_does_not_fit_is_refused_by_the_prompt(row, token):
    with pytest.raises(DataError, match=f"prompt 1.*{token}"):
        as_prompts(["fine", row])


def test_load_reads_columns_and_functions(tmp_path):
    (path := tmp_path / "red.png").write_bytes(RED.data)
    rows = [{"prompt": "what?", "label": "red", "images": [str(path)], "level": 2}, {"prompt": "no picture"}]
    seen = load(rows, chat=True)
    assert (
        seen[0].content == user(PLACE, says("what?"))
        and seen[0].images == (RED,)
        and dict(seen[0].meta) == {"level": 2}
    )
    assert not seen[1].images and seen[1].content == [{"role": "user", "content": "no picture"}]
    by_function = load(rows, chat=True, images=lambda row: row.get("images"))
    assert by_function[0].images == (RED,)
    assert dict(load(rows, images=None)[0].meta)["images"] == [str(path)]
    assert load(pandas.DataFrame({"prompt": ["a"], "image": [RED.pil()]}), chat=True)[0].images[0].width == 4
    for asked in (lambda: load([rows[0] | {"images": ["gone.png"]}], chat=True), lambda: load(rows, images="image")):
        with pytest.raises(DataError, match="row 0"):
            asked()
    with pytest.raises(DataError, match=r"row 0.*remote"):
        load([{"prompt": "a", "images": "https://images.example/x.png"}])


def test_image_columns_of_datasets_stay_encoded():
    datasets = pytest.importorskip("datasets")
    kinds = {"prompt": datasets.Value("string"), "images": datasets.List(datasets.Image())}
    table = datasets.Dataset.from_dict({"prompt": ["a"], "images": [[{"bytes": RED.data, "path": None}]]})
    many = load(table.cast(datasets.Features(kinds)), chat=True)
    one = load(
        datasets.Dataset.from_dict({"prompt": ["a"], "image": [RED.data]}).cast_column("image", datasets.Image())
    )
    assert many[0].images == one[0].images == (RED,) and one[0].images[0].data == RED.data


def test_sets_tell_images_apart_and_a_group_holds_them_once():
    red, blue = (PromptSet.of([Prompt(user(PLACE), "x", images=(i,))]) for i in (RED, BLUE))
    assert red.fingerprint != blue.fingerprint and len(load(list(red))[0].images) == 1
    large = EncodedImage.from_any(np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8))
    assert len(pickle.dumps([Prompt("<pad>", images=(large,)) for _ in range(64)])) < len(large.data) + 20_000


def test_prompts_of_text_import_nothing_for_images():
    code = "import sys, rlbench as rb; rb.data.as_prompts(['a', [{'role': 'user', 'content': [{'text': 'b'}]}]])"
    code += "; print([m for m in sys.modules if m.split('.')[0] in ('PIL', 'torchvision', 'torch', 'transformers')])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
    assert rb.data.EncodedImage is EncodedImage
