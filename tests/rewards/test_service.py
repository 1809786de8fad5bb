"""A reward service on loopback: what it is sent, what it may answer, and all the ways it can fail."""

import json
import os
import pickle
import signal
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from rlbench.data import Prompt
from rlbench.errors import DataError, Stopped
from rlbench.rewards import remote
from rlbench.rewards.service import _seconds
from tests.data.values import rollouts
from tests.data.written import written
from tests.rewards.values import answers, nothing_left


class Service:
    """A real HTTP server; `answer(request number, body)` gives (status, content, headers)."""

    def __init__(self, answer):
        self.requests, self.lock, self.release = [], threading.Lock(), threading.Event()
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with service.lock:
                    service.requests.append((self.path, dict(self.headers), body))
                    number = len(service.requests)
                status, content, headers = (*answer(number, body), {})[:3]
                content = content if isinstance(content, bytes) else json.dumps(content).encode()
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *args):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}/score?v=1"
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def close(self):
        self.release.set()
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def serve():
    made = []

    def start(answer):
        made.append(Service(answer))
        return made[-1]

    yield start
    for service in made:
        service.close()


def lengths(number, body):
    return 200, {"rewards": [len(text) for text in body["responses"]]}


def test_prompt_response_and_label_are_sent_and_numbers_come_back_in_order(serve):
    service = serve(lengths)
    chat = Prompt([{"role": "user", "content": "b"}], np.array([1, 2]))
    value = written([Prompt("a", "A"), chat], [["x", "xx"], ["xxx"]])
    with nothing_left():
        scored = value.score(remote(service.url, batch_size=2, concurrency=1))
    assert scored.rewards.tolist() == [1, 2, 3]
    (path, headers, first), (_, _, second) = service.requests
    assert path == "/score?v=1" and headers["Content-Type"] == "application/json" and "Authorization" not in headers
    said = [[{"role": "user", "content": "a"}, {"role": "assistant", "content": x}] for x in ("x", "xx")]
    assert first.pop("messages") == said
    assert first == {"prompts": ["a", "a"], "responses": ["x", "xx"], "labels": ["A", "A"], "query": ["ax", "axx"]}
    assert second["prompts"] == [[{"role": "user", "content": "b"}]] and second["labels"] == [[1, 2]]


def test_an_answer_may_have_components_and_may_fail_for_one_completion(serve):
    second = {"reward": 0.5, "style": 2, "why": "because"}
    rewards = [1, second, {"error": "too <b>rude</b>"}, None, "1", {"reward": 1e999}]
    service = serve(lambda number, body: (200, {"scores": rewards}))
    scored = rollouts().score(remote(service.url, key="scores"), on_error="keep")
    np.testing.assert_array_equal(scored.rewards, [1, 0.5, *[np.nan] * 4])
    np.testing.assert_array_equal(scored.components["style"], [np.nan, 2, *[np.nan] * 4])
    assert list(scored.components) == ["style"] and "says 'too <b>rude</b>'" in scored.reward_errors[0].error


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_busy_or_broken_service_is_asked_again(serve, status):
    service = serve(lambda number, body: (status, b"busy") if number < 3 else lengths(number, body))
    assert answers("x").score(remote(service.url, backoff_s=0.01)).rewards.tolist() == [1]
    assert len(service.requests) == 3


@pytest.mark.parametrize(("header", "seconds"), [("1.5", 1.5), ("\u00b2", 0.0), ("Mon, 01 Jan", 0.0), ("-1", 0.0)])
def test_what_retry_after_asks_for(header, seconds):
    assert _seconds(header) == seconds


