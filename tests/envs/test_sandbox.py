"""Programs of the policy, apart: what they reach, how they end, and that nothing of them is left."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import psutil
import pytest

from rlbench.data import Prompt
from rlbench.envs import Turn, container, sandbox
from rlbench.envs.protocol import unpacked
from rlbench.errors import DataError
from tests.clock import until
from tests.envs import python_image

LEFT = "import os, subprocess, sys\nsubprocess.Popen([sys.executable, '-c', 'import time; time.sleep(78.9)'], "
LEFT += "start_new_session=True)\nprint(os.listdir())"
LOUD = "while True: print('x' * 10**6)"


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, dict[str, Any]]]:
    """What each kind is asked for with, where this host has it."""
    known: dict[str, dict[str, Any]] = {"process": {}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CONTAINERS_CONF", str(python_image.configuration(tmp_path_factory.mktemp("podman"))))
        try:
            client = container.client()
        except DataError as refused:
            known["docker"] = {"lacks": str(refused)}
        else:
            known["docker"] = {"image": python_image.make(client)}
        yield known
        if "image" in known["docker"]:
            subprocess.run([client, "rmi", "--force", python_image.NAME], capture_output=True, check=True)


@pytest.fixture(params=["process", pytest.param("docker", marks=pytest.mark.slow)])
def kind(request: pytest.FixtureRequest, options: dict[str, dict[str, Any]]) -> str:
    if lacks := options[request.param].get("lacks"):
        pytest.skip(lacks)
    return str(request.param)


@pytest.fixture
def contained(options: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What a container is asked for with."""
    if lacks := options["docker"].get("lacks"):
        pytest.skip(lacks)
    return options["docker"]


@pytest.fixture
def make(kind: str, options: dict[str, dict[str, Any]]) -> Any:
    def made(**limits: Any) -> Any:
        try:
            return unpacked(cloudpickle.dumps(sandbox(kind, **options[kind], **limits)))()
        except DataError as refused:
            if kind == "docker":  # its client answers
                raise
            pytest.skip(f"this host refuses namespaces: {refused}")

    return made


@pytest.fixture
def env(make: Any) -> Any:
    return make(timeout_s=20, memory_gib=0.5)


def run(env: Any, code: str) -> str:
    text = f"<tool>python({code})</tool>"
    return env.step(Turn(0, text, [1], "stop", False, Prompt("p"), [], [1])).observation


def test_a_program_answers_with_what_it_prints_and_how_it_ended(env: Any) -> None:
    assert run(env, "print(sum(range(5)))") == "10"
    assert "ZeroDivisionError" in run(env, "1/0") and "status 1" in run(env, "1/0")
    assert "status 3" in run(env, "import sys; print('é'); sys.stderr.write('ü'); sys.exit(3)")
    assert run(env, f"# {'x' * 200_000}\nprint('whole')") == "whole"
    assert env.tools[0]["function"]["name"] == "python"


def test_it_has_no_network_no_keys_and_an_empty_folder_and_takes_what_it_started_along(
    env: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    reach = "import socket; print(socket.create_connection(('127.0.0.1', 22), 1))"
    assert "Error" in run(env, reach) and "unreachable" in run(env, reach.replace("127.0.0.1", "192.0.2.1"))
    assert "secret" not in run(env, "import os; print(dict(os.environ))")
    before = set(Path(os.environ.get("TMPDIR", "/tmp")).glob("rlb-sandbox-*"))
    assert run(env, LEFT) == "['main.py']"
    assert set(Path(os.environ.get("TMPDIR", "/tmp")).glob("rlb-sandbox-*")) <= before
    until(lambda: not any("78.9" in "".join(p.info["cmdline"] or ()) for p in psutil.process_iter(["cmdline"])))


def test_what_takes_too_much_is_cut_and_leaves_nothing(
    make: Any, env: Any, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    whole = "MemoryError" if kind == "process" else "killed, as what takes more than 512 MiB"
    assert whole in run(env, "x = bytearray(2**30); print('it has it')")
    assert len(run(env, "print('x' * 10**6)")) < 9000
    assert len(run(env, LOUD)) < 9000
    assert "killed" in run(make(timeout_s=1), "import time; print('begun', flush=True); time.sleep(60)")
    filling = "with open('big', 'wb') as file: file.write(bytes(100 << 20))"
    assert "OSError" in run(env, filling) or "status" in run(env, filling)
    assert not list(tmp_path.iterdir())


def test_a_process_sees_no_other_and_is_the_first(make: Any, kind: str) -> None:
    seen = run(
        make(), "import os; print(os.getpid() < 20, all(int(p) < 20 for p in os.listdir('/proc') if p.isdigit()))"
    )
    assert seen == "True True"


@pytest.mark.slow
def test_a_container_has_no_user_of_the_host_nor_its_files_and_ends_with_the_program(contained: Any) -> None:
    env = sandbox("docker", timeout_s=20, **contained)
    assert run(env, "import os; print(os.getuid())") == "65534"
    assert "Read-only" in run(env, "open('/etc/mine', 'w')")
    assert f"No such file or directory: '{__file__}'" in run(env, f"open({__file__!r})")
    assert run(env, "import os; os.kill(1, 9); os.kill(1, 15); print('first process alive')") == "first process alive"
    assert "temporarily unavailable" in run(env, "import os\nfor _ in range(100): os.fork() or os.read(0, 1)\n")
    client = container.client()
    left = [client, "ps", "--all", "--quiet", "--filter", "name=rlb-sandbox"]
    until(lambda: not subprocess.run(left, capture_output=True, check=True).stdout)


@pytest.mark.slow
def test_an_image_that_there_is_not_and_an_argument_that_nobody_knows_are_refused(contained: Any) -> None:
    with pytest.raises(DataError, match=r"no image 'localhost/no-such:1'"):
        sandbox("docker", image="localhost/no-such:1")
    with pytest.raises(DataError, match="arguments="):
        sandbox("docker", **contained, arguments=("--no-such-option",))


def test_a_host_without_containers_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(container.shutil, "which", lambda name: None)
    with pytest.raises(DataError, match="neither docker nor podman is installed"):
        sandbox("docker")


def test_what_cannot_be_is_refused() -> None:
    for given in ({"kind": "vm"}, {"timeout_s": 0}, {"memory_gib": -1}, {"image": "python"}):
        with pytest.raises(DataError, match="sandbox"):
            sandbox(**given)  # type: ignore[arg-type]
