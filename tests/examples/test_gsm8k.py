"""The GSM8K run: its file of options is one that `rlbench train` takes, its sample has the data set's form."""

import json
import re

import pytest

import rlbench as rb
from rlbench.trainers.options.run_config import RunConfig


@pytest.fixture
def sample(repository):
    return repository / "examples" / "gsm8k_sample.jsonl"


def test_the_options_are_a_runs(repository):
    config = RunConfig.load("grpo", str(repository / "examples" / "gsm8k.yaml"), {})
    assert config.run.lora_rank == 32 and config.run.prompt_data == "openai/gsm8k:main"
    assert config.strategy.train_batch_size == config.ppo.rollout_batch_size * config.strategy.n


def test_the_samples_problems_are_worked_out_right(sample):
    rows = [json.loads(line) for line in sample.read_text().splitlines()]
    assert len({row["question"] for row in rows}) == len(rows) == 24
    for row in rows:
        steps = re.findall(r"<<(.+?)=(\d+)>>", row["answer"])
        assert steps and all(eval(left) == int(right) for left, right in steps), row
        assert row["answer"].splitlines()[-1] == f"#### {steps[-1][1]}"


def test_its_labels_are_what_the_reward_takes(sample):
    prompts = rb.data.load(sample, prompt="question", label="answer", system="Reason.")
    assert prompts[0].content[0] == {"role": "system", "content": "Reason."}
    assert prompts[0].label.rpartition("#### ")[2] == "10"
