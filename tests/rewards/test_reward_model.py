"""A reward model against a plain forward of transformers, and what is no reward model."""

import gc
import pickle
import weakref

import numpy as np
import pytest

from rlbench.data import Prompt
from rlbench.errors import DataError
from rlbench.rewards import model, weighted
from tests.data.written import written

CHAT = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "what is 3 + 4?"}]
CONTEXT = 128


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Random classifiers on the tiny tokenizer by number of outputs, and a language model."""
    import torch
    from transformers import (
        BertConfig,
        BertForSequenceClassification,
        Qwen2Config,
        Qwen2ForCausalLM,
        Qwen2ForSequenceClassification,
    )

    from rlbench.tiny.tokenizer import build_tokenizer

    tokenizer = build_tokenizer(CONTEXT)
    found = {"both ways": tmp_path_factory.mktemp("bert")}
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=CONTEXT,
        num_labels=1,
        pad_token_id=tokenizer.pad_token_id,
        initializer_range=0.3,
    )
    torch.manual_seed(3)
    BertForSequenceClassification(config).save_pretrained(found["both ways"])
    tokenizer.save_pretrained(found["both ways"])
    for name in ("one", "three", "language"):
        config = Qwen2Config(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=CONTEXT,
            num_labels=3 if name == "three" else 1,
            pad_token_id=None if name == "three" else tokenizer.pad_token_id,
            dtype="float32",
        )
        torch.manual_seed(3)
        found[name] = tmp_path_factory.mktemp(name)
        kind = Qwen2ForCausalLM if name == "language" else Qwen2ForSequenceClassification
        kind(config).save_pretrained(found[name])
        tokenizer.save_pretrained(found[name])
    return found


def reference(folder, texts, output=0):
    """Row by row, without padding."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    network = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        return [float(network(**tokenizer(text, return_tensors="pt")).logits[0, output]) for text in texts]


def value():
    return written(["sort 21 :", "ü 312 :"], [["12", "a longer answer, with more tokens"], ["", "7"]])


@pytest.mark.parametrize("kind", ["one", "both ways"])
@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_its_numbers_are_those_of_a_plain_forward_of_prompt_and_completion(folders, kind, batch_size):
    r = value()
    wanted = reference(folders[kind], [x.source.text + x.text for x in r.flat])
    scored = r.score(model(folders[kind], batch_size=batch_size, device="cpu"))
    np.testing.assert_allclose(scored.rewards, wanted, atol=1e-5)
    assert len(set(np.round(wanted, 4))) == 4 and (scored.reward_seconds > 0).all()


def test_messages_go_through_the_chat_template_and_text_on_request(folders):
    chat = written([Prompt(CHAT)], [["7", "eight"]])
    wanted = reference(
        folders["one"],
        [f"<|system|>be brief<|end|><|user|>what is 3 + 4?<|end|><|assistant|>{t}<|end|>" for t in ("7", "eight")],
    )
    scored = chat.score(model(folders["one"], device="cpu"))
    np.testing.assert_allclose(scored.rewards, wanted, atol=1e-5)
    text = written(["hi"], [["7"]]).score(model(folders["one"], chat=True, device="cpu"))
    wanted = reference(folders["one"], ["<|user|>hi<|end|><|assistant|>7<|end|>"])
    np.testing.assert_allclose(text.rewards, wanted, atol=1e-5)


def test_a_model_without_a_padding_token_and_with_several_outputs(folders):
    r = value()
    with pytest.raises(DataError, match=r"gives 3 numbers: say which is the reward by model\(…, output=0\)"):
        r.score(model(folders["three"]))
    with pytest.raises(DataError, match="output=3"):
        r.score(model(folders["three"], output=3))
    wanted = reference(folders["three"], [x.source.text + x.text for x in r.flat], output=2)
    np.testing.assert_allclose(r.score(model(folders["three"], output=2, device="cpu")).rewards, wanted, atol=1e-5)


def test_a_completion_too_long_and_a_prompt_of_token_ids_are_errors_of_their_own(folders):
    r = written(["a", Prompt([1, 2])], [["x" * CONTEXT, "x" * (CONTEXT - 1)], ["y"]])
    scored = r.score(model(folders["one"], device="cpu"), on_error="keep")
    assert np.isnan(scored.rewards).tolist() == [True, False, True]
    first, second = scored.reward_errors
    assert f"takes {CONTEXT} tokens, prompt and completion are {CONTEXT + 1}" in first.error
    assert "token ids" in second.error


def test_a_language_model_and_a_folder_without_a_model_are_refused(folders, tmp_path):
    with pytest.raises(DataError, match=r"no weights for score.weight"):
        value().score(model(folders["language"]))
    with pytest.raises(DataError, match="no reward model that can be loaded"):
        value().score(model(tmp_path))


def test_it_is_loaded_once_freed_on_request_and_travels_without_its_weights(folders):
    reward = model(folders["one"], batch_size=2, device="cpu")
    assert repr(reward) == f"model({str(folders['one'])!r}, batch_size=2, device='cpu')"
    first = value().score(reward)
    network = weakref.ref(reward._loaded[0])
    value().score(weighted({"a": (reward, 1)}))
    assert reward._loaded[0] is network()
    copy = pickle.loads(pickle.dumps(reward))
    assert copy._loaded is None and repr(copy) == repr(reward)
    reward.close()
    gc.collect()
    assert network() is None
    assert value().score(reward).rewards.tolist() == first.rewards.tolist()


@pytest.mark.parametrize("padding", ["end", "of the text", None])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_reward_is_read_at_the_last_token_whatever_the_padding_token_is(folders, tmp_path, padding, batch_size):
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    network = AutoModelForSequenceClassification.from_pretrained(folders["one"]).eval()
    tokenizer = AutoTokenizer.from_pretrained(folders["one"])
    chosen = {"end": tokenizer.eos_token_id, "of the text": ord("7"), None: None}[padding]
    network.config.pad_token_id = chosen
    network.save_pretrained(tmp_path)
    tokenizer.pad_token = tokenizer.eos_token if padding == "end" else tokenizer.pad_token
    tokenizer.save_pretrained(tmp_path)
    chat = written([Prompt(CHAT)], [["7", "eight", "a longer answer 77"]])
    asked = "<|system|>be brief<|end|><|user|>what is 3 + 4?<|end|><|assistant|>"
    wanted = []
    for text in chat.texts:
        ids = tokenizer(f"{asked}{text}<|end|>", return_tensors="pt")["input_ids"]
        assert ids[0, -1] == tokenizer.eos_token_id
        with torch.no_grad():
            wanted.append(float(network.score(network.model(input_ids=ids).last_hidden_state[0, -1])))
    scored = chat.score(model(tmp_path, batch_size=batch_size, device="cpu"))
    np.testing.assert_allclose(scored.rewards, wanted, atol=1e-5)
