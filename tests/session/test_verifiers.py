"""A taskset of verifiers, played by verifiers itself in an environment of its own, trains the policy."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

import rlbench as rb
from rlbench.tiny import tasks
from tests.session.test_endpoint_evaluators import environment

pytestmark = [pytest.mark.engine, pytest.mark.long]


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(environment(tmp_path_factory.mktemp("verifiers") / "venv", "verifiers==0.4.0", "uv") / "python")


@pytest.fixture
def examples(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(repository / "examples" / "agents")
    monkeypatch.syspath_prepend(os.getcwd())


def test_training_on_its_rewards_makes_the_policy_better(
    session: Any, python: str, examples: None, put_back: None
) -> None:
    import train_sorter

    def solved() -> float:
        return float(session.evaluate(tasks.prompts(128, split="eval", seed=1), tasks.reward, max_tokens=12).reward)

    before = solved()
    session.set_lr(3e-4)
    session.endpoint()
    rewards = train_sorter.train(session, 6, 0, "verifiers", python, per_step=8)
    after = solved()
    assert len(rewards) == 6 and after > before + 0.1, (rewards, before, after)
    assert len(session.traces()) >= 6 * 8 * 8


def test_runs_have_the_tasks_prompt_and_verifiers_rewards(session: Any, python: str, examples: None) -> None:
    sampling = {"max_tokens": 12, "temperature": 0.5}
    with rb.envs.from_verifiers({"id": "sorter_verifiers", "seed": 3}, python=python, sampling=sampling) as env:
        questions = env.tasks(2)
        with session.collect(questions, n=3) as runs:
            traces = runs.each(env.play, timeout_s=300)
    assert not traces.failed and len(traces) == 6
    rollouts = traces.rollouts
    prompts = [questions[group]["prompt"] for group in rollouts.group]
    for text, prompt, reward in zip(rollouts.texts, prompts, rollouts.rewards, strict=True):
        assert float(text == tasks.answer(prompt)) == reward
    assert {call.sampling["temperature"] for run in traces.runs for call in run.calls} == {0.5}


def test_an_endpoint_that_refuses_is_a_failed_run(session: Any, python: str, examples: None) -> None:
    with rb.envs.from_verifiers("sorter_verifiers", python=python) as env:
        with session.collect(env.tasks(1), n=2) as runs:
            for run in runs:
                run.key = "wrong"
            with pytest.warns(UserWarning, match="2 of 2 runs failed"):
                traces = runs.each(env.play, timeout_s=300)
    assert len(traces.failed) == 2 and "401" in runs[0].error
