"""A plan of a trainer's critic and reward models against ranks that hold them: tensors by owner within 1 %, what a pass
takes within 15 %."""

from pathlib import Path

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2ForSequenceClassification

import rlbench as rb
from rlbench.tiny.cache import ensure
from rlbench.tiny.tokenizer import build_tokenizer
from tests.session.planning.measuring import LENGTH
from tests.session.planning.measuring_beside import (
    TOKENS,
    by_owner,
    critic_step,
    measured,
    planned,
    scoring,
    scoring_whole,
)
from tests.session.planning.test_measured import ONE_MILLION

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder: Path = tmp_path_factory.mktemp("policy")
    Qwen2ForCausalLM(Qwen2Config(**ONE_MILLION, tie_word_embeddings=True)).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def scorer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Wider than the policy, and in half precision."""
    folder: Path = tmp_path_factory.mktemp("scorer")
    config = Qwen2Config(**{**ONE_MILLION, "hidden_size": 192, "intermediate_size": 512}, num_labels=1)
    Qwen2ForSequenceClassification(config).to(torch.bfloat16).save_pretrained(folder)
    return str(folder)


def assert_close(foretold, taken):
    for owner in taken.keys() - {"pass"}:
        assert foretold[owner] == pytest.approx(taken[owner], rel=0.01), owner
    assert foretold["pass"] == pytest.approx(taken["pass"], rel=0.15)


@pytest.mark.parametrize(
    ("train", "count", "packed"),
    [
        ({}, 1, True),
        ({}, 1, False),
        ({}, 2, True),
        ({"bf16": True}, 1, True),
        ({"use_mp_opt": True}, 1, True),
        ({"lora": rb.Lora(rank=8), "gradient_checkpointing": True}, 1, True),
    ],
    ids=str,
)
def test_a_critic_takes_what_was_planned(policy, train, count, packed):
    taken = measured(critic_step, policy, train, count, policy, packed)
    assert_close(by_owner(planned(policy, train, count, critic=True)[0]), taken)


@pytest.mark.gpu
@pytest.mark.parametrize("train", [{}, {"lora": rb.Lora(rank=8)}], ids=str)
def test_so_does_one_on_a_gpu(train):
    path, train = str(ensure("bench-10m")), {**train, "device": "cuda"}
    assert_close(by_owner(planned(path, train, 1, critic=True)[0]), measured(critic_step, path, train, 1, path, True))


@pytest.mark.parametrize(("train", "count"), [({}, 1), ({}, 2), ({"bf16": True}, 1)], ids=str)
def test_a_reward_model_takes_what_was_planned(policy, scorer, train, count):
    taken = measured(scoring, policy, train, count, scorer, [*[LENGTH] * (TOKENS // LENGTH - 1), LENGTH // 2])
    assert_close(by_owner(planned(policy, train, count, rewards=[scorer])[1]), taken)


@pytest.mark.parametrize("options", [{"batch_size": 4}, {"batch_size": 2, "dtype": "bfloat16"}], ids=str)
def test_so_does_one_that_each_rank_loads_whole(policy, scorer, options):
    build_tokenizer(LENGTH).save_pretrained(scorer)
    reward = rb.rewards.model(scorer, device="cpu", **options)
    assert_close(by_owner(planned(policy, {}, 1, rewards=[reward])[1]), scoring_whole(reward))


@pytest.mark.gpu
def test_so_does_one_that_scores_on_a_gpu(scorer):
    path, train = str(ensure("bench-10m")), {"device": "cuda"}
    taken = measured(scoring, path, train, 1, scorer, [*[LENGTH] * (TOKENS // LENGTH - 1), LENGTH // 2])
    assert_close(by_owner(planned(path, train, 1, rewards=[scorer])[1]), taken)
