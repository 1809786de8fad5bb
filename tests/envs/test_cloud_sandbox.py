"""Programs of the policy in sandboxes of E2B: its own package, unmodified, against a service on this machine."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import cloudpickle
import pytest

from rlbench.data import Prompt
from rlbench.envs import ToolCall, ToolUnavailable, Turn, cloud_sandbox, sandbox, tools
from rlbench.envs.episode import error_facts
from rlbench.envs.protocol import unpacked
from rlbench.errors import DataError
from tests.clock import interrupt_once, main_thread_runs, until
from tests.envs import e2b_server

DETACHED = "import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\nprint(7)"
OWN = ("E2B_API_KEY", "E2B_API_URL", "E2B_SANDBOX_URL", "E2B_DOMAIN", "E2B_DEBUG")
KEYLESS = not any(name in os.environ for name in OWN)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[e2b_server.Service, str]]:
    with e2b_server.served(tmp_path_factory.mktemp("e2b")) as both:
        yield both


@pytest.fixture
def service(server: tuple[e2b_server.Service, str], monkeypatch: pytest.MonkeyPatch) -> e2b_server.Service:
    """The service, where E2B's package looks for E2B."""
    service, address = server
    for name in OWN:
        monkeypatch.delenv(name, raising=False)
    for name, value in {"E2B_API_KEY": e2b_server.KEY, "E2B_API_URL": address, "E2B_SANDBOX_URL": address}.items():
        monkeypatch.setenv(name, value)
    service.made.clear()
    service.killed.clear()
    service.refusals.clear()
    service.silent = service.lost = False
    return service


@pytest.fixture
def env(service: e2b_server.Service) -> Any:
    return sandbox("e2b", timeout_s=30)


def run(env: Any, code: str) -> str:
    return unpacked(cloudpickle.dumps(env))().step(turn(code)).observation


def turn(code: str) -> Turn:
    return Turn(0, f"<tool>python({code})</tool>", [1], "stop", False, Prompt("p"), [], [1])


def test_a_program_answers_with_what_it_prints_and_how_it_ended(env: Any) -> None:
    assert run(env, "print(sum(range(5)))") == "10"
    assert "ZeroDivisionError" in run(env, "1/0") and "status 1" in run(env, "1/0")
    said = run(env, "import sys; print('é'); sys.stderr.write('ü'); sys.exit(3)")
    assert "é" in said and "ü" in said and "status 3" in said
    assert run(env, f"# {'x' * 200_000}\nprint('whole')") == "whole"
    assert run(env, "print('\\ud800'.encode('utf-8', 'replace'))\n# \ud800") == "b'?'"
    assert run(env, "import os; print(os.listdir())") == "['main.py']"
    assert run(env, "print(input())").count("EOFError") == 1


@pytest.mark.slow
def test_a_program_that_takes_too_much_is_ended_and_told_so(env: Any) -> None:
    late = "(it was not over within 2 s and was killed)"
    assert run(sandbox("e2b", timeout_s=2), "import time; time.sleep(60)") == late
    assert len(run(env, "print('x' * 10**6)")) == len(run(env, "print('é' * 10**6)")) == 7999
    loud = run(env, "while True: print('x' * 10**6)")
    assert len(loud) == 8000 and "status" in loud
    assert "killed, as what takes more memory" in run(env, "import os; os.kill(os.getpid(), 9)")
    assert "killed, as what takes more memory" in run(env, "import os; os.kill(os.getppid(), 9)")
    flooding = "import os\nwith open(f'/proc/{os.getppid()}/fd/1', 'w') as file:\n    while True: file.write('x' * 999)"
    assert "was killed" in run(env, flooding)


def test_what_a_program_leaves_behind_is_not_waited_for(env: Any) -> None:
    assert run(env, DETACHED) == "7"


def test_each_program_has_a_sandbox_of_its_own_that_is_killed_however_it_ends(
    env: Any, service: e2b_server.Service
) -> None:
    for code in ("open('left', 'w')", "import os; print(os.path.exists('left'))", "1/0"):
        run(env, code)
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(lambda n: run(env, f"print({n})"), range(8))) == [str(n) for n in range(8)]
    names = [box.id for box in service.made]
    assert len(set(names)) == 12  # one for the check
    assert sorted(service.killed) == sorted(names) and not service.boxes
    assert not any(box.folder.exists() for box in service.made)
    assert len({box.idempotency_key for box in service.made}) == 12


def test_options_arrive_as_e2b_names_them(env: Any, service: e2b_server.Service) -> None:
    sandbox("e2b", timeout_s=7, template="mine", network=True)
    plain, given = (box.request for box in service.made)
    assert plain["templateID"] == "base" and plain["allow_internet_access"] is False
    assert given["templateID"] == "mine" and given["allow_internet_access"] is True
    assert 7 < given["timeout"] < plain["timeout"] < 300  # E2B ends it then, whatever becomes of the process
    assert plain["envVars"] == plain["metadata"] == {}


def test_an_interrupt_kills_the_sandbox(env: Any, service: e2b_server.Service) -> None:
    service.silent = True
    interrupt_once(lambda: service.made[1:] and service.made[1].started.is_set() and main_thread_runs("_beside"))
    with pytest.raises(KeyboardInterrupt):
        env.functions["python"]("print(1)")
    assert service.killed[1:] == [service.made[1].id]
    until(lambda: not any(thread.name == "cloud sandbox" for thread in threading.enumerate()))


