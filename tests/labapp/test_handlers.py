"""The Jupyter server extension: what a logged-in page gets, what everybody else is refused, and that no token leaks."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from http.cookies import SimpleCookie

import psutil
import pytest
from tornado.httpclient import HTTPClientError

from rlbench.labapp import handlers, monitors
from rlbench.monitor.commands import Commands
from rlbench.monitor.endpoint import Endpoint, Routes
from rlbench.runtime import devices, processes, registry
from tests.clock import LIMIT_S

pytestmark = pytest.mark.slow

pytest_plugins = ["pytest_jupyter.jupyter_server"]
TOKEN = "the-monitors-own-secret"


@pytest.fixture
def jp_server_config():
    return {"ServerApp": {"jpserver_extensions": {"rlbench.labapp": True}}}


@pytest.fixture(autouse=True)
def state_folder(tmp_path, monkeypatch):
    """A state folder without sessions."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def describe(name, **fields):
    """A session's file as its monitor writes it; this process stands for the monitor."""
    record = {
        "name": name,
        "cluster": "c",
        "node": "n",
        "epoch": 3,
        "pid": os.getpid(),
        "boot": processes.boot_id(),
        "started": processes.start_time(os.getpid()),
        "url": "http://127.0.0.1:9",
        "token": TOKEN,
        "shm": "rlb-c-",
        "workers": {},
    }
    registry.write_json(registry.session_file(name), record | fields)


@pytest.fixture
def asked():
    return []


@pytest.fixture
def served(asked):
    """A session `demo` whose monitor answers."""

    def control(verb, args):
        asked.append((verb, args))
        return {"ran": verb}

    routes = Routes(
        lambda n: {"name": "demo", "history": [n]},
        lambda since: {"samples": [{"time": since}], "marks": []},
        Commands(control, control, list),
    )
    endpoint = Endpoint(routes, TOKEN)
    describe("demo", url=endpoint.url)
    yield endpoint
    endpoint.close()


async def status_of(fetching):
    """Status and JSON of a request that may be refused."""
    try:
        response = await fetching
    except HTTPClientError as refused:
        return refused.code, json.loads(refused.response.body)
    return response.code, json.loads(response.body)


async def get(jp_fetch, *path, **options):
    return await status_of(jp_fetch("rlbench", "api", *path, **options))


async def post(jp_fetch, name, body, **options):
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return await status_of(jp_fetch("rlbench", "api", "sessions", name, "command", method="POST", body=raw, **options))


async def test_sessions_are_listed_with_their_liveness_and_no_token(jp_fetch, served):
    describe("lost", pid=2**22 - 1)
    describe("reused", started=1.0)
    describe("before-the-reboot", boot="another")
    status, value = await get(jp_fetch, "sessions")
    assert status == 200 and value["schema"] == 1
    assert {row["name"]: row["state"] for row in value["sessions"]} == {
        "demo": "live",
        "lost": "gone",
        "reused": "gone",
        "before-the-reboot": "gone",
    }
    assert TOKEN not in json.dumps(value) and "token" not in json.dumps(value)


async def test_a_parked_session_is_listed_says_so_and_is_forgotten(jp_fetch, served):
    folder = registry.parked_folder("older")
    folder.mkdir(parents=True)
    registry.write_json(folder / registry.ABOUT, {"step": 3, "bytes": 7})
    _, value = await get(jp_fetch, "sessions")
    (row,) = [row for row in value["sessions"] if row["name"] == "older"]
    assert (row["state"], row["step"], row["bytes"]) == ("parked", 3, 7)
    status, value = await get(jp_fetch, "sessions", "older", "state")
    assert (status, value["state"]) == (404, "parked") and "rb.attach('older')" in value["error"]
    forgotten = jp_fetch("rlbench", "api", "sessions", "older", "kill", method="POST", body="{}")
    assert await status_of(forgotten) == (200, {"schema": 1, "message": "older: forgotten"})
    assert registry.parked("older") is None


async def test_the_list_tells_the_servers_time_and_the_machines_memory(jp_fetch):
    before = time.time()
    _, value = await get(jp_fetch, "sessions")
    assert before <= value["time"] <= time.time()
    assert 0 < value["memory"]["used"] < value["memory"]["total"]
    assert value["memory"]["total"] == psutil.virtual_memory().total


