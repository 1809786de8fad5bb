"""Prompts are taken in every form people hold them in; what is none is refused, naming its index."""

import numpy as np
import pandas
import pytest

from rlbench.data import EncodedImage, Prompt, as_prompts
from rlbench.errors import DataError

PIXELS = np.zeros((2, 3, 3), np.uint8)
CHAT = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]


def contents(given):
    return [p.content for p in as_prompts(given)]


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("hi", ["hi"]),
        (["a", "b"], ["a", "b"]),
        (("a", "b"), ["a", "b"]),
        ((text for text in "ab"), ["a", "b"]),
        ([CHAT, CHAT], [CHAT, CHAT]),
        (CHAT, [CHAT]),
        ([[1, 2], [3]], [[1, 2], [3]]),
        ([1, 2, 3], [[1, 2, 3]]),
        (np.array([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
        (np.array([1, 2, 3]), [[1, 2, 3]]),
        ([np.array([1, 2])], [[1, 2]]),
        (Prompt("p"), ["p"]),
        ({"prompt": "row"}, ["row"]),
        ([{"prompt": CHAT}, "text"], [CHAT, "text"]),
        (pandas.Series(["a", "b"]), ["a", "b"]),
        (pandas.DataFrame({"prompt": ["a", "b"], "label": [1, 2]}), ["a", "b"]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_one_prompt_or_many_in_every_form(given, wanted):
    assert contents(given) == wanted


def test_a_row_keeps_its_label_and_the_rest_as_meta():
    (prompt,) = as_prompts([{"prompt": "2+2", "label": 4, "source": "arithmetic"}])
    assert (prompt.content, prompt.label, prompt.meta) == ("2+2", 4, {"source": "arithmetic"})


def test_a_prompt_passes_through_untouched():
    prompt = Prompt("a", label="b")
    assert as_prompts([prompt])[0] is prompt


@pytest.mark.parametrize("empty", [[], (), iter(())])
def test_an_empty_list_is_refused(empty):
    with pytest.raises(DataError, match="prompt list is empty"):
        as_prompts(empty)


@pytest.mark.parametrize("nothing", [None, 3, 2.5])
def test_what_is_no_list_is_refused_by_its_type(nothing):
    with pytest.raises(DataError, match=type(nothing).__name__):
        as_prompts(nothing)


@pytest.mark.parametrize(
    "bad", [None, 3.5, [], [1, "a"], [True, False], {"text": "no prompt key"}, [{"content": "no role"}], b"x"]
)
def test_a_bad_prompt_is_refused_by_its_index_and_value(bad):
    with pytest.raises(DataError, match="prompt 1: wanted") as error:
        as_prompts(["fine", bad])
    assert type(bad).__name__ in str(error.value)


def test_an_empty_text_is_refused_by_its_index():
    with pytest.raises(DataError, match="prompt 1 is an empty text"):
        as_prompts(["a", ""])


def test_a_long_bad_prompt_is_shown_cut():
    with pytest.raises(DataError) as error:
        as_prompts(["a", {"x": "y" * 5000}])
    assert len(str(error.value)) < 300


def test_the_text_for_a_reader():
    assert Prompt("abc").text == "abc"
    assert Prompt(CHAT).text == "hello"
    assert Prompt([1, 2]).text == "[1, 2]"


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ([{"type": "image", "image": PIXELS}, {"type": "text", "text": "What is it?"}], "[image] What is it?"),
        (
            [{"type": "image_url", "image_url": {"url": EncodedImage.from_any(PIXELS).data_url}}, "plain"],
            "[image] plain",
        ),
        ([{"type": "file"}], "[file]"),
        (None, ""),
        ([], ""),
    ],
)
def test_a_message_of_parts_has_a_text_that_names_what_is_no_text(content, text):
    assert Prompt([{"role": "user", "content": content}]).text == text


def test_vllms_dicts_are_prompts_and_what_is_no_text_in_them_is_refused():
    (by_ids, by_text) = as_prompts(
        [
            {"prompt_token_ids": [1, 2], "prompt": "the same as text", "label": 3},
            {"prompt": "x", "multi_modal_data": None, "source": "a"},
        ]
    )
    assert (by_ids.content, by_ids.label, dict(by_ids.meta)) == ([1, 2], 3, {})
    assert (by_text.content, dict(by_text.meta)) == ("x", {"source": "a"})
    for name, value in (("multi_modal_data", {"depth": [1]}), ("prompt_embeds", [1]), ("multi_modal_uuids", [1])):
        with pytest.raises(DataError, match=f"prompt 1 has {name}"):
            as_prompts(["a", {"prompt": "x", name: value}])