def test_a_command_that_is_not_heard_of_again_is_killed(service: e2b_server.Service) -> None:
    service.silent = True
    short = cloud_sandbox.CloudSandbox(None, 1.0 - cloud_sandbox.START_S, network=False)  # one second for the command
    assert "was killed" in run(tools({"python": short}), "print(1)")
    assert service.killed == [service.made[0].id]


def test_what_e2b_fails_at_ends_the_sample_and_is_not_told_to_the_policy(env: Any, service: e2b_server.Service) -> None:
    service.lost = True
    with pytest.raises(ToolUnavailable, match="SandboxNotRunning"):
        run(env, "print(1)")
    service.lost = False
    service.refusals.append((500, "no node", {}))
    with pytest.raises(ToolUnavailable, match="no node; E2B itself failed"):
        run(env, "print(1)")
    assert run(env, "print(1)") == "1"


def test_a_tool_of_ones_own_may_end_the_sample_too() -> None:
    def python(code: str) -> str:
        raise ToolUnavailable("the service is away")

    with pytest.raises(ToolUnavailable, match="away"):
        tools({"python": python}).step(turn("1"))


def test_what_e2b_refuses_for_now_is_asked_again(env: Any, service: e2b_server.Service) -> None:
    service.refusals += [(429, "too many sandboxes", {}), (503, "no room", {})]
    assert run(env, "print(1)") == "1"
    assert not service.refusals


@pytest.mark.parametrize(
    ("status", "token"),
    [(429, "fewer programs at a time"), (503, "fewer programs at a time"), (403, "template=None and timeout_s=10")],
)
def test_a_refusal_says_what_was_seen_and_what_to_do(service: e2b_server.Service, status: int, token: str) -> None:
    service.refusals.append((status, "says why", {"Should-Retry": "false"}))
    with pytest.raises(DataError, match=f"{status}.*says why.*{token}"):
        sandbox("e2b")


def test_a_key_that_is_missing_or_wrong_and_a_service_that_is_away_say_so(
    service: e2b_server.Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("E2B_API_KEY", "e2b_notmine")
    with pytest.raises(DataError, match=r"401.*set E2B_API_KEY"):
        sandbox("e2b")
    monkeypatch.delenv("E2B_API_KEY")
    with pytest.raises(DataError, match=r"key is required.*set E2B_API_KEY.*rlbench stop"):
        sandbox("e2b")
    monkeypatch.setenv("E2B_API_KEY", e2b_server.KEY)
    monkeypatch.setenv("E2B_API_URL", "http://127.0.0.1:9")
    with pytest.raises(DataError, match=r"refused.*whether http://127.0.0.1:9 is reached"):
        sandbox("e2b")


def test_a_template_that_is_not_there_or_runs_nothing_is_refused(
    service: e2b_server.Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DataError, match="'other' not found; template='other' and"):
        sandbox("e2b", template="other")
    monkeypatch.setattr(cloud_sandbox, "FIRST_PROCESS", "import sys; sys.exit('no Python here')")
    with pytest.raises(DataError, match=r"(?s)no Python here.*has to have python3"):
        sandbox("e2b")


@pytest.mark.parametrize("key", [e2b_server.KEY, "e2b_notmine", "e2b_notmine\n"])
def test_no_key_is_in_what_is_shown_sent_or_kept(
    env: Any, service: e2b_server.Service, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    monkeypatch.setenv("E2B_API_KEY", key)
    service.refusals.append((400, f"what {key} wants", {}))
    assert repr(env) == "sandbox(CloudSandbox(template=None, timeout_s=30, network=False))"
    assert key.strip().encode() not in cloudpickle.dumps(env)
    with pytest.raises(ToolUnavailable) as refused:
        run(env, "print(1)")
    facts = repr(error_facts(refused.value, "step"))
    assert key.strip() not in facts and "E2B_API_KEY" in facts
    monkeypatch.setenv("E2B_API_KEY", e2b_server.KEY)
    service.refusals.clear()
    assert e2b_server.KEY not in run(env, "import os; print(dict(os.environ))")


def test_a_missing_package_names_what_to_install(service: e2b_server.Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "e2b", None)
    with pytest.raises(DataError, match=r"needs e2b: pip install e2b, or pip install 'rlbench\[e2b\]'"):
        sandbox("e2b")


@pytest.mark.parametrize("option", [{"memory_gib": 1.0}, {"image": "python"}, {"arguments": ("--init",)}])
def test_options_of_other_kinds_are_refused(option: dict[str, Any]) -> None:
    with pytest.raises(DataError, match=f"{next(iter(option))} would have no effect; it takes template"):
        sandbox("e2b", **option)
    with pytest.raises(DataError, match="template would have no effect"):
        sandbox("docker", template="base")


@pytest.mark.engine
@pytest.mark.skipif(not KEYLESS, reason="E2B is set up here, and the replicas' processes would call it")
def test_a_replica_without_the_key_ends_its_samples_and_says_where_to_set_it(
    session: Any, service: e2b_server.Service
) -> None:
    env = sandbox("e2b", parser=lambda text: [ToolCall("python", {"code": "print(1)"})])
    with pytest.raises(DataError, match=r"failed for all 2 completions.*set E2B_API_KEY"):
        session.rollout(["ab"], n=2, max_tokens=3, env=env, max_turns=2, progress=False)
