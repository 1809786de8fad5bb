"""An MCP server's tools as an environment's: over a command and an address, a session for each sample."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from rlbench.data import Prompt
from rlbench.envs import ToolCall, Turn, mcp
from rlbench.envs.mcp_tools import RemoteTool
from rlbench.envs.protocol import unpacked
from rlbench.errors import DataError

SERVER = [sys.executable, str(Path(__file__).parent / "mcp_server.py")]


@pytest.fixture(scope="module")
def command() -> Any:
    return mcp(SERVER)


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with subprocess.Popen([*SERVER, str(port)], stderr=subprocess.DEVNULL) as process:
        for _ in range(600):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}/mcp"
        process.kill()


def call(env: Any, name: str, **arguments: Any) -> Any:
    text = f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"
    return env.step(Turn(0, text, [1], "stop", False, Prompt("p"), [], [1]))


def test_images_are_shown_where_they_are_asked_for(command: Any) -> None:
    assert said(command, "picture", shade=7) == "a square\n[image]"
    (message,) = said(mcp(SERVER, images=True), "picture", shade=7)
    text, image = message["content"]
    assert text == {"type": "text", "text": "a square"} and image["image"].pil().getpixel((1, 1)) == (7, 0, 0)


def said(env: Any, name: str, **arguments: Any) -> Any:
    made = unpacked(cloudpickle.dumps(env))()
    made.reset(Prompt("p"))
    step = call(made, name, **arguments)
    made.close()
    return step.observation


def test_tools_are_told_of_as_their_schemas_say(command: Any) -> None:
    assert repr(command).endswith("mcp_server.py: add, note, picture, broken)")
    schema = {tool["function"]["name"]: tool["function"] for tool in command.tools}["add"]
    assert schema["description"] == "Add two numbers." and schema["parameters"]["required"] == ["a"]


def test_each_sample_calls_tools_in_a_session_of_its_own_which_ends_with_it(command: Any) -> None:
    import psutil

    make = unpacked(cloudpickle.dumps(command))
    one, other = make(), make()
    try:
        for env in (one, other):
            env.reset(Prompt("p"))
        assert call(one, "add", a=2, b=3).observation == "5"
        assert one.step(Turn(0, "<tool>add(2)</tool>", [1], "stop", False, Prompt("p"), [], [1])).observation == "3"
        assert "missing" in call(one, "add", b=3).observation
        assert "error" in call(one, "add", a="x").observation
        assert call(one, "broken").observation.startswith("error: ")
        assert "no tool 'ad'" in call(one, "ad").observation
        assert [call(one, "note", text=t).observation for t in "ab"] == ["1 notes", "2 notes"]
        assert call(other, "note", text="c").observation == "1 notes"
    finally:
        one.close()
        other.close()
    children = psutil.Process().children()
    assert not any(SERVER[1] in child.cmdline() for child in children if child.status() != psutil.STATUS_ZOMBIE)


@pytest.mark.engine
def test_completions_of_a_rollout_meet_a_server_at_an_address(session: Any, address: str) -> None:
    env = mcp(address, parser=lambda text: [ToolCall("add", {"a": 40, "b": 2})], reward=lambda turn: 1.0)
    rollouts = session.rollout(["ab"], n=3, max_tokens=3, env=env, max_turns=2, progress=False)
    assert not rollouts.env_errors and rollouts.env_rewards.tolist() == [1.0] * 3
    for info in rollouts.infos:
        assert [one["tool_calls"][0]["result"] for one in info["steps"]] == ["42", "42"]


def test_arguments_follow_a_schema_whose_names_are_no_python_names() -> None:
    class Session:
        def called(self, name: str, arguments: Any, images: bool) -> list[str]:
            return [json.dumps(dict(arguments))]

    loose = RemoteTool("f", {"properties": {"from": {}, "arguments": {}}}, Session())  # type: ignore[arg-type]
    assert json.loads(loose(**{"from": 1, "arguments": 2})) == {"from": 1, "arguments": 2}
    plain = RemoteTool("f", {"properties": {"b": {}, "a": {}}, "required": ["a"]}, Session())  # type: ignore[arg-type]
    assert json.loads(plain(1)) == {"a": 1}


@pytest.mark.parametrize(
    ("server", "token"),
    [
        ("python server.py", "as a list"),
        ([], "at least one word"),
        (["/nowhere/at/all"], "cannot be asked"),
        ("http://127.0.0.1:9/mcp", "cannot be asked"),
    ],
)
def test_what_is_no_server_is_refused(server: Any, token: str) -> None:
    with pytest.raises(DataError, match=token):
        mcp(server)
