"""What `rb.envs.from_verifiers` says where there is nothing to play, without verifiers."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

import rlbench as rb
from rlbench.envs.verifiers_env import RUNNER, VerifiersError
from rlbench.envs.verifiers_runner import RENEWED_AFTER
from rlbench.errors import DataError
from tests.clock import until


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the runner imports of verifiers, as small as it can be: three tasks, whose episode lasts until a file lets
    it go."""
    package = tmp_path / "verifiers" / "v1"
    (package / "utils").mkdir(parents=True)
    (package / "configs").mkdir()
    for folder in (package.parent, package / "utils", package / "configs"):
        (folder / "__init__.py").touch()
    (package / "configs" / "agent.py").write_text("def agent_config_fields(block): return block['seats']\n")
    (package / "__init__.py").write_text(
        "from types import SimpleNamespace\nEvalClientConfig = ModelContext = SamplingConfig = SimpleNamespace\n"
    )
    (package / "utils" / "loaders.py").write_text(LOADERS)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("FOLDER", str(tmp_path))
    return tmp_path


LOADERS = """
import asyncio, contextlib, os, pathlib
from types import SimpleNamespace as Any

FOLDER = pathlib.Path(os.environ["FOLDER"])


class Tasks(list):
    bounded = True

    def shuffle(self, seed):
        return Tasks(reversed(self))


class Env:
    def __init__(self, block):
        print("printed by a taskset", flush=True)
        assert block["player"] == {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}, "model": "own"}, block
        self.taskset = Tasks(Any(data=Any(idx=i, name=None, prompt=f"say {i}")) for i in range(3))
        self.taskset.bounded = block["taskset"]["id"] != "endless"

    @contextlib.asynccontextmanager
    async def serving(self):
        with open(FOLDER / "served", "a") as file:
            file.write("+")
        yield

    async def run_episode(self, task, ctx):
        if task.data.idx == 2:
            raise SystemExit("not set up")
        (FOLDER / "begun").touch()
        try:
            while task.data.idx and not (FOLDER / "free").exists():
                await asyncio.sleep(0.01)
        except asyncio.CancelledError:
            (FOLDER / "ended").touch()
            raise
        bad = [Any(type="ProviderError", message="refused")] if ctx.model == "bad" else []
        told = f"{ctx.client.base_url} {os.environ[ctx.client.api_key_var]} {vars(ctx.sampling).get('temperature')}"
        (FOLDER / "told").write_text(told)
        trace = Any(reward=0.5, errors=bad)
        return Any(errors=[], traces=[trace, trace], ok=not bad)


def resolve_env_config(block):
    if block["taskset"]["id"] == "absent":
        raise ModuleNotFoundError("taskset 'absent' not found")
    seats = ["solver", "judge"] if block["taskset"]["id"] == "debate" else ["player"]
    return {**block, "seats": seats}


load_environment = Env
"""


def made(**options: Any) -> rb.envs.VerifiersEnv:
    return rb.envs.from_verifiers(
        **{"taskset": "three", "python": sys.executable, "env": {"player": {"model": "own"}}, **options}
    )


def run_of(task: Any, model: str = "policy") -> Any:
    from rlbench.session.endpoint.collecting import AgentRun

    return AgentRun("r", "http://127.0.0.1:1/run/r/v1", "secret", "g", task, model=model)


async def begun(library: Path) -> None:
    while not (library / "begun").exists():
        await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"python": None}, "verifiers/bin/pip install"),
        ({"python": "/absent/python"}, "is no interpreter"),
        ({"taskset": ""}, "taskset=''; give its id"),
        ({"taskset": {"count": 3}}, "give its id"),
        ({"runtime": {}}, "give its type"),
        ({"concurrency": 0}, "at least one"),
    ],
)
def test_arguments_that_mean_nothing_are_refused_with_what_to_do(options: dict[str, Any], said: str) -> None:
    with pytest.raises(DataError, match=said):
        made(**options)


