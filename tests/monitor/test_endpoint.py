"""The monitor's loopback endpoint: who may ask, what is answered, and that what is documented is what is said."""

import http.client
import json
import math
import os
import re
import signal
import time
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from rlbench.dispatch.link import Link
from rlbench.errors import SessionError, Stopped
from rlbench.monitor import client
from rlbench.monitor.commands import Commands, Refusal, checked
from rlbench.monitor.endpoint import MAX_BODY, Endpoint, Routes
from rlbench.monitor.report import plain, step_report
from rlbench.runtime import registry
from tests.clock import until
from tests.echo_engine import echo, submit

pytestmark = pytest.mark.slow


# -- the endpoint alone


class Recorder:
    """Verbs that only write down what they were asked for."""

    def __init__(self):
        self.done, self.running, self.fails = [], [], None

    def run(self, verb, args):
        if self.fails is not None:
            raise self.fails
        self.done.append((verb, args))
        return {"ran": verb}


@pytest.fixture
def recorder():
    return Recorder()


@pytest.fixture
def commands(recorder):
    return Commands(recorder.run, recorder.run, lambda: recorder.running)


@pytest.fixture
def record(commands):
    """A served endpoint, described as a session's file describes it."""
    telemetry = lambda since: {"samples": [{"time": since}], "marks": []}  # noqa: E731
    routes = Routes(lambda records: {"records": records}, telemetry, commands)
    endpoint = Endpoint(routes, "secret")
    yield {"name": "alone", "url": endpoint.url, "token": "secret"}
    endpoint.close()


def raw(record, method, path, body=None, **headers):
    """A request with headers as given (and the right token unless told otherwise); (status, answer)."""
    target = urlsplit(record["url"])
    connection = http.client.HTTPConnection(target.hostname, target.port, timeout=120)
    sent = {"Authorization": f"Bearer {record['token']}", "Content-Type": "application/json"}
    sent |= {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request(method, path, body, {k: v for k, v in sent.items() if v is not None})
    answer = connection.getresponse()
    value = json.loads(answer.read())
    connection.close()
    assert answer.headers["Content-Type"] == "application/json" and value["schema"] == 1
    assert value["time"] == pytest.approx(time.time(), abs=60)
    return answer.status, value


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Authorization": None}, 401),
        ({"Authorization": "Bearer wrong"}, 401),
        ({"Authorization": "secret"}, 401),
        ({"Authorization": "Bearer s\xe9cret"}, 401),
        ({"Host": "evil.example"}, 403),
        ({"Host": "127.0.0.1"}, 403),
    ],
)
def test_who_does_not_name_this_host_and_know_the_token_is_refused(record, headers, status):
    assert raw(record, "GET", "/state", **headers)[0] == status


def test_localhost_is_this_host_too(record):
    assert raw(record, "GET", "/state", Host=f"localhost:{urlsplit(record['url']).port}")[0] == 200


def test_it_listens_on_loopback_alone(record):
    assert urlsplit(record["url"]).hostname == "127.0.0.1"


@pytest.mark.parametrize(
    ("body", "headers", "status", "says"),
    [
        (b"{}", {"Content_Length": str(MAX_BODY + 1)}, 413, "are allowed"),
        (b"", {"Content_Length": "many"}, 411, "Content-Length"),
        (b"{", {}, 400, "not JSON"),
        (b"[" * 30000, {}, 400, "not JSON"),
        (b"[1]", {}, 400, "must be a JSON object"),
        (b"\x80\x04.", {}, 400, "not JSON"),
        (b"{}", {"Content_Type": "application/octet-stream"}, 415, "application/json is wanted"),
        (b'{"verb": "stpo"}', {}, 400, "nearest: stop"),
        (b'{"verb": 3}', {}, 400, "there are stop, pause"),
        (b'{"verb": "stop", "args": [1]}', {}, 400, "must be an object"),
    ],
)
def test_a_body_that_is_no_command_is_refused_with_the_reason(record, recorder, body, headers, status, says):
    got, value = raw(record, "POST", "/command", body, **headers)
    assert got == status and says in value["error"]
    assert recorder.done == []


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("GET", "/stat", 404),
        ("POST", "/state", 405),
        ("GET", "/command", 405),
        ("DELETE", "/state", 501),
        ("GET", "/command/none", 404),
        ("GET", "/state?history=x", 400),
        ("GET", "/state?history=-1", 400),
        ("GET", "/samples?since=inf", 400),
        ("GET", "/samples?since=nan", 400),
    ],
)
def test_what_is_not_there_is_named(record, method, path, status):
    got, value = raw(record, method, path, b"{}" if method == "POST" else None)
    assert got == status and value["error"]