GPU = {"name": "Accelerator X", "used": 3, "total": 10}


@pytest.fixture
def nvml(monkeypatch):
    """`nvml(answer)`: what NVML is from then on; without, this host's."""
    monkeypatch.setattr(handlers, "GPUS", monitors.Gpus())
    return lambda answer: monkeypatch.setattr(devices, "gpu_memory", answer)


async def test_the_list_tells_the_memory_of_the_gpus_also_without_a_session(jp_fetch, nvml):
    assert (await get(jp_fetch, "sessions"))[1]["gpus"] == devices.gpu_memory()
    nvml(lambda: [GPU])
    _, value = await get(jp_fetch, "sessions")
    assert value["gpus"] == [GPU] and "gpus_error" not in value


async def test_a_driver_that_fails_is_told_and_the_sessions_are_listed_all_the_same(jp_fetch, served, nvml):
    def fails():
        raise OSError("driver/library version mismatch")

    nvml(fails)
    status, value = await get(jp_fetch, "sessions")
    assert (status, value["gpus"], value["gpus_error"]) == (
        200,
        [],
        "OSError: driver/library version mismatch",
    )
    assert [row["name"] for row in value["sessions"]] == ["demo"]
    nvml(lambda: [GPU])
    assert (await get(jp_fetch, "sessions"))[1]["gpus"] == [GPU]


async def test_a_driver_that_hangs_is_asked_once_and_holds_nobody_up(jp_fetch, served, nvml, monkeypatch):
    monkeypatch.setattr(monitors, "NVML_LIMIT_S", 0.0)
    goes_on, questions = threading.Event(), []

    def hangs():
        questions.append(1)
        goes_on.wait(120)
        return [GPU]

    nvml(hangs)
    for _ in range(3):
        status, value = await get(jp_fetch, "sessions")
        assert (status, value["gpus_error"]) == (200, "NVML did not answer within 0 s")
    goes_on.set()
    assert await handlers.GPUS._asked == [GPU] and questions == [1]


async def test_a_look_is_the_state(jp_fetch, served):
    status, value = await get(jp_fetch, "sessions", "demo", "look", params={"history": "3", "since": "2.5"})
    assert (status, value["history"], value["samples"]) == (200, [3], [{"time": 2.5}])


async def test_a_look_that_finds_nothing_says_why_without_an_error_for_the_pages_console(jp_fetch, served):
    describe("lost", pid=2**22 - 1)
    describe("closed")
    for name, state in (("nobody", "unknown"), ("lost", "gone"), ("closed", "silent"), ("..", "unknown")):
        status, value = await get(jp_fetch, "sessions", name, "look")
        assert (status, value["state"]) == (200, state) and value["error"] and "engines" not in value
    status, value = await get(jp_fetch, "sessions", "demo", "look", params={"history": "x"})
    assert (status, value["state"]) == (200, "refused") and "history" in value["error"]
    assert TOKEN not in json.dumps(value)


async def test_killing_ends_the_processes_a_session_left_and_its_file(jp_fetch):
    worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    ended = threading.Thread(target=worker.wait)  # a process that nobody waits for stays as a zombie
    ended.start()
    workers = {"rlbench/lost/actor/0": [worker.pid, processes.start_time(worker.pid)]}
    describe("lost", pid=2**22 - 1, workers=workers)
    status, value = await status_of(
        jp_fetch("rlbench", "api", "sessions", "lost", "kill", method="POST", body=b"", request_timeout=60)
    )
    assert (status, "1 processes ended" in value["message"]) == (200, True), value
    ended.join(120)
    assert worker.returncode == -signal.SIGTERM and not registry.session_file("lost").exists()


@pytest.mark.parametrize("name", ["nobody", "..", "-x", "--help"])
async def test_what_is_no_session_cannot_be_killed(jp_fetch, served, name):
    status, value = await status_of(jp_fetch("rlbench", "api", "sessions", name, "kill", method="POST", body=b""))
    assert (status, value["state"], value["sessions"]) == (404, "unknown", ["demo"])


