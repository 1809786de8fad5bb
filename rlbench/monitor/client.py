"""Ask a session's monitor over its loopback endpoint, for the command line, views and the Jupyter server."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from rlbench.errors import RLBenchError, SessionError
from rlbench.runtime import registry

ASK_LIMIT_S = 30.0
MAX_ANSWER = 32 << 20
POLL_S = 0.1


class MonitorGone(SessionError):
    """Nobody answers for the session: its monitor ended, or does not answer in time."""


class Refused(RLBenchError):
    """The monitor does not serve the request; `status` as HTTP has it."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def fetch(
    record: Mapping[str, Any], path: str, body: Mapping[str, Any] | None = None, limit_s: float = ASK_LIMIT_S
) -> tuple[int, dict[str, Any]]:
    """Ask the monitor that `record` (a session's file) describes; return HTTP's status and the answer."""
    target = urlsplit(str(record.get("url", "")))
    if target.hostname != "127.0.0.1" or target.port is None:
        raise MonitorGone(f"session {record.get('name')!r} has no endpoint on this machine")
    headers = {"Authorization": f"Bearer {record.get('token', '')}", "Content-Type": "application/json"}
    connection = http.client.HTTPConnection(target.hostname, target.port, timeout=limit_s)
    try:
        connection.request("GET" if body is None else "POST", path, None if body is None else json.dumps(body), headers)
        answer = connection.getresponse()
        value = dict(json.loads(answer.read(MAX_ANSWER)))
    except (OSError, http.client.HTTPException, ValueError, TypeError) as error:
        raise MonitorGone(f"the monitor of session {record.get('name')!r} does not answer: {error}") from error
    finally:
        connection.close()
    return answer.status, value


def ask(
    record: Mapping[str, Any], path: str, body: Mapping[str, Any] | None = None, limit_s: float = ASK_LIMIT_S
) -> dict[str, Any]:
    """Fetch an answer. Raises MonitorGone, or Refused with the monitor's own words."""
    status, value = fetch(record, path, body, limit_s)
    if status >= 400:
        raise Refused(str(value.get("error", status)), status)
    return value


def command(
    record: Mapping[str, Any], verb: str, args: Mapping[str, Any] | None = None, limit_s: float = 300.0
) -> dict[str, Any]:
    """Run a control verb to its end and return the command's record; raise SessionError with what it failed of."""
    given = ask(record, "/command", {"verb": verb, "args": dict(args or {})})["command"]
    deadline = time.monotonic() + limit_s
    while given["state"] == "running":
        if time.monotonic() > deadline:
            raise SessionError(f"{verb} still runs after {limit_s:g} s; it goes on without us")
        time.sleep(POLL_S)
        given = ask(record, f"/command/{given['id']}")["command"]
    if given["state"] == "failed":
        raise SessionError(given["error"]["message"])
    return dict(given)


def find(name: str) -> dict[str, Any]:
    """Return what the file of session `name` says."""
    record = registry.read_json(registry.session_file(name)) if "/" not in name else None
    if record is None:
        if "/" not in name and registry.parked(name) is not None:
            raise SessionError(f"session {name!r} is parked: rb.attach({name!r}) brings it back")
        known = ", ".join(path.stem for path in registry.session_files()) or "none"
        raise SessionError(f"no session {name!r}; there are: {known}")
    return record