def test_the_number_of_records_is_capped(record):
    assert client.ask(record, "/state")["records"] == 50
    assert client.ask(record, "/state?history=3")["records"] == 3
    assert client.ask(record, "/state?history=1e9")["records"] == 500
    assert client.ask(record, "/samples?since=12.5")["samples"] == [{"time": 12.5}]
    both = client.ask(record, "/state?history=3&since=12.5")
    assert (both["records"], both["samples"], both["marks"]) == (3, [{"time": 12.5}], [])
    assert "samples" not in client.ask(record, "/state?history=3")


def test_a_step_is_reported_without_the_text_of_its_code():
    record = {"step": 3, "loss_hash": "ab", "loss_source": "x" * 16_000, "reward_source": "y", "source": 1}
    assert step_report(record) == {"step": 3, "loss_hash": "ab", "source": 1}


def test_numbers_that_json_lacks_become_null():
    numpy = pytest.importorskip("numpy")
    value = {"a": math.nan, "b": [math.inf, 1.5], "c": numpy.float32(2.5), 3: (Path("x"), None, True)}
    assert plain(value) == {"a": None, "b": [None, 1.5], "c": 2.5, "3": ["x", None, True]}


# -- commands


def test_a_command_is_answered_at_once_and_looked_up_later(record, recorder):
    status, value = raw(record, "POST", "/command", b'{"verb": "offload", "args": {"engine": "train"}}')
    assert status == 202 and value["command"]["state"] == "running"
    done = client.command(record, "stop")
    assert (done["state"], done["result"], done["error"]) == ("done", {"ran": "stop"}, None)
    until(lambda: ("offload", {"engine": "train"}) in recorder.done)


def test_a_command_that_fails_says_why(record, recorder):
    recorder.fails = SessionError("the weights are released; call onload first")
    with pytest.raises(SessionError, match="call onload first"):
        client.command(record, "sync")
    recorder.fails = None
    assert client.command(record, "sync")["state"] == "done", "one that failed does not stand in the way"


def test_while_something_runs_what_drives_the_session_is_refused_and_names_it(record, recorder):
    recorder.running = ["rollout 3"]
    with pytest.raises(client.Refused, match="rollout 3 runs; stop it first") as refused:
        client.command(record, "sync")
    assert refused.value.status == 409
    for verb in ("stop", "pause", "resume"):
        assert client.command(record, verb)["state"] == "done"
    recorder.running = []
    assert client.command(record, "sync")["state"] == "done"


def test_one_driving_verb_at_a_time(recorder):
    import threading

    go = threading.Event()
    commands = Commands(recorder.run, lambda verb, args: go.wait(120), list)
    first = commands.submit("sync", {})
    with pytest.raises(Refusal, match="offload: sync runs"):
        commands.submit("offload", {"engine": "train"})
    go.set()
    until(lambda: commands.get(first["id"])["state"] == "done")
    assert commands.submit("offload", {"engine": "train"})["state"] == "running"


@pytest.mark.parametrize(
    ("verb", "args", "says"),
    [
        ("offload", {}, "engine is missing"),
        ("offload", {"engin": "train"}, "nearest: engine"),
        ("offload", {"engine": 3}, "must be a str"),
        ("onload", {"engine": "train", "parts": [1]}, "a list of names"),
        ("stop", {"now": True}, "it takes no arguments"),
        ("snapshot", {"disk": "yes"}, "must be a bool"),
    ],
)
def test_arguments_are_checked_before_anything_begins(verb, args, says):
    with pytest.raises(Refusal, match=re.escape(says)):
        checked(verb, args)


def test_only_so_many_commands_are_kept(commands):
    ids = []
    for _ in range(80):
        ids.append(commands.submit("stop", {})["id"])
        until(lambda: commands.get(ids[-1])["state"] == "done")
    with pytest.raises(Refusal, match="no command"):
        commands.get(ids[0])


def test_a_monitor_that_is_gone_is_an_error_of_its_own(record):
    with pytest.raises(client.MonitorGone, match="does not answer"):
        client.ask({"name": "x", "url": "http://127.0.0.1:9", "token": "t"}, "/state")
    with pytest.raises(client.MonitorGone, match="no endpoint"):
        client.ask({"name": "x", "url": "http://elsewhere.invalid:80"}, "/state")
    with pytest.raises(client.Refused, match="token is wanted"):
        client.ask(record | {"token": "old"}, "/state")


# -- a monitor's own


@pytest.fixture(scope="module")
def worker(cluster):
    """A session with one echoing worker: its link, the worker's actor and pid."""
    made = Link.create("endpoint")
    yield made, *echo(made)
    made.close()


@pytest.mark.engine
def test_the_sessions_file_says_where_it_is_and_is_ours_alone(worker):
    link, _, pid = worker
    path = registry.session_file(link.name)
    record = client.find(link.name)
    assert path.stat().st_mode & 0o777 == 0o600
    assert {"url", "token", "pid", "epoch", "name", "cluster", "node"} <= set(record)
    assert registry.monitor_lives(record) and not registry.monitor_lives(record | {"started": 1.0})
    assert record["workers"][f"rlbench/{link.name}/echo/0"][0] == pid
    state = client.ask(record, "/state")
    assert state["name"] == link.name and state["driver"]["pid"] == os.getpid() and state["driver"]["alive"]
    assert record["token"] not in json.dumps(state)