@pytest.mark.parametrize("silent", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_connection_that_breaks_and_a_silent_service_are_asked_again(serve, silent):
    def answer(number, body):
        if number == 1 and silent:
            service.release.wait(120)
        if number == 1:
            raise ConnectionAbortedError
        return lengths(number, body)

    service = serve(answer)
    service.server.handle_error = lambda *args: None
    assert answers("x").score(remote(service.url, backoff_s=0, timeout_s=5)).rewards.tolist() == [1]
    assert len(service.requests) == 2


def test_tries_have_an_end_and_only_the_completions_of_that_request_fail(serve):
    service = serve(lambda number, body: (503, b"") if "p1s0" in body["responses"] else lengths(number, body))
    scored = rollouts().score(remote(service.url, batch_size=2, tries=2, backoff_s=0), on_error="keep")
    np.testing.assert_array_equal(np.isnan(scored.rewards), [False, False, True, True, False, False])
    assert "answered 503 Service Unavailable, 2 tries" in scored.reward_errors[0].error and len(service.requests) == 4


def test_what_will_not_mend_itself_is_not_asked_again(serve):
    service = serve(lambda number, body: (401, b"no token, no reward"))
    with pytest.raises(DataError, match="answered 401 Unauthorized: 'no token, no reward' on completion 0"):
        answers("x").score(remote(service.url))
    assert len(service.requests) == 1


def test_a_redirect_is_not_followed(serve):
    other = serve(lengths)
    service = serve(lambda number, body: (307, b"", {"Location": other.url}))
    with pytest.raises(DataError, match="answered 307"):
        answers("x").score(remote(service.url))
    assert not other.requests


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"<html>oops</html>", "answered no JSON: '<html>oops</html>'"),
        ({"rewards": [1, 2]}, "answered 2 values to 1 completions; wanted"),
        ({"reward": [1]}, "wanted {'rewards': [one per completion]}"),
        ([1], "wanted {'rewards'"),
        (b"\xff\xfe", "answered no JSON"),
    ],
)
def test_an_answer_of_another_form_is_refused_naming_the_form(serve, content, said):
    service = serve(lambda number, body: (200, content))
    with pytest.raises(DataError) as error:
        answers("x").score(remote(service.url))
    assert said.partition(";")[0] in str(error.value) and said.rpartition("; ")[2] in str(error.value)


def test_where_nothing_listens_it_says_so():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(DataError, match=r"could not be asked \(ConnectionRefusedError.*2 tries"):
        answers("x").score(remote(f"http://127.0.0.1:{port}/", tries=2, backoff_s=0))


def test_requests_go_out_side_by_side_within_a_limit(serve):
    together = threading.Barrier(3)

    def answer(number, body):
        together.wait(120)
        return lengths(number, body)

    service = serve(answer)
    assert rollouts().score(remote(service.url, batch_size=2, concurrency=3)).rewards.tolist() == [4] * 6


def test_interrupted_while_the_service_is_silent_it_stops_and_keeps_what_came(serve):
    def answer(number, body):
        if number > 2:
            os.kill(os.getpid(), signal.SIGINT)
            service.release.wait(120)
        return lengths(number, body)

    service = serve(answer)
    with nothing_left(), pytest.raises(Stopped, match="2 of 6") as stopped:
        rollouts().score(remote(service.url, batch_size=1, concurrency=1, timeout_s=60))
    assert stopped.value.partial.rewards.tolist() == [4, 4] and len(service.requests) == 3


def test_the_token_is_sent_and_shown_nowhere(serve, monkeypatch):
    service = serve(lengths)
    monkeypatch.setenv("JUDGE_TOKEN", "s3cret")
    reward = remote(service.url, token_env="JUDGE_TOKEN", headers={"X-Team": "h1dden"})
    assert answers("x").score(reward).rewards.tolist() == [1]
    headers = service.requests[0][1]
    assert headers["Authorization"] == "Bearer s3cret" and headers["X-Team"] == "h1dden"
    assert "s3cret" not in repr(reward) + str(pickle.dumps(reward)) and "h1dden" not in repr(reward)
    assert pickle.loads(pickle.dumps(reward)) == reward
    monkeypatch.delenv("JUDGE_TOKEN")
    with pytest.raises(DataError, match="no JUDGE_TOKEN"):
        answers("x").score(reward)


def test_another_payload_may_be_sent_and_one_that_is_no_json_is_refused(serve):
    service = serve(lambda number, body: (200, {"rewards": [body["n"]]}))
    counting = remote(service.url, payload=lambda given: {"n": len(given[0].text)})
    assert answers("xyz").score(counting).rewards[0] == 3
    with pytest.raises(DataError, match=r"raised TypeError: a set is no JSON: give remote\(payload=…\)"):
        answers("x", label={1}).score(remote(service.url))


URL = "http://h.example"


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("localhost:8000", {}),
        ("ftp://h.example/", {}),
        ("http://", {}),
        ("http://me:pw@h.example/", {}),
        (URL, {"tries": 0}),
        (URL, {"timeout_s": 0}),
        (URL, {"batch_size": 0}),
    ],
)
def test_what_can_be_no_service_is_refused_when_it_is_made(url, options):
    with pytest.raises(DataError, match="remote"):
        remote(url, **options)
