"""Rewards from a service: completions go out as JSON over HTTP, numbers come back; standard library alone."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from rlbench.errors import DataError
from rlbench.rewards.kinds import Board, Failure, Outcome, Scorer, as_reward, shown
from rlbench.rewards.running import cut, run_threads
from rlbench.units import format_bytes
from rlbench.user_code import user_code

if TYPE_CHECKING:
    from rlbench.data.rollouts.rollout import Rollout

LARGEST = 64 << 20
"""Bytes of an answer that are read."""
AGAIN = (408, 425, 429, 500, 502, 503, 504)
"""Statuses after which the same request may succeed."""
LONGEST_WAIT_S = 30.0


class _Again(Exception):
    """The request may succeed when sent again, `after` seconds at least."""

    def __init__(self, said: str, after: float = 0.0) -> None:
        super().__init__(said)
        self.after = after


class Refused(Exception):
    """The request failed for good; the message goes on from the service's name."""


@dataclass(frozen=True, repr=False)
class remote(Scorer):
    """Rewards from an HTTP service, asked by POST with JSON.

    It is sent `{"prompts": […], "responses": […], "labels": […], "query": […], "messages": […]}`, one entry per
    completion: the prompt as given, what the policy said in all turns, the label (null without one), prompt and whole
    transcript in a row, and the conversation as messages, what an environment said in its place. It answers
    `{"rewards": […]}`, each a number, `{"reward": 1.0, "format": 0.0}` with components, or `{"error": "why"}`.
    Redirects are not followed.

    Args: batch_size: completions per request; `concurrency` requests at a time. timeout_s: seconds for connecting,
    and for each silence of the service. tries: how often a request is sent at most, where the connection fails or the
    service is silent, busy or broken (408, 425, 429, 5xx), with a pause that begins at `backoff_s`, doubles and obeys
    `Retry-After`. key: where the answer holds the rewards. token_env: the environment variable whose content is sent
    as `Authorization: Bearer …`, read when scoring. payload: makes another body: a function of a list of rollouts ->
    anything JSON can hold.
    """

    url: str
    _: KW_ONLY
    batch_size: int = 16
    concurrency: int = 4
    timeout_s: float = 60.0
    tries: int = 4
    backoff_s: float = 0.5
    key: str = "rewards"
    headers: Mapping[str, str] = field(default_factory=dict)
    token_env: str | None = None
    payload: Callable[[Sequence[Rollout]], Any] | None = None

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.username is not None:
            raise DataError("remote: a password in a url would be shown with it: give headers= or token_env=")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise DataError(f"remote: wanted a url as 'http://judge.example:8000/score', got {self.url!r}")
        if min(self.batch_size, self.concurrency, self.tries) < 1 or not self.timeout_s > 0 or self.backoff_s < 0:
            raise DataError("remote: batch_size, concurrency and tries are 1 or more, timeout_s is above 0")

    def score_all(self, rollouts: Sequence[Rollout], board: Board) -> None:
        """Send all of them; see `Scorer.score_all`."""
        units = cut(len(rollouts), self.batch_size)
        post = Post(self, self.request_headers())
        waiting, lock = iter(units), threading.Lock()

        def work() -> None:
            while not post.stopped.is_set():
                with lock:
                    unit = next(waiting, None)
                if unit is None:
                    return
                started = time.perf_counter()
                found = self._outcomes(post, [rollouts[i] for i in unit])
                board.put_all(unit, found, time.perf_counter() - started)

        run_threads(work, min(self.concurrency, len(units)), "remote", board, post.stop)

    def request_headers(self) -> dict[str, str]:
        """What is sent with each request, the token too. Raises DataError where the environment has none."""
        found = {"Content-Type": "application/json", "Accept": "application/json", **self.headers}
        if self.token_env is not None:
            token = os.environ.get(self.token_env)
            if not token:
                raise DataError(f"remote: the environment has no {self.token_env}, which was to hold the token")
            found["Authorization"] = f"Bearer {token}"
        return found

    def _outcomes(self, post: Post, rollouts: Sequence[Rollout]) -> list[Outcome]:
        """One outcome for each completion of a batch, or the same failure for all of them."""
        try:
            with user_code():
                body = (self.payload or as_payload)(rollouts)
            sent = json.dumps(body, default=_json).encode()
        except Exception as error:  # a user's own payload, or a label that is no JSON
            return [Failure.of(error)] * len(rollouts)
        try:
            answer = post(sent)
        except Refused as error:
            return [Failure(f"the service {self._place()} {error}")] * len(rollouts)
        values = answer.get(self.key) if isinstance(answer, dict) else None
        if not isinstance(values, list) or len(values) != len(rollouts):
            seen = f"{len(values)} values" if isinstance(values, list) else f"{str(answer)[:60]!r}"
            said = f"the service {self._place()} answered {seen} to {len(rollouts)} completions"
            return [Failure(said, f"wanted {{{self.key!r}: [one per completion]}}")] * len(rollouts)
        return [self._outcome(value) for value in values]

    def _outcome(self, value: Any) -> Outcome:
        if not isinstance(value, dict):
            return as_reward(value)
        if value.get("error") is not None:
            return Failure(f"the service {self._place()} says {str(value['error'])[:200]!r}")
        # its components may be other things than numbers
        return as_reward({k: v for k, v in value.items() if k == "reward" or isinstance(v, int | float)})

    def _place(self) -> str:
        return urlsplit(self.url).netloc.rpartition("@")[2]

    def __repr__(self) -> str:
        parts = urlsplit(self.url)  # neither a password nor a key in the query belongs into a cell's output
        hidden = ("url", "headers", "payload")
        changed = {k: v for k, v in vars(self).items() if k not in hidden and v != getattr(type(self), k)}
        return shown("remote", f"{parts.scheme}://{self._place()}{parts.path}", **changed)


