"""A sample with an environment of TRL's is what TRL's trainer makes of it; `trl_env_values.py` wrote TRL's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlbench.data import Prompt
from rlbench.envs import from_trl
from tests.envs.playing import play
from tests.envs.trl_guess import ASKED, reward_func
from tests.parity.trl_env_values import ITERATIONS, SAMPLES, ScoringEnv
from tests.workers.tiny_checkpoint import byte_tokenizer

CASES: dict[str, Any] = json.loads((Path(__file__).parent / "trl_env.json").read_text())["cases"]


def test_the_values_are_of_these_samples() -> None:
    assert CASES.keys() == SAMPLES.keys()


@pytest.mark.parametrize("name", SAMPLES)
def test_a_sample_is_trls(name: str) -> None:
    row, said = SAMPLES[name]
    env = from_trl(ScoringEnv, reward=reward_func)
    episode = play(env, Prompt(ASKED, meta=row), said, byte_tokenizer(), max_turns=ITERATIONS + 1)
    assert {
        "asked": episode.asked or ASKED[-1],
        "tools": [message for message in episode.messages if message["role"] == "tool"],
        "guesses": episode.env.instance.guesses,
        "columns": episode.env.instance.columns,
        "reward": pytest.approx(episode.turn_rewards[-1]),
    } == CASES[name]
