"""A tokenizer by the Rust library alone does what transformers' does, or there is none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from rlbench.data.rollouts.decoding import decoder
from rlbench.data.rollouts.light import LightTokenizer, told_of_texts
from tests.data.test_pieces import byte_level, sentencepiece, wordpiece


def opened(folder: Path, **options: Any) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), **options)


@pytest.fixture(scope="module", params=["tiny", byte_level, sentencepiece], ids=["tiny", "byte level", "sentencepiece"])
def pair(request: Any, tiny_path: str, tmp_path_factory: Any) -> tuple[Any, LightTokenizer]:
    """Transformers' and ours; of the first, transformers sets other steps than its file has."""
    folder = Path(tiny_path)
    if request.param != "tiny":
        folder = tmp_path_factory.mktemp("tokenizer")
        request.param(folder)
    whole = AutoTokenizer.from_pretrained(folder) if request.param == "tiny" else opened(folder)
    told = json.loads(json.dumps(told_of_texts(whole)))  # as it travels
    light = LightTokenizer.of(str(folder), told)
    assert light is not None
    return whole, light


@settings(max_examples=200, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=30))
def test_texts_are_encoded_the_same(pair: Any, text: str) -> None:
    whole, light = pair
    assert light.encoded(text) == whole(text, add_special_tokens=False)["input_ids"]


@settings(max_examples=200, deadline=None)
@given(ids=st.lists(st.integers(0, 261), max_size=20))
def test_token_ids_are_decoded_the_same(pair: Any, ids: list[int]) -> None:
    whole, light = pair
    assert light.decoded(ids) == decoder(whole)(ids)


def test_steps_that_transformers_sets_anew_are_taken_over(tiny_path: str) -> None:
    whole = AutoTokenizer.from_pretrained(tiny_path)
    told = told_of_texts(whole)
    assert json.loads((Path(tiny_path) / "tokenizer.json").read_text())["normalizer"] != told["steps"]["normalizer"]
    assert LightTokenizer.of(tiny_path, told).encoded("e\u0301") == whole("\u00e9")["input_ids"]


class Own(PreTrainedTokenizerFast):
    def _decode(self, *args: Any, **kwargs: Any) -> str:
        return "mine"


def test_there_is_none_where_it_would_do_something_else(tmp_path: Path, tiny_path: str) -> None:
    byte_level(tmp_path)
    assert told_of_texts(Own(tokenizer_file=str(tmp_path / "tokenizer.json"))) is None
    assert told_of_texts(opened(tmp_path, split_special_tokens=True)) is None
    assert told_of_texts(None) is None
    told = told_of_texts(opened(tmp_path, extra_special_tokens=["<more>"]))
    assert LightTokenizer.of(str(tmp_path), told) is None, "the file does not have what was added"
    assert LightTokenizer.of(str(tmp_path / "none"), told) is None is LightTokenizer.of(tiny_path, None)
    (tmp_path / "words").mkdir()
    wordpiece(tmp_path / "words")
    assert told_of_texts(opened(tmp_path / "words", clean_up_tokenization_spaces=True)) is None
