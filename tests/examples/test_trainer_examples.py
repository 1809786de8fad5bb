"""The trainers' examples on real ranks and replicas, as one starts them: they run, learn, and leave nothing behind."""

import os
import re
import subprocess
import sys

import numpy as np
import pytest

EXAMPLES = ("grpo", "ppo_critic", "dapo", "gspo", "rloo", "multi_reward")
MOST_LINES = 140
LEARNING = 7
"""Iterations after which grpo and ppo_critic have learned beyond noise."""
REWARD_MARGIN, GREEDY_MARGIN = 0.12, 0.25
"""What they must gain: mean reward of the last three iterations over the first three, greedy accuracy over the start.

Measured on 22 November 2026 over those iterations, with seeds 0, 1 and 2: grpo gained 0.24, 0.26 and 0.23 in reward
and 0.53, 0.48 and 0.52 in greedy accuracy, ppo_critic 0.34, 0.28 and 0.34, and 0.62, 0.63 and 0.62. With shuffled
advantages and the same seeds grpo gained at most 0.04 and nothing, ppo_critic nothing and at most 0.03; with a learning
rate of 0 (seed 0) grpo gained 0.03 and nothing.
"""


def run(name, iterations, repository, folder):
    """What an example printed, run in a cluster of its own, from which nothing is left."""
    done = subprocess.run(
        [sys.executable, f"examples/{name}.py", "--iterations", str(iterations)],
        cwd=repository,
        env=os.environ | {"XDG_STATE_HOME": str(folder)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    assert not (folder / "rlbench" / "cluster.json").exists(), "its cluster still runs"
    return done.stdout


def numbers(what, text):
    """What stands after a word, wherever it does."""
    return np.array([float(x) for x in re.findall(rf"{what} (-?\d+\.?\d*)", text)])


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_can_be_read_at_once(name, repository):
    lines = (repository / "examples" / f"{name}.py").read_text(encoding="utf-8").splitlines()
    assert len(lines) < MOST_LINES


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_recipes_show_its_command(name, repository):
    page = (repository / "docs" / "recipes.md").read_text(encoding="utf-8")
    assert f"python examples/{name}.py" in page


@pytest.mark.curve
@pytest.mark.engine
@pytest.mark.parametrize("name", ["grpo", "ppo_critic"])
def test_the_reward_rises_beyond_noise(name, repository, tiny_path, tmp_path):
    said = run(name, LEARNING, repository, tmp_path)
    rewards = numbers("reward", said)
    assert len(rewards) == LEARNING
    assert rewards[-3:].mean() > rewards[:3].mean() + REWARD_MARGIN
    before, after = map(float, re.search(r"greedy on unseen prompts: (\S+) -> (\S+)", said).groups())
    assert after > before + GREEDY_MARGIN


@pytest.mark.engine
@pytest.mark.parametrize(
    ("name", "also"),
    [  # the rest in `make test-long`
        ("multi_reward", ("judge", "rule", "service", "right")),
        pytest.param("dapo", ("groups with a signal", "clipped above", "overlong"), marks=pytest.mark.long),
        pytest.param("gspo", ("responses clipped",), marks=pytest.mark.long),
        pytest.param("rloo", ("KL to the start",), marks=pytest.mark.long),
    ],
)
def test_each_iteration_is_told_with_what_the_method_is_about(name, also, repository, tiny_path, tmp_path):
    said = run(name, 2, repository, tmp_path)
    for what in ("reward", *also):
        found = numbers(what, "\n".join(line for line in said.splitlines() if line.startswith("iteration ")))
        assert len(found) == 2 and np.isfinite(found).all(), what
        assert ((found >= 0) & (found <= 1)).all() or what in ("reward", "overlong"), what
