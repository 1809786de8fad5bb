"""Images in demonstrations, pairs and judged responses: tokens as the model's processor makes them, and refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rlbench as rb
from rlbench.data.prompts.images import EncodedImage
from rlbench.errors import DataError
from rlbench.tiny.tokenizer import build_tokenizer
from rlbench.tiny.vision import png
from rlbench.tiny.vision_model import build_model, build_processor
from tests.data.test_texts import trained_texts

IMAGE = {"type": "image"}


def text(value: str) -> dict[str, str]:
    return {"type": "text", "text": value}


def picture(colours: str, wide: int = 56) -> Any:
    return EncodedImage.from_any(png(colours)).pil().resize((wide, 56))


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def assistant(said: str) -> dict[str, Any]:
    return {"role": "assistant", "content": said}


@pytest.fixture(scope="module")
def processor() -> Any:
    return build_processor()


@pytest.fixture(scope="module")
def seeing(processor: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of a Qwen2.5-VL's configuration and processor, without weights."""
    folder = tmp_path_factory.mktemp("seeing")
    build_model(processor, 1).config.save_pretrained(folder)
    processor.save_pretrained(folder)
    return str(folder)


def whole(batch: Any) -> list[list[int]]:
    return [[*prompt.tolist(), *answer.tolist()] for prompt, answer in zip(batch.prompts, batch.responses, strict=True)]


def reference(processor: Any, messages: list[dict[str, Any]], images: list[Any]) -> list[int]:
    """Token ids by transformers' processor."""
    said = processor.apply_chat_template(messages, tokenize=False)
    return processor(text=[said], images=images)["input_ids"][0]


def test_tokens_are_those_of_the_models_own_processor_and_no_image_token_is_trained(
    processor: Any, seeing: str
) -> None:
    one, two = picture("rgby"), picture("wwkk", 112)
    shown = [user(IMAGE, text("colours?")), assistant("rgby"), user(text("and"), IMAGE, text("?")), assistant("wwkk")]
    expected = reference(processor, shown, [one, two])
    inside = [user({**IMAGE, "image": one}, text("colours?")), shown[1]]
    inside += [user(text("and"), {**IMAGE, "image": two}, text("?")), shown[3]]
    marked = [{"role": "user", "content": "<image>colours?"}, shown[1]]
    marked += [{"role": "user", "content": "and<image>?"}, shown[3]]
    rows = [
        {"messages": inside},
        {"messages": shown, "images": [one, two]},
        {"messages": marked, "images": [one, two]},
        {"prompt": [dict(shown[0])], "completion": "rgby", "image": one},
        {"messages": [{"role": "user", "content": "colours?"}, shown[1]]},
    ]
    batch = rb.data.demonstrations(rows, seeing)
    tokens = whole(batch)
    assert tokens[:3] == [expected] * 3
    assert tokens[3] == reference(processor, shown[:2], [one])
    assert [len(own) for own in batch.images] == [2, 2, 2, 1, 0]
    assert [image.pil().size for image in batch.images[0]] == [(56, 56), (112, 56)]
    assert trained_texts(batch, processor.tokenizer)[0] == ["rgby<|end|>", "wwkk<|end|>"]
    assert not (batch.responses.values[batch.mask] == processor.image_token_id).any()
    assert whole(batch[3:]) == tokens[3:] and len(batch[3:].images[0]) == 1


def test_a_text_holds_the_models_own_placeholders(processor: Any, seeing: str) -> None:
    asked = f"<|vision_start|>{processor.image_token}<|vision_end|>colours?"
    batch = rb.data.demonstrations([{"prompt": asked, "completion": "rgby", "images": [picture("rgby", 84)]}], seeing)
    expected = processor(text=[asked], images=[picture("rgby", 84)])["input_ids"][0]
    assert batch.prompts[0].tolist() == expected


def test_both_of_a_pair_see_the_prompts_images(processor: Any, seeing: str) -> None:
    asked, one = [user(IMAGE, text("colours?"))], picture("rgby", 112)
    rows = [
        {"prompt": asked, "chosen": "rgby", "rejected": "yyyy", "images": [one]},
        {
            "chosen": [user({**IMAGE, "image": np.asarray(one)}, text("colours?")), assistant("rgby")],
            "rejected": [user({**IMAGE, "image": np.asarray(one)}, text("colours?")), assistant("yyyy")],
        },
    ]
    batch = rb.data.pairs(rows, seeing)
    expected = [reference(processor, [*asked, assistant(said)], [one]) for said in ("rgby", "yyyy")]
    assert whole(batch) == expected * 2
    assert [len(own) for own in batch.images] == [1] * 4 and batch.pair.tolist() == [0, 0, 1, 1]


