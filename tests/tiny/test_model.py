"""The tiny model as others see it: its files, its tokenizer, how often it is right, where it lies."""

import json
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlbench import tiny
from rlbench.errors import BuildError, DataError
from rlbench.tiny import cache, tasks
from rlbench.tiny.warmup import WINDOW, greedy_accuracy

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def model(model_folder):
    return AutoModelForCausalLM.from_pretrained(model_folder)


@pytest.fixture(scope="module")
def tokenizer(model_folder):
    return AutoTokenizer.from_pretrained(model_folder)


def test_is_a_small_tied_float32_qwen2_that_vllm_can_serve(model, tokenizer):
    config = model.config
    assert config.model_type == "qwen2"
    assert model.num_parameters() <= 3_000_000
    assert config.tie_word_embeddings
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert config.hidden_size // config.num_attention_heads >= 32
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert config.vocab_size == len(tokenizer)
    assert model.generation_config.eos_token_id == config.eos_token_id == tokenizer.eos_token_id


def test_is_right_sometimes_on_unseen_prompts(model, tokenizer, model_folder):
    accuracy = greedy_accuracy(model, tokenizer, tasks.prompts(256, "eval", seed=7))
    assert WINDOW == (0.15, 0.40)
    assert WINDOW[0] <= accuracy <= WINDOW[1]
    facts = json.loads((model_folder / "rlbench_tiny.json").read_text())
    assert WINDOW[0] <= facts["accuracy"] <= WINDOW[1]


def test_sampling_finds_right_answers_where_greedy_is_wrong(model, tokenizer):
    """What reinforcement learning lives on: within 8 samples most prompts see both outcomes."""
    torch.manual_seed(0)
    mixed = 0
    for prompt in tasks.prompts(16, "eval", seed=3):
        ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True, return_tensors="pt")
        sampled = model.generate(**ids, do_sample=True, num_return_sequences=8, max_new_tokens=12, top_k=0)
        said = tokenizer.batch_decode(sampled[:, ids["input_ids"].shape[1] :], skip_special_tokens=True)
        right = sum(text == tasks.answer(prompt) for text in said)
        mixed += 0 < right < 8
    assert mixed >= 6


def test_tokenizer_gives_any_text_back(tokenizer):
    for text in ("sort 52143", "héllo 你好 🙂", "\x00\t\n  two  spaces ", "a<b>&c", "[](x)"):
        assert tokenizer.encode(text) == list(text.encode())
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_chat_template_round_trip(tokenizer):
    chat = [
        {"role": "system", "content": "be right"},
        {"role": "user", "content": "sort 312"},
        {"role": "assistant", "content": "123"},
    ]
    text = tokenizer.apply_chat_template(chat, tokenize=False)
    assert text == "<|system|>be right<|end|><|user|>sort 312<|end|><|assistant|>123<|end|>"
    encoded = tokenizer.apply_chat_template(chat, return_dict=True, return_assistant_tokens_mask=True)
    assert tokenizer.decode(encoded["input_ids"]) == text
    spoken = [token for token, said in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True) if said]
    assert tokenizer.decode(spoken) == "123<|end|>"
    asked = tokenizer.apply_chat_template(chat[:2], tokenize=False, add_generation_prompt=True)
    assert asked == text.removesuffix("123<|end|>")
    with pytest.raises(Exception, match="unknown role"):
        tokenizer.apply_chat_template([{"role": "robot", "content": "x"}], tokenize=False)


def test_found_again_without_torch_and_without_making_it(model_folder):
    code = (
        "import sys; from rlbench import tiny;"
        "again = lambda *progress: sys.exit('made again');"
        f"path = tiny.ensure(cache_dir={str(model_folder.parent)!r}, on_progress=again);"
        f"assert str(path) == {str(model_folder)!r}, path;"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})


def test_lives_under_the_cache_home(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.cache_folder() == tmp_path / "rlbench" / "tiny"
    folder = tiny.ensure("bench-10m", seed=3)
    assert folder.parent == tmp_path / "rlbench" / "tiny"
    parameters = AutoModelForCausalLM.from_pretrained(folder).num_parameters()
    assert 9_000_000 < parameters < 11_000_000
    assert [path for path in folder.parent.iterdir() if path.is_dir()] == [folder]


def test_a_failed_or_interrupted_build_leaves_no_folder(monkeypatch, tmp_path):
    def interrupt(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tiny.ensure(cache_dir=tmp_path, on_progress=interrupt)
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]
    failing = tmp_path / "python"
    failing.write_text("#!/bin/sh\necho \"KeyError: '$3'\" >&2\nexit 3\n")
    failing.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(failing))
    with pytest.raises(BuildError, match=r"(?s)'tiny' failed with status 3.*KeyError: 'tiny'"):
        tiny.ensure(cache_dir=tmp_path)
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]


def test_unknown_names_are_refused(tmp_path):
    with pytest.raises(DataError, match="nearest: tiny"):
        tiny.ensure("tinny", cache_dir=tmp_path)
