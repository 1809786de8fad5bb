"""What a chat is written with besides its messages: options of its template, and tools."""

from __future__ import annotations

import pytest

from rlbench.data.prompts.chat import Templated, schemas, split_chat
from rlbench.errors import DataError
from rlbench.tiny.tokenizer import build_tokenizer


def look(place: str, far: bool = False) -> str:
    """Look somewhere.

    Args:
        place: where to look.
        far: whether beyond the horizon.
    """
    return place


def untold(x):
    return x


def test_functions_become_tools_by_signature_and_docstring_and_openais_form_stays() -> None:
    (made,) = schemas([look])
    assert made["function"]["name"] == "look" and made["function"]["description"] == "Look somewhere."
    parameters = made["function"]["parameters"]
    assert parameters["required"] == ["place"] and parameters["properties"]["far"]["type"] == "boolean"
    assert schemas([made, made["function"]]) == [made, made]
    chat, rest = split_chat({"tools": [look], "template": {"enable_thinking": False}, "top_p": 0.5})
    assert chat == {"tools": [made], "enable_thinking": False} and rest == {"top_p": 0.5}
    assert split_chat({"top_p": 0.5}) == ({}, {"top_p": 0.5})


@pytest.mark.parametrize(
    ("given", "token"),
    [
        ({"tools": look}, "a list of functions"),
        ({"tools": []}, "a list of functions"),
        ({"tools": [untold]}, "untold"),
        ({"tools": [{"type": "function"}]}, "is no tool"),
        ({"template": "qwen"}, "options of the chat template"),
        ({"template": {"add_generation_prompt": False}}, "add_generation_prompt"),
    ],
)
def test_what_is_no_tool_or_option_is_refused(given: dict, token: str) -> None:
    with pytest.raises(DataError, match=token):
        split_chat(given)


def test_options_reach_the_template_and_one_that_it_does_not_read_is_refused() -> None:
    tokenizer = build_tokenizer(64)
    with pytest.raises(DataError, match="does not read enable_thinking"):
        Templated(tokenizer, {"enable_thinking": False})
    tokenizer.chat_template = "{{ mood }}" + tokenizer.chat_template
    moody = Templated(tokenizer, {"mood": "!"})
    said = moody.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)
    assert said == "!<|user|>a<|end|>" and moody.decode([97]) == "a" and moody("a")["input_ids"] == [97]
    tokenizer.chat_template = None
    with pytest.raises(DataError, match="no chat template"):
        Templated(tokenizer, {"mood": "!"})
