"""The text of tokens: what holds a conversation together is none of it, what a format is made of is."""

import pytest

from rlbench.data.rollouts.decoding import control_tokens, decoder
from rlbench.tiny.tokenizer import build_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    made = build_tokenizer(128)
    made.add_special_tokens({"additional_special_tokens": ["<tool_call>", "</tool_call>", "<think>", "</think>"]})
    return made


def ids(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def test_special_tokens_of_a_format_stay_and_those_around_messages_go(tokenizer):
    said = "<think>a</think><tool_call>6*7</tool_call>"
    assert set(ids(tokenizer, said)) & set(tokenizer.added_tokens_decoder), "they are special tokens"
    assert "tool_call" not in tokenizer.decode(ids(tokenizer, said), skip_special_tokens=True)
    text = decoder(tokenizer)
    assert text(ids(tokenizer, f"<|assistant|>{said}<|end|>")) == said
    assert text(ids(tokenizer, f"{said}<|end|><|endoftext|><|tool|>")) == said


def test_the_end_token_is_in_no_text(tokenizer):
    whole = decoder(tokenizer, skip_special_tokens=False)
    assert whole(ids(tokenizer, "<|user|>a<|end|>")) == "<|user|>a" and whole([]) == ""


def test_tags_that_a_template_itself_writes_are_a_format_still(tokenizer):
    before = tokenizer.chat_template
    try:
        tokenizer.chat_template = before + "<think>"
        assert decoder(tokenizer)(ids(tokenizer, "<think>a</think>b<|end|>")) == "<think>a</think>b"
        tokenizer.chat_template = "{{ raise_exception('no roles') }}"
        assert control_tokens(tokenizer) == set(ids(tokenizer, "<|end|><|endoftext|>"))
        tokenizer.chat_template = None
        assert decoder(tokenizer)(ids(tokenizer, "<tool_call>a<|end|>")) == "<tool_call>a"
    finally:
        tokenizer.chat_template = before


def test_without_a_tokenizer_there_is_no_text():
    assert decoder(None)([1, 2]) == ""