@pytest.mark.engine
def test_a_running_call_is_shown_with_its_progress_and_stopped(worker):
    link, host, _ = worker
    record = client.find(link.name)
    pending = submit(link, host, "slowly", 120.0, what="rollout 8", track=True)
    until(lambda: client.ask(record, "/state")["running"])
    progress = lambda: client.ask(record, "/state")["running"][0]["progress"]  # noqa: E731
    until(lambda: progress() and progress()[0]["done"] > 0)
    shown = client.ask(record, "/state")["running"][0]
    assert (shown["what"], shown["engine"]) == ("rollout 8", "echo")
    assert client.command(record, "stop")["result"] == {"stopped": ["rollout 8"]}
    with pytest.raises(Stopped):
        pending.result(timeout=60)


@pytest.mark.engine
def test_the_last_failure_is_shown(worker):
    link, host, _ = worker
    with pytest.raises(Exception, match="this target fails"):
        submit(link, host, "fail", what="train_step", track=True).result()
    record = client.find(link.name)
    until(lambda: client.ask(record, "/state")["last_error"])
    said = client.ask(record, "/state")["last_error"]
    assert said["kind"] == "ValueError" and "this target fails" in said["message"]


@pytest.mark.engine
def test_a_monitor_that_restarts_serves_anew_under_another_token(worker):
    link, *_ = worker
    before = client.find(link.name)
    os.kill(before["pid"], signal.SIGKILL)
    link.state()
    until(lambda: client.find(link.name)["token"] != before["token"])
    after = client.find(link.name)
    assert client.ask(after, "/state")["name"] == link.name
    assert registry.monitor_lives(after) and not registry.monitor_lives(before)


@pytest.mark.engine
def test_closing_through_the_endpoint_ends_the_session(cluster):
    made = Link.create("endpoint-closed")
    client.ask(client.find("endpoint-closed"), "/command", {"verb": "close"})
    until(lambda: not registry.session_file("endpoint-closed").exists())
    with pytest.raises(SessionError, match="no session 'endpoint-closed'"):
        client.find("endpoint-closed")
    made.release()


@pytest.mark.engine
def test_verbs_that_need_a_session_are_refused_to_bare_engines(worker):
    link, *_ = worker
    with pytest.raises(client.Refused, match="engines alone"):
        client.command(client.find(link.name), "sync")


# -- what is documented


def documented(repository, heading):
    """The JSON example below a heading of docs/monitor-api.md."""
    text = (repository / "docs" / "monitor-api.md").read_text()
    section = text.split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    return json.loads(re.search(r"```json\n(.*?)```", section, re.DOTALL).group(1))


def same_keys(real, example, where):
    """Both have the same keys at every level that both have."""
    if isinstance(real, dict) and isinstance(example, dict) and where not in FREE:
        assert set(real) == set(example), where
        for key in real:
            same_keys(real[key], example[key], f"{where}.{key}")
    if isinstance(real, list) and isinstance(example, list) and real and example:
        same_keys(real[0], example[0], f"{where}[]")


FREE = {
    "state.history[]",
    "state.running[].progress[]",
    "state.engines[].state",
    "state.engines[].bytes",
    "state.engines[].frees",
    "samples.samples[].resident",
    "samples.samples[].shared",
    "samples.samples[].owners",
    "command.command.args",
    "command.command.result",
    "file.workers",
}


@pytest.mark.engine
def test_the_documented_keys_are_the_real_ones(session, repository):
    record = client.find(session.name)
    session.snapshot("documented")
    session.zero_grad()
    try:
        session.rollout(["1 2 3"], max_tokens=4, progress=False)
        until(lambda: client.ask(record, "/state")["lengths"])
        state, wanted = client.ask(record, "/state"), documented(repository, "GET /state")
        same_keys(state, wanted, "state")
        assert state["engines"] and state["lengths"] and wanted["splits"]
        until(lambda: client.ask(record, "/samples")["samples"][-1]["owners"])
        given, wanted = client.ask(record, "/samples"), documented(repository, "GET /samples")
        same_keys(given, wanted, "samples")
        assert given["marks"] and wanted["marks"]
        for owners in given["samples"][-1]["owners"].values():
            kinds = {"weights", "gradients", "optimizer", "activations", "other"}, {"weights", "kv_cache", "other"}
            assert set(owners) in kinds
        stopped = client.ask(record, "/command", {"verb": "stop"})
        same_keys(stopped, documented(repository, "POST /command"), "command")
        later = client.ask(record, f"/command/{stopped['command']['id']}")
        same_keys(later, documented(repository, "GET /command/ID"), "command")
        same_keys(record, documented(repository, "The session's file"), "file")
    finally:
        session.drop("documented")
