"""Lengths are those the engines will see; what is too long is told, in one of three ways, and never cut."""

import warnings

import numpy as np
import pytest

from rlbench.data import load
from rlbench.errors import DataError
from rlbench.tiny.tokenizer import build_tokenizer

CHAT = [{"role": "system", "content": "s"}, {"role": "user", "content": "hällo 🙂"}]
MIXED = ["a text", CHAT, [1, 2, 3], "x" * 300, "ünïcode"]


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer(512)


@pytest.fixture
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def texts(*lengths):
    """Texts of so many tokens: the tokenizer has one per byte."""
    return [chr(97 + i) * n for i, n in enumerate(lengths)]


def test_lengths_are_those_of_what_an_engine_encodes(tokenizer):
    from rlbench.workers.replica.job import encode_prompts

    prompts = MIXED * 400  # texts: more than are tokenised at once
    encoded = encode_prompts(prompts, tokenizer, 1000, len(tokenizer))
    found = load(prompts, tokenizer=tokenizer)
    assert found.lengths.tolist() == [len(ids) for ids in encoded]
    assert found.lengths.unit == "tokens" and len(set(found.lengths.tolist())) == 5
    wrapped = load(["a text"], system="be brief", tokenizer=tokenizer)
    assert wrapped.lengths[0] == len(encode_prompts([wrapped[0].content], tokenizer, 1000, len(tokenizer))[0])


def test_a_tokenizer_by_its_folder(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    assert load([CHAT, "abc"], tokenizer=str(tmp_path)).lengths.tolist() == (
        load([CHAT, "abc"], tokenizer=tokenizer).lengths.tolist()
    )


def test_a_tokenizer_that_adds_a_special_token_to_texts_counts_it(tokenizer):
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    inner = tokenizer.backend_tokenizer.__class__.from_str(tokenizer.backend_tokenizer.to_str())
    inner.post_processor = TemplateProcessing(single="<|end|> $A", special_tokens=[("<|end|>", 257)])
    adding = PreTrainedTokenizerFast(tokenizer_object=inner)
    assert load(["abc"], tokenizer=adding).lengths.tolist() == [4] == [len(adding("abc")["input_ids"])]


def test_too_long_ones_are_left_out_and_told(tokenizer):
    with pytest.warns(UserWarning, match="sums") as told:
        found = load(texts(3, 10, 4, 12), tokenizer=tokenizer, max_prompt_tokens=4, name="sums")
    assert [str(w.message) for w in told] == [
        "sums: 2 of 4 prompts have more than 4 tokens; the longest has 12 (row 3: 'dddddddddddd'). Left out; .too_long "
        "lists them"
    ]
    assert told[0].filename == __file__
    assert [p.content for p in found] == texts(3, 0, 4)[::2] and found.lengths.tolist() == [3, 4]
    assert [(t.source, t.row, t.tokens, t.text) for t in found.too_long] == [
        ("sums", 1, 10, "b" * 10),
        ("sums", 3, 12, "d" * 12),
    ]
    assert "2 too long for 4 tokens: .too_long" in repr(found)


def test_what_fits_exactly_fits(tokenizer, quiet):
    assert load(texts(4), tokenizer=tokenizer, max_prompt_tokens=4).too_long == ()


def test_rows_are_those_of_the_table_also_when_it_was_shuffled(tokenizer):
    prompts = texts(*[5] * 9, 30)
    with pytest.warns(UserWarning, match="row 9"):
        found = load(prompts, tokenizer=tokenizer, max_prompt_tokens=10, shuffle_seed=4)
    assert [t.row for t in found.too_long] == [9] and len(found) == 9
    with pytest.warns(UserWarning, match="row 9"):
        load(iter(prompts), tokenizer=tokenizer, max_prompt_tokens=10, shuffle_seed=4, limit=10)


def test_too_long_ones_can_be_kept_or_refused(tokenizer, quiet):
    kept = load(texts(3, 10), tokenizer=tokenizer, max_prompt_tokens=4, on_long="keep")
    assert kept.lengths.tolist() == [3, 10] and [t.row for t in kept.too_long] == [1]
    with pytest.raises(DataError, match="1 of 2 prompts has more than 4 tokens; the longest has 10"):
        load(texts(3, 10), tokenizer=tokenizer, max_prompt_tokens=4, on_long="raise")
    with pytest.raises(DataError, match="2 of 2 prompts have more than 2 tokens"):
        load(texts(3, 10), tokenizer=tokenizer, max_prompt_tokens=2)


def test_token_ids_need_no_tokenizer_and_texts_do(quiet):
    assert load([[1, 2], [3]], max_prompt_tokens=2).lengths.tolist() == [2, 1]
    with pytest.raises(DataError, match="row 1 is no token ids: give tokenizer="):
        load([[1, 2], "a"], max_prompt_tokens=2)


def test_a_chat_the_template_cannot_take_is_refused_by_its_row(tokenizer):
    with pytest.raises(DataError, match=r"row 1: the chat template refused: .*unknown role alien"):
        load(["a", [{"role": "alien", "content": "x"}]], tokenizer=tokenizer)
    bare = build_tokenizer(512)
    bare.chat_template = None
    with pytest.raises(DataError, match="row 0 is chat messages, but the tokenizer has no chat template"):
        load([CHAT], tokenizer=bare)


@pytest.mark.parametrize("bad", [3, object(), "/no/such/folder"])
def test_what_is_no_tokenizer_is_refused(bad):
    with pytest.raises(DataError, match="tokenizer="):
        load(["a"], tokenizer=bad)


def test_lengths_go_along_with_the_prompts(tokenizer, quiet):
    found = load(texts(1, 2, 3, 4, 5), tokenizer=tokenizer)
    assert found[1:3].lengths.tolist() == [2, 3] and found[[4, 0]].lengths.tolist() == [5, 1]
    assert found.filter(lambda p: len(p.content) > 3).lengths.tolist() == [4, 5]
    shuffled = found.shuffle(7)
    assert shuffled.lengths.tolist() == [len(p.content) for p in shuffled] and not np.array_equal(
        shuffled.lengths, found.lengths
    )