def test_an_interpreter_without_verifiers_says_so_and_leaves_no_process() -> None:
    with pytest.raises(VerifiersError, match="ModuleNotFoundError: No module named 'verifiers'"):
        made()
    until(lambda: not runners())


def runners() -> list[psutil.Process]:
    children = psutil.Process().children()
    return [child for child in children if child.is_running() and str(RUNNER) in " ".join(child.cmdline())]


def test_tasks_are_listed_and_played_and_what_fails_is_told(library: Path) -> None:
    with made(sampling={"temperature": 0.5}) as env:
        first, _, last = env.tasks()
        assert first == {"idx": 0, "name": None, "prompt": "say 0"}
        assert env.tasks(1, seed=3) == [last] and not env.infinite
        assert asyncio.run(env.play(run_of(first))) == 1.0
        assert (library / "told").read_text() == "http://127.0.0.1:1/run/r/v1 secret 0.5"
        with pytest.raises(VerifiersError, match="ProviderError: refused; ProviderError"):
            asyncio.run(env.play(run_of(first, model="bad")))
        with pytest.raises(VerifiersError, match="SystemExit: not set up"):
            asyncio.run(env.play(run_of(last)))
        with pytest.raises(DataError, match="plays its own tasks"):
            asyncio.run(env.play(run_of("sort 31")))
        with pytest.raises(DataError, match="at least one task"):
            env.tasks(0)
        assert asyncio.run(env.play(run_of(first))) == 1.0, "it lives on"
    with pytest.raises(VerifiersError, match="has ended"):
        env.tasks()


def test_tasks_without_end_want_a_number(library: Path) -> None:
    with made(taskset="endless") as env:
        with pytest.raises(DataError, match="say how many"):
            env.tasks()
        assert len(env.tasks(2)) == 2
    with pytest.raises(VerifiersError, match="taskset 'absent' not found"):
        made(taskset="absent")
    with pytest.raises(VerifiersError, match="judge, solver: several agents"):
        made(taskset="debate")


def test_an_episode_that_is_given_up_ends_and_others_take_its_turn(library: Path) -> None:
    with made(concurrency=1) as env:
        first, second, _ = env.tasks()

        async def given_up() -> float:
            slow = asyncio.create_task(env.play(run_of(second)))
            await begun(library)
            waiting = asyncio.create_task(env.play(run_of(first)))
            slow.cancel()
            with pytest.raises(asyncio.CancelledError):
                await slow
            return await waiting

        assert asyncio.run(given_up()) == 1.0 and (library / "ended").exists()


def test_episodes_of_two_sessions_keep_their_keys(library: Path) -> None:
    with made() as env:
        _, second, _ = env.tasks()

        async def both() -> str:
            slow = asyncio.create_task(env.play(run_of(second)))
            await begun(library)
            other = run_of(env.tasks(1)[0])
            other.key = "another"
            await env.play(other)
            told = (library / "told").read_text()
            (library / "free").touch()
            await slow
            return told

        assert "another" in asyncio.run(both()) and " secret " in (library / "told").read_text()


def test_what_serves_many_episodes_is_made_anew(library: Path) -> None:
    with made() as env:
        (first,) = env.tasks(1)
        for _ in range(2 * RENEWED_AFTER + 1):
            asyncio.run(env.play(run_of(first)))
    assert (library / "served").read_text() == "+++"


def test_a_process_that_is_killed_fails_what_waits_for_it_with_its_last_words(library: Path) -> None:
    with made() as env:
        _, second, _ = env.tasks()

        async def killed() -> None:
            slow = asyncio.create_task(env.play(run_of(second)))
            await begun(library)
            os.kill(env._process._popen.pid, signal.SIGKILL)
            await slow

        # as a child of it that inherits its input
        reader = os.open(f"/proc/{env._process._popen.pid}/fd/0", os.O_RDONLY)
        with pytest.raises(VerifiersError, match=r"has ended \(status -9\): printed by a taskset"):
            asyncio.run(killed())
        with pytest.raises(VerifiersError, match=r"has ended \(status -9\)"):
            env.tasks()
        os.close(reader)
