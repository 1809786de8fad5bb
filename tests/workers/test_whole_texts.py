"""A text made once is the one that vLLM makes token by token."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer

from rlbench.workers.replica.serving.texts import WholeTexts
from tests.data.test_pieces import byte_level, sentencepiece

WHOLE = RequestOutputKind.FINAL_ONLY
TOKENS = st.lists(st.integers(0, 261), max_size=16)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)


@pytest.fixture(scope="module", params=["tiny", "byte level"])
def tokenizer(request: Any, tiny_path: str, tmp_path_factory: Any) -> Any:
    if request.param == "tiny":
        return AutoTokenizer.from_pretrained(tiny_path)
    folder = tmp_path_factory.mktemp("tokenizer")
    byte_level(folder)
    return PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))


def by_vllm(tokenizer: Any, prompt: list[int], ids: list[int], ended: bool, params: SamplingParams) -> str:
    request: Any = SimpleNamespace(request_id="r", prompt_token_ids=prompt, sampling_params=params)
    detokenizer = FastIncrementalDetokenizer(tokenizer, request)
    for number, token in enumerate(ids):
        detokenizer.update([token], ended and number == len(ids) - 1)
    return detokenizer.get_next_output_text(True, False)


@settings(max_examples=300, deadline=None)
@given(prompt=TOKENS, ids=TOKENS, text=TEXTS, ended=st.booleans(), include=st.booleans())
def test_a_text_is_the_same_whatever_bytes_were_sampled(
    tokenizer: Any, prompt: list[int], ids: list[int], text: str, ended: bool, include: bool
) -> None:
    """Ends of characters without their beginnings, special tokens, and texts among them."""
    texts, params = WholeTexts(tokenizer), SamplingParams(output_kind=WHOLE, include_stop_str_in_output=include)
    assert texts.takes(params)
    sampled = [*ids[:8], *tokenizer(text)["input_ids"], *ids[8:]]
    part = SimpleNamespace(token_ids=sampled, finish_reason="stop" if ended else "length")
    assert texts.of(part, prompt, params) == by_vllm(tokenizer, prompt, sampled, ended, params)


def test_a_character_begun_in_the_prompt_is_the_answers_where_it_ends(tokenizer: Any) -> None:
    first, *rest = tokenizer("\N{HAPPY PERSON RAISING ONE HAND}")["input_ids"]
    part = SimpleNamespace(token_ids=rest, finish_reason="length")
    params = SamplingParams(output_kind=WHOLE)
    assert WholeTexts(tokenizer).of(part, [first], params) == by_vllm(tokenizer, [first], rest, False, params) != ""


def test_what_somebody_looks_at_before_its_end_is_left_to_vllm(tokenizer: Any, tmp_path: Any) -> None:
    texts = WholeTexts(tokenizer)
    for options in ({"output_kind": RequestOutputKind.DELTA}, {"stop": ["x"]}, {"skip_special_tokens": False}):
        assert not texts.takes(SamplingParams(**({"output_kind": WHOLE} | options)))
    sentencepiece(tmp_path)
    of_pieces = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    assert not WholeTexts(of_pieces).takes(SamplingParams(output_kind=WHOLE))  # a space is whose?
    assert not WholeTexts(None).takes(SamplingParams(output_kind=WHOLE))