async def test_state_and_samples_are_the_monitors(jp_fetch, served):
    assert (await get(jp_fetch, "sessions", "demo", "state"))[1]["history"] == [50]
    status, value = await get(jp_fetch, "sessions", "demo", "state", params={"history": "3"})
    assert status == 200 and value["history"] == [3] and value["schema"] == 1
    status, value = await get(jp_fetch, "sessions", "demo", "samples", params={"since": "2.5"})
    assert status == 200 and value["samples"] == [{"time": 2.5}]
    assert (await get(jp_fetch, "sessions", "demo", "state", params={"history": "x"}))[0] == 400


async def test_a_command_is_begun_and_followed(jp_fetch, served, asked):
    status, value = await post(jp_fetch, "demo", {"verb": "offload", "args": {"engine": "train"}})
    assert status == 202 and value["command"]["verb"] == "offload"
    deadline = time.monotonic() + LIMIT_S  # not `until`: the server that answers runs on this loop
    while value["command"]["state"] == "running":
        assert time.monotonic() < deadline
        status, value = await get(jp_fetch, "sessions", "demo", "command", value["command"]["id"])
    assert value["command"]["result"] == {"ran": "offload"} and asked == [("offload", {"engine": "train"})]
    status, value = await post(jp_fetch, "demo", {"verb": "offlaod"})
    assert status == 400 and "nearest: offload" in value["error"]
    assert (await get(jp_fetch, "sessions", "demo", "command", "0" * 16))[0] == 404


@pytest.mark.parametrize(
    ("body", "status"),
    [(b"{" * 10, 400), (b"[]", 400), (b"\x80\x04K\x01.", 400), (b'"' + b"x" * (65 << 10) + b'"', 413)],
)
async def test_a_body_that_is_no_command_never_reaches_the_monitor(jp_fetch, served, asked, body, status):
    assert (await post(jp_fetch, "demo", body))[0] == status
    assert asked == []


@pytest.mark.parametrize("path", ["state", "samples"])
@pytest.mark.parametrize("name", ["nobody", "..", "%2e%2e%2fdemo", "demo.json", "-x"])
async def test_an_unknown_session_is_not_found(jp_fetch, served, name, path):
    assert (await get(jp_fetch, "sessions", name, path))[0] == 404


async def test_the_answer_to_an_unknown_session_names_those_there_are(jp_fetch, served):
    status, value = await get(jp_fetch, "sessions", "nobody", "state")
    assert (status, value["state"], value["sessions"]) == (404, "unknown", ["demo"])
    assert (await post(jp_fetch, "nobody", {"verb": "stop"}))[0] == 404


async def test_a_session_whose_monitor_is_gone_says_so(jp_fetch):
    describe("lost", pid=2**22 - 1)
    looked = await get(jp_fetch, "sessions", "lost", "state")
    for status, value in (looked, await post(jp_fetch, "lost", {"verb": "stop"})):
        assert (status, value["state"]) == (503, "gone") and "rlbench kill lost" in value["error"]


async def test_a_monitor_that_lives_but_does_not_answer_says_so(jp_fetch):
    describe("closed")
    status, value = await get(jp_fetch, "sessions", "closed", "state")
    assert (status, value["state"]) == (503, "silent")
    describe("elsewhere", url="http://elsewhere.invalid:80")
    assert (await get(jp_fetch, "sessions", "elsewhere", "state"))[0] == 503


async def test_a_monitor_that_hangs_holds_nobody_else_up(jp_fetch, served, monkeypatch):
    monkeypatch.setattr(monitors, "ANSWER_LIMIT_S", 2.0)
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(1)
        describe("deaf", url=f"http://127.0.0.1:{deaf.getsockname()[1]}")
        hanging = asyncio.ensure_future(get(jp_fetch, "sessions", "deaf", "state"))
        assert (await get(jp_fetch, "sessions", "demo", "state"))[0] == 200
        assert not hanging.done()
        status, value = await hanging
        assert (status, value["state"]) == (503, "silent")


