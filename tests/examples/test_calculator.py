"""The calculator's example on real engines: what is taught, and that the tool's answers are not trained on."""

import importlib.util
import os
import re
import subprocess
import sys

import numpy as np
import pytest

from rlbench.tiny.tokenizer import build_tokenizer


@pytest.fixture(scope="module")
def example(repository):
    spec = importlib.util.spec_from_file_location("calculator_example", repository / "examples" / "calculator.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_lesson_is_what_a_rollout_will_hold(example):
    """The teacher's conversations, token by token, are what the template and the environment make of them."""
    tokenizer = build_tokenizer(512)
    batch = example.lesson(tokenizer, 40, seed=3)
    questions, asked = example.questions(40, seed=3), 0
    for i, question in enumerate(questions):
        start = tokenizer.apply_chat_template(question["prompt"], add_generation_prompt=True, return_dict=False)
        assert batch.prompts[i].tolist() == start
        mask, ids = batch.responses.with_values(batch.mask)[i], batch.responses[i]
        if mask.all():
            continue
        asked += 1
        text, answer = question["prompt"][0]["content"], question["label"]
        said = [
            {"role": "assistant", "content": f"<tool>calculator({text})</tool>"},
            {"role": "tool", "content": answer},
            {"role": "assistant", "content": answer},
        ]
        whole = tokenizer.apply_chat_template([*question["prompt"], *said], return_dict=False)
        assert start + ids.tolist() == whole
        assert tokenizer.decode(ids[~mask]) == f"<|tool|>{answer}<|end|><|assistant|>"
    assert 0.2 < asked / 40 < 0.5


def test_the_calculator_computes_sums_and_evaluates_nothing(example):
    assert example.calculator("37+58") == "95"
    for text in ("__import__('os')", "9" * 40, "1+", "2**9"):
        assert example.calculator(text).startswith("error")


@pytest.mark.engine
@pytest.mark.long
def test_asking_pays_and_is_learned(repository, tiny_path, tmp_path):
    done = subprocess.run(
        [sys.executable, "examples/calculator.py", "20"],
        cwd=repository,
        env=os.environ | {"XDG_STATE_HOME": str(tmp_path)},  # a cluster of its own
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rewards, asked = (
        np.array([float(x) for x in re.findall(rf"{what} (\d\.\d+)", done.stdout)]) for what in ("reward", "asked")
    )
    assert len(rewards) == 20 and rewards[-5:].mean() > rewards[:5].mean() + 0.3
    assert asked[-5:].mean() > asked[:5].mean() + 0.3
    taught, trained = (float(re.search(rf"{when}: (\S+) right", done.stdout)[1]) for when in ("taught", "trained"))
    assert trained > taught + 0.3
    trained_tokens, tokens = map(int, re.search(r"step 20: .* (\d+) of (\d+) tokens trained", done.stdout).groups())
    assert 0 < trained_tokens < tokens
