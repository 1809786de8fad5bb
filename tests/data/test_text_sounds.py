"""Sounds in demonstrations, pairs and judged responses: tokens as the model's processor makes them, and refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rlbench as rb
from rlbench.data.prompts.sounds import EncodedSound
from rlbench.errors import DataError
from rlbench.tiny.vision import png
from tests.hearing import RATE, save_ears, sounds

AUDIO = {"type": "audio"}


def text(value: str) -> dict[str, str]:
    return {"type": "text", "text": value}


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def assistant(said: str) -> dict[str, Any]:
    return {"role": "assistant", "content": said}


@pytest.fixture(scope="module")
def ears(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_ears(tmp_path_factory.mktemp("ears"))


@pytest.fixture(scope="module")
def processor(ears: str) -> Any:
    from transformers import AutoProcessor

    return AutoProcessor.from_pretrained(ears)


def whole(batch: Any) -> list[list[int]]:
    return [[*prompt.tolist(), *answer.tolist()] for prompt, answer in zip(batch.prompts, batch.responses, strict=True)]


def reference(processor: Any, messages: list[dict[str, Any]], heard: list[EncodedSound]) -> list[int]:
    """Token ids by transformers' processor."""
    said = processor.apply_chat_template(messages, tokenize=False)
    return processor(text=[said], audio=[one.samples(RATE) for one in heard], sampling_rate=RATE)["input_ids"][0]


def test_tokens_are_those_of_the_models_own_processor_and_no_sound_token_is_trained(processor: Any, ears: str) -> None:
    one, two = sounds(2)
    slow = EncodedSound.from_any((np.sin(np.arange(5000) / 7), 11_025))  # resampled
    shown = [user(AUDIO, text("what?")), assistant("bell"), user(text("and"), AUDIO, text("?")), assistant("horn")]
    inside = [user({**AUDIO, "audio": one.data}, text("what?")), shown[1]]
    inside += [
        user(text("and"), {"type": "input_audio", "input_audio": {"data": two.data_url.split(",")[1]}}, text("?"))
    ]
    marked = [
        {"role": "user", "content": "<audio>what?"},
        shown[1],
        {"role": "user", "content": "and<audio>?"},
        shown[3],
    ]
    rows = [
        {"messages": [*inside, shown[3]]},
        {"messages": shown, "audios": [one.decoded(), two]},
        {"messages": marked, "audios": [one, two]},
        {"prompt": [dict(shown[0])], "completion": "bell", "audio": slow.data},
        {"messages": [{"role": "user", "content": "what?"}, shown[1]]},
        {"prompt": "<|audio_bos|><|AUDIO|><|audio_eos|>what?", "completion": "bell", "audios": [two]},
    ]
    batch = rb.data.demonstrations(rows, ears)
    tokens = whole(batch)
    assert tokens[0] == tokens[2] == reference(processor, shown, [one, two])
    assert tokens[3] == reference(processor, shown[:2], [slow])
    assert [len(own) for own in batch.sounds] == [2, 2, 2, 1, 0, 1] and batch.images is None
    assert batch.responses.values[batch.mask].tolist().count(processor.audio_token_id) == 0
    assert tokens[5].count(processor.audio_token_id) == tokens[0].count(processor.audio_token_id) - (
        reference(processor, shown[:2], [one]).count(processor.audio_token_id)
    )


def test_pairs_and_judged_responses_hear_their_prompts_sounds(processor: Any, ears: str) -> None:
    asked, (one, two) = [user(AUDIO, text("what?"))], sounds(2)
    chats = [[user({**AUDIO, "audio": one.data}, text("what?")), assistant(said)] for said in ("bell", "horn")]
    pair = {"prompt": asked, "chosen": "bell", "rejected": "horn", "audios": [one]}
    pairs = rb.data.pairs([pair, {"chosen": chats[0], "rejected": chats[1]}], ears)
    expected = [reference(processor, [*asked, assistant(said)], [one]) for said in ("bell", "horn")]
    assert whole(pairs) == expected * 2 and [own[0].digest for own in pairs.sounds] == [one.digest] * 4
    rows = [{"prompt": asked, "completion": "x", "label": True, "audio": heard.data} for heard in (one, two)]
    judged = rb.data.labelled(rows, ears)
    assert [own[0].digest for own in judged.sounds] == [one.digest, two.digest, two.digest, one.digest]


def test_what_cannot_be_heard_is_refused_with_its_row(ears: str, tiny_path: Path) -> None:
    (one,) = sounds(1)
    long = EncodedSound.from_any((np.zeros(31 * RATE, np.float32), RATE))
    good = {"prompt": [user(text("x"))], "completion": "y"}
    placed = {"prompt": [user(AUDIO, text("x"))], "completion": "y"}
    for row, said in (
        ({**good, "audios": [b"no sound"]}, "row 1: sound 0"),
        (placed, r"row 1: .*1 placeholders.* and 0 sounds"),
        ({**good, "prompt": "no place", "audio": one}, r"row 1: .*0 of the model's placeholders and 1 sounds"),
        ({**good, "completion": [user(AUDIO), assistant("y")]}, r"row 1: .*shows a sound, which a prompt alone may"),
        ({**placed, "audios": [long]}, "row 1: .*longer than the 30 s"),
        ({**placed, "audios": [EncodedSound.from_any((np.zeros(200, np.float32), RATE))]}, "row 1: .*too short"),
        ({**placed, "audios": [one], "images": [png("rgby")]}, "row 1: it has images and sounds"),
        ({**good, "Audio": one}, "Audio"),
    ):
        with pytest.raises(DataError, match=said):
            rb.data.demonstrations([good, row], ears)
    with pytest.raises(DataError, match=r"row 0: it has sounds, and .* is no model of Qwen2-Audio's kind"):
        rb.data.demonstrations([{**placed, "audios": [one]}], str(tiny_path))
    others = [[user({**AUDIO, "audio": heard.data}, text("?")), assistant("y")] for heard in sounds(2)]
    with pytest.raises(DataError, match="different images or sounds"):
        rb.data.pairs([{"chosen": others[0], "rejected": others[1]}], ears)