def test_ktos_reference_point_sees_the_other_prompts_images(seeing: str) -> None:
    asked = [user(IMAGE, text("colours?"))]
    rows = [
        {"prompt": asked, "completion": colours, "label": True, "images": [picture(colours)]}
        for colours in ("rgby", "wwkk", "wwkk")
    ]
    batch = rb.data.labelled(rows, seeing)
    digests = [own[0].digest for own in batch.images]
    first, second = digests[0], digests[2]
    assert first != second, "one text, two pictures: two prompts"
    assert digests == [first, second, second, first, second, first]


def test_a_column_of_a_dataset_is_read_as_its_files_are(processor: Any, seeing: str) -> None:
    datasets = pytest.importorskip("datasets")
    kinds = datasets.Features(
        {"prompt": datasets.Value("string"), "completion": datasets.Value("string"), "image": datasets.Image()}
    )
    table = {"prompt": ["colours?"], "completion": ["rgby"], "image": [{"bytes": png("rgby"), "path": None}]}
    batch = rb.data.demonstrations(datasets.Dataset.from_dict(table, kinds), seeing, chat=True)
    assert batch.images[0][0].data == png("rgby")
    shown = [user(IMAGE, text("colours?")), assistant("rgby")]
    assert whole(batch) == [reference(processor, shown, [picture("rgby")])]


def test_images_go_to_files_and_back(seeing: str, tmp_path: Path) -> None:
    batch = rb.data.demonstrations(
        [{"prompt": "colours?", "completion": "rgby", "images": [png("rgby")]}] * 2, seeing, chat=True
    )
    read = rb.data.TrainBatch.from_parquet(batch.to_parquet(tmp_path / "texts.parquet"))
    assert read.images == batch.images and read.key == batch.key


@pytest.mark.parametrize(
    ("row", "token"),
    [
        ({"prompt": [user(text("x"))], "completion": "y", "images": [b"no image"]}, r"row 1: image 0 is broken"),
        ({"prompt": [user(IMAGE, text("x"))], "completion": "y"}, r"row 1: .*1 placeholders.* and 0 images"),
        ({"prompt": "no place", "completion": "y", "image": png("rgby")}, r"row 1: .*0 of the model's placeholders"),
        ({"prompt": [user(text("x"))], "completion": [user(IMAGE), assistant("y")]}, r"row 1: .*shows an image"),
        ({"prompt": [user(text("x"))], "completion": "y", "images": ["http://127.0.0.1:9/x.png"]}, "nothing remote"),
        ({"prompt": [user(text("x"))], "completion": "y", "Images": [png("rgby")]}, "Images"),
    ],
)
def test_what_cannot_be_seen_is_refused_with_its_row(seeing: str, row: dict[str, Any], token: str) -> None:
    good = {"prompt": [user(text("x"))], "completion": "y"}
    with pytest.raises(DataError, match=token):
        rb.data.demonstrations([good, row], seeing)


def test_pairs_of_different_images_and_models_without_eyes_are_refused(seeing: str, tmp_path: Path) -> None:
    chats = [[user({**IMAGE, "image": png(colours)}, text("?")), assistant(colours)] for colours in ("rgby", "wwkk")]
    with pytest.raises(DataError, match="different images or sounds"):
        rb.data.pairs([{"chosen": chats[0], "rejected": chats[1]}], seeing)
    blind = build_tokenizer(2048)
    blind.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    with pytest.raises(DataError, match=r"row 0: it has images, and .* is no model"):
        rb.data.demonstrations([{"messages": chats[0]}], str(tmp_path))
    with pytest.raises(DataError, match=r"row 0: it has images, and the tokenizer's model .* cannot be read"):
        rb.data.demonstrations([{"messages": chats[0]}], blind)


def test_a_row_whose_image_makes_it_too_long_is_not_cut(seeing: str) -> None:
    row = {"prompt": [user(text("x"))], "completion": "y", "images": [picture("rgby", 560)]}
    with pytest.raises(DataError, match=r"longer|room|tokens"):
        rb.data.demonstrations([row], seeing, max_length=20)
    assert len(rb.data.demonstrations([{**row, "images": []}], seeing, max_length=20)) == 1
