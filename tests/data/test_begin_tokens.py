"""A text that begins with the special tokens that the tokenizer puts before texts, as a rendered chat does, has them
once, wherever texts become tokens."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest

from rlbench.data import demonstrations, load, pairs
from rlbench.data.prompts.lengths import begin_text, begun_note, encoded, text_ids, without_second
from rlbench.rewards import model
from rlbench.tiny.tokenizer import build_tokenizer
from tests.data.written import written
from tests.modules import beginning_tokenizer

CHAT = [{"role": "user", "content": "hi"}]
BEGIN = "<|endoftext|>"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return beginning_tokenizer()


@pytest.fixture(scope="module")
def rendered(tokenizer: Any) -> str:
    text = tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    assert text.startswith(BEGIN) and tokenizer(text)["input_ids"][:2] == [256, 256]
    return str(text)


def reward_ids(text: str, tokenizer: Any) -> list[int]:
    (rollout,) = written([text], [[""]]).flat
    return model("none", chat=False).token_ids(rollout, tokenizer)


DOORS: dict[str, Callable[[str, Any], list[int]]] = {
    "rollout and trainers": lambda text, tokenizer: encoded([text], tokenizer)[0],
    "a reward that reads texts": reward_ids,
    "load": lambda text, tokenizer: [0] * int(load([text], tokenizer=tokenizer).lengths[0]),
    "demonstrations": lambda text, tokenizer: (
        demonstrations([{"prompt": text, "completion": "yo"}], tokenizer).prompts[0].tolist()
    ),
    "pairs": lambda text, tokenizer: (
        pairs([{"prompt": text, "chosen": "yo", "rejected": "no"}], tokenizer).prompts[1].tolist()
    ),
}


@pytest.mark.parametrize("door", DOORS)
def test_what_a_template_has_rendered_gets_no_second_begin_token_and_a_note(
    door: str, tokenizer: Any, rendered: str
) -> None:
    chat = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    with pytest.warns(UserWarning, match="stands there once") as told:
        ids = DOORS[door](rendered, tokenizer)
    assert len(ids) == len(chat) and (door == "load" or ids == chat)
    assert told[0].filename == __file__


def test_other_texts_are_as_the_tokenizer_makes_them_without_a_note(tokenizer: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for text in ("hi", "<|user|>hi", "say " + BEGIN):
            assert text_ids([text], tokenizer) == [tokenizer(text)["input_ids"]]
        plain = build_tokenizer(64)
        assert text_ids([BEGIN + "hi"], plain) == [[256, 104, 105]]
    assert begin_text(plain) == "" == begin_text(None) and begin_text(tokenizer) == BEGIN
    assert begun_note([CHAT, [1], "a"], BEGIN) == "" and "2 of 3 prompts (the first is 1)" in begun_note(
        ["a", BEGIN, BEGIN + "b"], BEGIN
    )


def test_several_begin_tokens_are_one_beginning() -> None:
    assert without_second([1, 2, 1, 2, 3], [1, 2]) == [1, 2, 3]
    assert without_second([1, 2, 1, 3], [1, 2]) == [1, 2, 1, 3] and without_second([1, 1], []) == [1, 1]
