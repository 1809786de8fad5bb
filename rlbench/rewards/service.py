"""Rewards from a service: completions go out as JSON over HTTP, numbers come back.

Standard library alone. A few threads send; an interrupt closes their sockets, so that none is left waiting.
"""

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
from rlbench.rewards.board import Board, Failure, Outcome
from rlbench.rewards.fields import shown
from rlbench.rewards.kinds import Scorer, as_reward
from rlbench.units import format_bytes
from rlbench.user_code import user_code

if TYPE_CHECKING:
    from rlbench.data.rollouts.rollout import Rollout

LARGEST = 64 << 20
"""Bytes of an answer that are read."""
AGAIN = (408, 425, 429, 500, 502, 503, 504)
"""Statuses after which the same request may succeed."""
LONGEST_WAIT_S = 30.0
FAREWELL_S = 2.0


class _Again(Exception):
    """The request may succeed when sent again, `after` seconds at least."""

    def __init__(self, said: str, after: float = 0.0) -> None:
        super().__init__(said)
        self.after = after


class _Refused(Exception):
    """The request failed for good."""


@dataclass(frozen=True, repr=False)
class remote(Scorer):
    """Rewards from an HTTP service, asked by POST with JSON.

    It is sent `{"prompts": […], "responses": […], "labels": […], "query": […]}`, one entry per completion: the prompt
    as given (text, messages or token ids), the completion's text, the label (null without one), and the prompt's text
    followed by the completion's. It answers `{"rewards": […]}`, each a number, `{"reward": 1.0, "format": 0.0}` with
    components, or `{"error": "why"}` for a completion it cannot score.

    Args:
        url: http or https. Redirects are not followed.
        batch_size: completions per request.
        concurrency: requests at a time.
        timeout_s: seconds for connecting, and for each silence of the service.
        tries: how often a request is sent at most, where the connection fails, the service is silent, or it says that
            it is busy or broken (408, 425, 429, 5xx). After that its completions have an error; others go on.
        backoff_s: pause before the second try; it doubles with each, with chance in it, and obeys `Retry-After`.
        key: where the answer holds the rewards.
        headers: further ones.
        token_env: name of the environment variable whose content is sent as `Authorization: Bearer …`. Read when
            scoring, so that no token stands in a notebook or a pickle.
        payload: makes another body: a function of a list of rollouts -> anything JSON can hold.
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
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise DataError(f"remote: wanted a url as 'http://judge.example:8000/score', got {self.url!r}")
        if parts.username is not None:
            raise DataError(
                "remote: a password in the url is not sent: use headers={'Authorization': …} or token_env=…"
            )
        if min(self.batch_size, self.concurrency, self.tries) < 1 or not self.timeout_s > 0 or self.backoff_s < 0:
            raise DataError("remote: batch_size, concurrency and tries are 1 or more, timeout_s is above 0")

    def score_all(self, rollouts: Sequence[Rollout], board: Board) -> None:
        """Send all of them; see `Scorer.score_all`."""
        count, size = len(rollouts), self.batch_size
        headers = self._headers()
        units = iter([range(first, min(first + size, count)) for first in range(0, count, size)])
        post = _Post(self, headers)
        lock = threading.Lock()
        trouble: list[BaseException] = []

        def work() -> None:
            try:
                while (unit := _next(units, lock)) is not None and not post.stopped.is_set():
                    started = time.perf_counter()
                    found = self._outcomes(post, [rollouts[i] for i in unit])
                    board.put_all(unit, found, time.perf_counter() - started)
            except BaseException as error:  # for the caller, whose thread this is not
                trouble.append(error)

        threads = [
            threading.Thread(target=work, name=f"rlbench-remote-{k}", daemon=True)
            for k in range(min(self.concurrency, -(-count // size)))
        ]
        try:
            for thread in threads:
                thread.start()
            while any(thread.is_alive() for thread in threads):
                board.check()
                for thread in threads:
                    thread.join(0.1)
        except BaseException:
            post.stop()
            deadline = time.monotonic() + FAREWELL_S
            for thread in threads:
                if thread.ident is not None:
                    thread.join(max(0.0, deadline - time.monotonic()))
            raise
        if trouble:
            raise trouble[0]

    def _headers(self) -> dict[str, str]:
        found = {"Content-Type": "application/json", "Accept": "application/json", **self.headers}
        if self.token_env is not None:
            token = os.environ.get(self.token_env)
            if not token:
                raise DataError(f"remote: the environment has no {self.token_env}, which was to hold the token")
            found["Authorization"] = f"Bearer {token}"
        return found

    def _outcomes(self, post: _Post, rollouts: Sequence[Rollout]) -> list[Outcome]:
        """One outcome for each completion of a batch, or the same failure for all of them."""
        try:
            with user_code():
                body = (self.payload or as_payload)(rollouts)
            sent = json.dumps(body, default=_json).encode()
        except Exception as error:  # a user's own payload, or a label that is no JSON
            return [Failure.of(error)] * len(rollouts)
        try:
            answer = post(sent)
        except _Refused as error:
            return [Failure(f"the service {self._place()} {error}")] * len(rollouts)
        values = answer.get(self.key) if isinstance(answer, dict) else None
        if not isinstance(values, list) or len(values) != len(rollouts):
            seen = f"{len(values)} values" if isinstance(values, list) else f"{str(answer)[:60]!r}"
            said = f"the service {self._place()} answered {seen} to {len(rollouts)} completions"
            return [Failure(said, f"wanted {{{self.key!r}: [one per completion]}}")] * len(rollouts)
        return [self._outcome(value) for value in values]

    def _outcome(self, value: Any) -> Outcome:
        if isinstance(value, dict) and value.get("error") is not None:
            return Failure(f"the service {self._place()} says {str(value['error'])[:200]!r}")
        if isinstance(value, dict):  # its components may be other things than numbers
            value = {k: v for k, v in value.items() if k == "reward" or isinstance(v, int | float)}
        return as_reward(value)

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
        "query": [r.source.text + r.text for r in rollouts],
    }


class _Post:
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

    def __call__(self, body: bytes) -> Any:
        """The answer, read as JSON. Raises _Refused where it failed for good."""
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
        raise _Refused(f"{said}, {self.how.tries} tries")

    def _once(self, body: bytes) -> Any:
        with self._connection() as connection:
            parts = urlsplit(self.how.url)
            target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
            connection.request("POST", target, body, dict(self.headers))
            response = connection.getresponse()
            content = response.read(LARGEST + 1)
        if response.status in AGAIN:
            raise _Again(f"answered {response.status} {response.reason}", _seconds(response.headers.get("Retry-After")))
        if response.status != 200:
            said = content[:200].decode(errors="replace")
            raise _Refused(f"answered {response.status} {response.reason}: {said!r}")
        if len(content) > LARGEST:
            raise _Refused(f"answered more than {format_bytes(LARGEST)}")
        try:
            return json.loads(content)
        except ValueError:
            raise _Refused(f"answered no JSON: {content[:60].decode(errors='replace')!r}") from None

    @contextlib.contextmanager
    def _connection(self) -> Iterator[http.client.HTTPConnection]:
        parts = urlsplit(self.how.url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(str(parts.hostname), parts.port, timeout=self.how.timeout_s)
        self._open.add(connection)
        try:
            yield connection
        finally:
            self._open.discard(connection)
            connection.close()


def _next(units: Iterator[range], lock: threading.Lock) -> range | None:
    with lock:
        return next(units, None)


def _seconds(header: str | None) -> float:
    """What `Retry-After` asks for, where it is a number."""
    try:
        return max(0.0, float(header or 0))
    except ValueError:
        return 0.0


def _json(value: Any) -> Any:
    """numpy's numbers and arrays in labels and messages."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a {type(value).__name__} is no JSON: give remote(payload=…), which makes what is sent")
