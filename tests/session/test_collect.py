"""Agent programs as rollouts: functions and commands, what fails, and that a reward rises."""

from __future__ import annotations

import asyncio
import importlib
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import openai
import pytest

import rlbench as rb
from rlbench.errors import DataError

pytestmark = pytest.mark.engine

SLEEPER = "import subprocess; subprocess.Popen(['sleep', '77.7'])"


@pytest.fixture(scope="module", autouse=True)
def closed_behind(session: Any) -> Iterator[None]:
    yield
    session.endpoint().close()


@pytest.fixture(scope="module")
def agents(repository: Any) -> Iterator[Any]:
    folder = str(repository / "examples" / "agents")
    sys.path.insert(0, folder)
    yield importlib.import_module
    sys.path.remove(folder)


@pytest.fixture(scope="module")
def solve(agents: Any) -> Any:
    shared = openai.OpenAI(base_url="http://127.0.0.1", api_key="none")
    solve = agents("sorter").solve
    return lambda run: solve(shared.with_options(base_url=run.url, api_key=run.key), run.task, run.model)


def test_functions_and_commands_make_groups_of_runs_with_their_rewards(
    session: Any, solve: Any, repository: Any
) -> None:
    with session.collect(["sort 52143", "sort 1"], n=2) as runs:
        traces = runs.each(solve, concurrency=4)
    assert [run.group for run in traces] == [runs[0].group] * 2 + [runs[2].group] * 2
    assert all(run.reward is not None and not run.error and run.calls for run in traces)
    rollouts = traces.rollouts
    assert len(rollouts) == 2 and rollouts.samples == 4
    assert rollouts.rewards.tolist() == [run.reward for run in traces]
    assert rollouts.prompts[1].text == "sort 1"
    sampled = sum(len(choice.ids) for run in traces for call in run.calls for choice in call.choices)
    assert int(np.asarray(traces.batch(advantage=rb.rl.group_normalized()).mask).sum()) == sampled
    with session.collect(["sort 1"], n=1) as runs:
        (run,) = runs.each([sys.executable, str(repository / "examples/agents/sorter.py")], timeout_s=100)
    assert run.reward in (0.0, 0.5, 1.0) and len(run.calls) in (1, 2)


def test_what_fails_is_kept_as_such_and_the_rest_trains(session: Any) -> None:
    async def agent(run: Any) -> Any:
        if run.task == 0:
            raise ValueError("no idea")
        if run.task == 1:
            await asyncio.sleep(60)
        if run.task == 2:
            return "much"
        async with openai.AsyncOpenAI(base_url=run.url, api_key=run.key) as client:
            await client.completions.create(model="policy", prompt="ab", max_tokens=3)
        return 2.0

    with session.collect(4, n=1) as runs, pytest.warns(UserWarning, match="3 of 4 runs failed"):
        traces = runs.each(agent, timeout_s=6)
    assert [run.error.split(":")[0] for run in traces] == ["ValueError", "TimeoutError", "TypeError", ""]
    assert len(traces.failed) == 3 and traces.rollouts.samples == 1 and traces.rollouts.rewards.tolist() == [2.0]


def test_a_command_that_takes_too_long_or_fails_ends_with_all_it_started(session: Any) -> None:
    import psutil

    with session.collect(1, n=1) as runs, pytest.warns(UserWarning, match="timeout_s=2"):
        runs.each([sys.executable, "-c", SLEEPER], timeout_s=2)
    started = [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["sleep", "77.7"]]
    assert not psutil.wait_procs(started, timeout=120)[1], "killed, and gone once the system has come to it"
    with session.collect(1, n=1) as runs, pytest.warns(UserWarning, match="status 3: bad luck"):
        traces = runs.each([sys.executable, "-c", "import sys; print('bad luck', file=sys.stderr); sys.exit(3)"])
    with pytest.raises(DataError, match="1 failed"):
        traces.batch()


def test_what_is_no_task_or_program_is_refused(session: Any) -> None:
    for tasks_, n in (([], 1), (0, 1), (1, 0)):
        with pytest.raises(DataError, match="collect"):
            session.collect(tasks_, n=n)
    with session.collect(1, n=1) as runs, pytest.raises(DataError, match="list of words"):
        runs.each("python agent.py")


@pytest.mark.curve
@pytest.mark.parametrize("agent", ["openai", "pydantic-ai"])
def test_a_reward_rises_by_the_runs_of_an_agent_that_knows_nothing_of_it(
    session: Any, agents: Any, put_back: None, agent: str
) -> None:
    if agent != "openai":
        pytest.importorskip("pydantic_ai", reason="needs pydantic-ai: pip install 'pydantic-ai-slim[openai]'")
    session.set_lr(3e-4)
    rewards = agents("train_sorter").train(session, steps=6, seed=0, agent=agent)
    assert np.mean(rewards[-3:]) > np.mean(rewards[:2]) + 0.05, rewards
