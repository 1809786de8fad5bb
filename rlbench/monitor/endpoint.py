"""The monitor's loopback endpoint: JSON over HTTP, for the Jupyter server extension and the command line.

Bound to 127.0.0.1. Who asks must name this host and know the session's token (`sessions/NAME.json`, 0600). Bodies are
bounded; nothing is unpickled. docs/monitor-api.md is the schema.
"""

from __future__ import annotations

import hmac
import json
import sys
import threading
import time
import traceback
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from rlbench.monitor.commands import Commands, Refusal
from rlbench.monitor.report import HISTORY_DEFAULT, HISTORY_MAX, plain

SCHEMA = 1
MAX_BODY = 64 << 10
READ_LIMIT_S = 10.0
CONNECTIONS = 32
LOOK_S = 0.1  # between two looks at whether it is to end: as long as `close` may take; http.server has half a second
Answer = tuple[int, dict[str, Any]]


class Routes:
    """What each path answers: the report with the last N records, samples newer than a time, the control verbs."""

    def __init__(
        self, state: Callable[[int], dict[str, Any]], telemetry: Callable[[float], dict[str, Any]], commands: Commands
    ) -> None:
        self._state, self._telemetry, self._commands = state, telemetry, commands

    def answer(self, method: str, path: str, query: dict[str, str], body: dict[str, Any]) -> Answer:
        """Status and value. Raises Refusal."""
        where, *rest = path.strip("/").split("/")
        if where not in ("state", "samples", "command") or len(rest) > (where == "command"):
            raise Refusal(404, f"no {path!r} here; there are /state, /samples, /command and /command/ID")
        wanted = "POST" if where == "command" and not rest else "GET"
        if method != wanted:
            raise Refusal(405, f"this path wants {wanted}, got {method}")
        if where == "command":
            if rest:
                return 200, {"command": self._commands.get(rest[0])}
            return 202, {"command": self._commands.submit(body.get("verb"), body.get("args") or {})}
        state = self._state(int(_number(query, "history", HISTORY_DEFAULT, HISTORY_MAX))) if where == "state" else {}
        if where == "state" and "since" not in query:
            return 200, state
        return 200, state | self._telemetry(_number(query, "since", 0.0, None))


class Endpoint(ThreadingHTTPServer):
    """Serves `routes` on a free port of 127.0.0.1, from threads of its own, to who knows `token`."""

    daemon_threads = True

    def __init__(self, routes: Routes, token: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.routes = routes
        self.wanted = f"Bearer {token}".encode()
        self.hosts = {f"{host}:{self.server_port}" for host in ("127.0.0.1", "localhost")}
        self.free = threading.BoundedSemaphore(CONNECTIONS)
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, args=(LOOK_S,), name="rlbench endpoint", daemon=True).start()

    def close(self) -> None:
        """Serve nobody any more."""
        self.shutdown()
        self.server_close()

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """At most so many at a time; more wait for their turn."""
        with self.free:
            super().process_request_thread(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: Endpoint
    timeout = READ_LIMIT_S
    server_version, sys_version = "rlbench", ""

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What the library refuses by itself (a method, a malformed request), as JSON too."""
        self.close_connection = True
        self._send(code, {"error": message or HTTPStatus(code).phrase})

    def log_message(self, format: str, *args: Any) -> None:
        """One line per question would fill the worker's log."""

    def do_GET(self) -> None:
        """Answer a question, or take a command."""
        try:
            self._check_sender()
            body = self._body() if self.command == "POST" else {}
            target = urlsplit(self.path)
            status, value = self.server.routes.answer(self.command, target.path, dict(parse_qsl(target.query)), body)
        except Refusal as refusal:
            status, value = refusal.status, {"error": str(refusal), **refusal.more}
        except TimeoutError:
            status, value = 408, {"error": f"the request did not arrive within {READ_LIMIT_S:g} s"}
        except Exception as error:
            traceback.print_exc(file=sys.stderr)  # the monitor's log
            status, value = 500, {"error": f"{type(error).__name__}: {error}"}
        self._send(status, value)

    do_POST = do_GET

    def _check_sender(self) -> None:
        """A page of another origin that reached us by a name of its own is refused before it can guess a token."""
        if self.headers.get("Host") not in self.server.hosts:
            raise Refusal(403, f"this endpoint is not {self.headers.get('Host')!r}")
        given = self.headers.get("Authorization", "").encode("utf-8", "replace")
        if not hmac.compare_digest(given, self.server.wanted):
            raise Refusal(401, "the session's token is wanted: Authorization: Bearer …")

    def _body(self) -> dict[str, Any]:
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdigit()):
            raise Refusal(411, "a body with its Content-Length is wanted")
        if int(length) > MAX_BODY:
            raise Refusal(413, f"the body has {length} bytes, {MAX_BODY} are allowed")
        if self.headers.get_content_type() != "application/json":
            raise Refusal(415, f"application/json is wanted, got {self.headers.get_content_type()}")
        try:
            value = json.loads(self.rfile.read(int(length)))
        except (ValueError, RecursionError) as error:
            raise Refusal(400, f"the body is not JSON: {error}") from error
        if not isinstance(value, dict):
            raise Refusal(400, f"the body must be a JSON object, got {type(value).__name__}")
        return value

    def _send(self, status: int, value: dict[str, Any]) -> None:
        answer = json.dumps({"schema": SCHEMA, "time": time.time(), **plain(value)}).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(answer)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(answer)


def _number(query: dict[str, str], name: str, default: float, most: float | None) -> float:
    """A number of the query; Refusal where it is none. More than `most` is taken as that."""
    try:
        value = float(query.get(name, default))
    except ValueError:
        raise Refusal(400, f"{name}={query[name]!r} is not a number") from None
    if not value >= 0 or value == float("inf"):
        raise Refusal(400, f"{name}={query[name]} must be a number of 0 or more")
    return value if most is None else min(value, most)
