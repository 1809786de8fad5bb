"""Pieces of tokens join to the completion's text, whatever the bytes; what is no text is known as such."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from rlbench.data.rollouts.pieces import UNREADABLE, pieces_of
from rlbench.errors import DataError

SAMPLE = [
    "the quick brown fox",
    "1234 + 5678 = ?",
    "héllo wörld 漢字 🙂 naïve",
    "  two  spaces\n\tand tabs",
] * 20


def byte_level(folder):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(SAMPLE, trainer)
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True, normalized=False)])
    return saved(tokenizer, folder)


def sentencepiece(folder):
    """As Llama 2 and Gemma: `▁` for spaces, bytes that no piece covers as `<0xE6>`."""
    vocab = {"<unk>": 0, **{f"<0x{b:02X}>": 1 + b for b in range(256)}}
    vocab |= {c: len(vocab) + i for i, c in enumerate(sorted("▁abcdefghijklmnopqrstuvwxyz0123456789é"))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return saved(tokenizer, folder)


def wordpiece(folder):
    tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0, "play": 1, "##ing": 2, "games": 3}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    return saved(tokenizer, folder)


def saved(tokenizer, folder):
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer


@pytest.fixture(scope="module", params=[byte_level, sentencepiece], ids=["byte level", "sentencepiece"])
def pair(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    return request.param(folder), pieces_of(str(folder))


@settings(max_examples=200)
@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="▁|"), max_size=30))  # no "<|end|>"
def test_pieces_of_a_text_join_to_the_text(pair, text):
    tokenizer, pieces = pair
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    found = pieces(ids)
    assert len(found) == len(ids) and "".join(p.text for p in found) == text
    assert all(p.shown for p in found if p.kind != "text")


@settings(max_examples=200)
@given(ids=st.lists(st.integers(0, 255), max_size=20))
def test_any_bytes_read_as_the_text_that_they_decode_to(tiny_path, ids):
    found = pieces_of(str(tiny_path))(ids)
    text = "".join(p.text for p in found)
    assert text == bytes(ids).decode("utf-8", "replace") and len(found) == len(ids)


def test_a_character_over_several_tokens_stands_with_the_last_of_them(tiny_path):
    found = pieces_of(str(tiny_path))(list("a漢b".encode()))
    assert [(p.text, p.kind, p.shown) for p in found] == [
        ("a", "text", "a"),
        ("", "part", "E6"),
        ("", "part", "BC"),
        ("漢", "text", "漢"),
        ("b", "text", "b"),
    ]


def test_a_character_that_is_never_completed_is_marked_where_it_stands(tiny_path):
    found = pieces_of(str(tiny_path))([0xE6, 65, 0xE6, 257, 0xE6, 0xBC])
    assert [p.text for p in found] == ["\ufffd", "A", "\ufffd", "", "", "\ufffd"]
    assert [p.kind for p in found] == ["text", "text", "text", "special", "part", "text"]


def test_special_tokens_are_known_and_no_part_of_the_text(tiny_path):
    (piece,) = pieces_of(str(tiny_path))([257])
    assert piece == ("", "special", "<|end|>")


def test_other_decoders_are_asked_for_each_token(tmp_path):
    wordpiece(tmp_path)
    assert [p.text for p in pieces_of(str(tmp_path))([1, 2])] == ["play", "##ing"]


@pytest.mark.parametrize("known", ["", "/no/such/folder", "no-such-user/no-such-model", "a b c", "./gone"])
def test_without_a_tokenizer_pieces_are_the_numbers(known):
    pieces = pieces_of(known)
    assert pieces is UNREADABLE and not pieces.readable and pieces([7, 300])[1] == ("", "id", "300")


def test_an_id_beyond_the_vocabulary_is_its_number(tiny_path):
    assert pieces_of(str(tiny_path))([99999])[0] == ("", "id", "99999")


def test_a_tokenizer_that_cannot_be_read_is_an_error_and_no_silence(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match=r"tokenizer\.json is no tokenizer"):
        pieces_of(str(tmp_path))


def test_a_tokenizer_that_changed_is_read_again(tmp_path):
    wordpiece(tmp_path)
    first = pieces_of(str(tmp_path))
    assert pieces_of(str(tmp_path)) is first
    byte_level(tmp_path)
    assert pieces_of(str(tmp_path)) is not first
