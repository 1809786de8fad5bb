"""Programs of the policy, apart: what they reach, how they end, and that nothing of them is left."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import cloudpickle
import psutil
import pytest

from rlbench.data import Prompt
from rlbench.envs import Turn, sandbox
from rlbench.envs.protocol import unpacked
from rlbench.errors import DataError
from tests.clock import until

LEFT = "import os, subprocess; subprocess.Popen(['sleep', '78.9'], start_new_session=True); print(os.listdir())"


@pytest.fixture(scope="module")
def env() -> Any:
    try:
        made = sandbox("process", timeout_s=5, memory_gib=0.5)
    except DataError as refused:
        pytest.skip(f"this host refuses namespaces: {refused}")
    return unpacked(cloudpickle.dumps(made))()


def run(env: Any, code: str) -> str:
    text = f"<tool>python({code})</tool>"
    return env.step(Turn(0, text, [1], "stop", False, Prompt("p"), [], [1])).observation


def test_a_program_answers_with_what_it_prints_and_how_it_ended(env: Any) -> None:
    assert run(env, "print(sum(range(5)))") == "10"
    assert "ZeroDivisionError" in run(env, "1/0") and "status 1" in run(env, "1/0")
    assert env.tools[0]["function"]["name"] == "python"


def test_it_has_no_network_no_keys_and_an_empty_folder_and_takes_what_it_started_along(
    env: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    reach = "import socket; print(socket.create_connection(('127.0.0.1', 22), 1))"
    assert "Error" in run(env, reach) and "unreachable" in run(env, reach.replace("127.0.0.1", "192.0.2.1"))
    assert "secret" not in run(env, "import os; print(dict(os.environ))")
    assert run(env, "import os; print(os.getpid())") == "1"
    before = set(Path(os.environ.get("TMPDIR", "/tmp")).glob("rlb-sandbox-*"))
    assert run(env, LEFT) == "['main.py']"
    assert set(Path(os.environ.get("TMPDIR", "/tmp")).glob("rlb-sandbox-*")) <= before
    until(lambda: not any(p.info["cmdline"] == ["sleep", "78.9"] for p in psutil.process_iter(["cmdline"])))


def test_what_takes_too_much_is_cut(env: Any) -> None:
    assert "MemoryError" in run(env, "x = bytearray(2**30)")
    assert len(run(env, "print('x' * 10**6)")) < 9000
    quick = sandbox("process", timeout_s=1)
    assert "killed" in run(quick, "import time; print('begun', flush=True); time.sleep(60)")


def test_what_cannot_be_is_refused() -> None:
    for options in ({"kind": "docker"}, {"timeout_s": 0}, {"memory_gib": -1}):
        with pytest.raises(DataError, match="sandbox"):
            sandbox(**options)  # type: ignore[arg-type]