def as_payload(rollouts: Sequence[Rollout]) -> dict[str, list[Any]]:
    """What is sent unless another `payload` is given."""
    return {
        "prompts": [r.prompt for r in rollouts],
        "responses": [r.text for r in rollouts],
        "labels": [r.label for r in rollouts],
        "query": [r.source.text + r.transcript for r in rollouts],
        "messages": [r.messages for r in rollouts],
    }


class Post:
    """Sends requests, again where that may help; `stop` ends all that are under way, from another thread."""

    def __init__(self, how: remote, headers: Mapping[str, str]) -> None:
        self.how, self.headers = how, headers
        self.stopped = threading.Event()
        self._open: set[http.client.HTTPConnection] = set()

    def stop(self) -> None:
        """Close all connections."""
        self.stopped.set()
        for connection in list(self._open):
            if connection.sock is not None:
                with contextlib.suppress(OSError):
                    connection.sock.shutdown(socket.SHUT_RDWR)

    def __call__(self, body: bytes | None) -> Any:
        """The answer to a POST of `body`, or to a GET, read as JSON. Raises Refused where it failed for good."""
        for number in range(1, self.how.tries + 1):
            try:
                return self._once(body)
            except (OSError, http.client.HTTPException) as error:
                said, after = f"could not be asked ({type(error).__name__}: {error})", 0.0
            except _Again as error:
                said, after = str(error), error.after
            if self.stopped.is_set():
                break
            if number < self.how.tries:
                pause = self.how.backoff_s * 2 ** (number - 1) * random.uniform(0.75, 1.25)
                self.stopped.wait(min(max(pause, after), LONGEST_WAIT_S))
        raise Refused(f"{said}, {self.how.tries} tries")

    def _once(self, body: bytes | None) -> Any:
        parts = urlsplit(self.how.url)
        with self._connection(parts.scheme, str(parts.hostname), parts.port) as connection:
            target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
            connection.request("GET" if body is None else "POST", target, body, dict(self.headers))
            response = connection.getresponse()
            content = response.read(LARGEST + 1)
        if response.status in AGAIN:
            after = response.headers.get("Retry-After", "")
            raise _Again(f"answered {response.status} {response.reason}", _seconds(after))
        if response.status != 200:
            said = content[:200].decode(errors="replace")
            raise Refused(f"answered {response.status} {response.reason}: {said!r}")
        if len(content) > LARGEST:
            raise Refused(f"answered more than {format_bytes(LARGEST)}")
        try:
            return json.loads(content)
        except ValueError:
            raise Refused(f"answered no JSON: {content[:60].decode(errors='replace')!r}") from None

    @contextlib.contextmanager
    def _connection(self, scheme: str, host: str, port: int | None) -> Iterator[http.client.HTTPConnection]:
        kind = http.client.HTTPSConnection if scheme == "https" else http.client.HTTPConnection
        connection = kind(host, port, timeout=self.how.timeout_s)
        self._open.add(connection)
        try:
            yield connection
        finally:
            self._open.discard(connection)
            connection.close()


def _json(value: Any) -> Any:
    """numpy's numbers and arrays in labels and messages."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a {type(value).__name__} is no JSON: give remote(payload=…), which makes what is sent")


def _seconds(header: str) -> float:
    """Return what a Retry-After header asks for; 0 where it is no plain number of seconds."""
    try:
        return max(0.0, float(header)) if header.isascii() else 0.0
    except ValueError:
        return 0.0