async def test_a_monitor_that_restarted_meanwhile_is_asked_under_its_new_token(jp_fetch, served, monkeypatch):
    describe("demo", url=served.url, token="of before")
    found = []

    def read(name, record=monitors._record):
        found.append(name)
        if len(found) == 2:
            describe("demo", url=served.url)
        return record(name)

    monkeypatch.setattr(monitors, "_record", read)
    assert (await get(jp_fetch, "sessions", "demo", "state"))[0] == 200 and len(found) == 2


async def test_an_answer_that_is_no_json_is_not_passed_on(jp_fetch):
    with socket.socket() as odd:
        odd.bind(("127.0.0.1", 0))
        odd.listen(1)
        describe("odd", url=f"http://127.0.0.1:{odd.getsockname()[1]}")

        def answer():
            connection, _ = odd.accept()
            connection.recv(4096)
            connection.sendall(b"HTTP/1.0 200 OK\r\nContent-Length: 6\r\n\r\n<html>")
            connection.close()

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        status, value = await get(jp_fetch, "sessions", "odd", "state")
        thread.join(120)
    assert (status, value["state"]) == (503, "silent")


# -- who may ask


async def test_without_the_servers_token_nothing_is_said(http_server_client, jp_base_url, served, asked):
    for method, path, body in (
        ("GET", "sessions", None),
        ("GET", "sessions/demo/state", None),
        ("GET", "sessions/demo/samples", None),
        ("GET", "sessions/demo/command/00", None),
        ("GET", "sessions/demo/look", None),
        ("POST", "sessions/demo/kill", b""),
        ("POST", "sessions/demo/command", b'{"verb": "stop"}'),
    ):
        with pytest.raises(HTTPClientError) as refused:
            await http_server_client.fetch(f"{jp_base_url}rlbench/api/{path}", method=method, body=body)
        assert refused.value.code == 403
    assert asked == []


async def logged_in(jp_fetch, jp_serverapp):
    """The cookies of a page that was opened with the token in its address."""
    token = jp_serverapp.identity_provider.token
    answer = await jp_fetch("api", "status", params={"token": token}, headers={"Authorization": ""})
    cookies = SimpleCookie()
    for line in answer.headers.get_list("Set-Cookie"):
        cookies.load(line)
    return {name: morsel.value for name, morsel in cookies.items()}


async def test_a_page_needs_the_xsrf_token_to_command(jp_fetch, jp_serverapp, served, asked):
    cookies = await logged_in(jp_fetch, jp_serverapp)
    cookies["_xsrf"] = "2|00000000|00000000000000000000000000000000|1700000000"
    page = {"Authorization": "", "Cookie": "; ".join(f"{k}={v}" for k, v in cookies.items())}
    assert (await get(jp_fetch, "sessions", "demo", "state", headers=page))[0] == 200
    assert (await post(jp_fetch, "demo", {"verb": "stop"}, headers=page))[0] == 403
    killing = jp_fetch("rlbench", "api", "sessions", "demo", "kill", method="POST", body=b"", headers=page)
    assert (await status_of(killing))[0] == 403
    assert asked == [] and registry.session_file("demo").exists()
    status, _ = await post(jp_fetch, "demo", {"verb": "stop"}, headers=page | {"X-XSRFToken": cookies["_xsrf"]})
    assert status == 202


async def test_a_page_of_another_origin_is_refused(jp_fetch, jp_serverapp, served, asked):
    cookies = await logged_in(jp_fetch, jp_serverapp)
    page = {"Authorization": "", "Cookie": "; ".join(f"{k}={v}" for k, v in cookies.items())}
    page["Origin"] = "http://evil.example"
    assert (await get(jp_fetch, "sessions", "demo", "state", headers=page))[0] == 404
    assert (await post(jp_fetch, "demo", {"verb": "stop"}, headers=page))[0] in (403, 404)
    assert asked == []


# -- how it is installed


def test_it_imports_neither_ray_nor_torch(repository):
    code = "import rlbench.labapp.handlers, sys; print(*({'ray', 'torch', 'numpy', 'vllm'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr


def test_its_configuration_names_a_module_that_is_an_extension(repository):
    import importlib

    config = json.loads((repository / "jupyter-config/jupyter_server_config.d/rlbench.json").read_text())
    (module,) = config["ServerApp"]["jpserver_extensions"]
    assert importlib.import_module(module)._jupyter_server_extension_points() == [{"module": module}]
