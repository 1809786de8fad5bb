"""OpenEnv's environments: their reset and step, in this process and on a real server of that library."""

import threading
from dataclasses import dataclass, field
from typing import Any

import pytest

from rlbench.data import Prompt
from rlbench.envs import Turn, from_openenv
from rlbench.envs.protocol import resolved
from rlbench.errors import DataError
from tests.clock import until


@dataclass
class Seen:
    """An observation with OpenEnv's own fields."""

    text: str
    reward: float | None = None
    done: bool = False
    metadata: dict[str, Any] = field(default_factory=dict)


class Counting:
    """OpenEnv's protocol: counts down from what `reset` is told."""

    closed = 0

    def reset(self, start=2):
        self.left = start
        return Seen(f"{start} left")

    def step(self, action):
        self.left -= action["take"]
        return Seen(f"{self.left} left", 0.5 if self.left else 1.0, self.left == 0)

    def close(self):
        Counting.closed += 1


def turn(text, number=0):
    return Turn(number, text, [1], "stop", False, Prompt("p", label=3), [], [1])


def run(value):
    """As a replica does: what can be awaited runs on an event loop, the rest is there already."""
    return resolved(value)


def test_reset_step_and_close_of_an_environment_in_this_process():
    def take(turn):
        return {"take": int(turn.text)}

    env = from_openenv(Counting, action=take, reset=lambda prompt: {"start": prompt.label})
    assert run(env.reset(Prompt("p", label=3))) == "3 left"
    first, last = run(env.step(turn("1"))), run(env.step(turn("2")))
    assert (first.observation, first.reward, first.done) == ("2 left", 0.5, False)
    assert (last.reward, last.done) == (1.0, True)
    run(env.close())
    assert Counting.closed == 1 and run(from_openenv(Counting, action=str).close()) is None


def test_an_observation_of_several_fields_is_read_as_json():
    class Wide(Counting):
        def reset(self):
            seen = Seen("é")
            seen.board = [1, 2]
            return seen

    assert run(from_openenv(Wide, action=str).reset(Prompt("p"))) == '{"text": "é", "board": [1, 2]}'
    only = from_openenv(Wide, action=str, observe=lambda seen: seen.text)
    assert run(only.reset(Prompt("p"))) == "é"


def test_what_is_no_environment_is_refused():
    with pytest.raises(DataError, match="neither an address nor"):
        from_openenv(Counting(), action=str)


@pytest.fixture
def server():
    """A server of the library with one environment that echoes, on a free port of this machine."""
    pytest.importorskip("openenv", reason="needs openenv: pip install openenv")
    import socket

    import uvicorn
    from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

    class Say(Action):
        message: str

    class Heard(Observation):
        echo: str

    class Echoing(Environment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def __init__(self):
            super().__init__()
            self.count = 0

        def reset(self, seed=None, episode_id=None, **kwargs):
            self.count = 0
            return Heard(echo="hello")

        def step(self, action, timeout_s=None, **kwargs):
            self.count += 1
            return Heard(echo=f"{self.count}:{action.message}", reward=float(self.count), done=self.count == 2)

        @property
        def state(self):
            return State(step_count=self.count)

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    app = create_fastapi_app(Echoing, Say, Heard, max_concurrent_envs=4)
    made = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=port, log_level="error"))
    thread = threading.Thread(target=made.run, daemon=True)
    thread.start()
    until(lambda: made.started)
    yield f"http://127.0.0.1:{port}", Echoing, Say
    made.should_exit = True
    thread.join(120)


def test_sessions_on_a_real_server_are_apart(server):
    async def both():
        one, two = (from_openenv(server[0], action=lambda turn: {"message": turn.text}) for _ in range(2))
        assert await one.reset(Prompt("p")) == "hello" and await two.reset(Prompt("p")) == "hello"
        first = await one.step(turn("a"))
        second = await one.step(turn("b"))
        other = await two.step(turn("c"))
        await one.close()
        await two.close()
        return first, second, other

    first, second, other = run(both())
    assert (first.observation, first.reward, first.done) == ("1:a", 1.0, False)
    assert (second.observation, second.reward, second.done) == ("2:b", 2.0, True)
    assert (other.observation, other.done) == ("1:c", False)


def test_an_environment_of_the_library_in_this_process(server):
    _, echoing, say = server
    env = from_openenv(echoing, action=lambda turn: say(message=turn.text))
    assert run(env.reset(Prompt("p"))) == "hello"
    step = run(env.step(turn("x")))
    assert (step.observation, step.reward, step.done) == ("1:x", 1.0, False)
