"""The handlers below `/rlbench/api/`: who is logged in sees the sessions and commands them.

Jupyter's own rules hold: authentication, the XSRF token for what is sent, no requests of other origins.
"""

from __future__ import annotations

import json
import time
from typing import Any

from jupyter_server.auth.decorator import authorized
from jupyter_server.base.handlers import APIHandler
from jupyter_server.utils import url_path_join
from tornado import web
from tornado.httputil import url_concat

from rlbench.labapp import monitors
from rlbench.labapp.monitors import SCHEMA, Trouble

MAX_BODY = 64 << 10
SESSION = r"(?P<name>[^/]+)"
GPUS = monitors.Gpus()


class Handler(APIHandler):
    """Base: answers as JSON, also what goes wrong."""

    auth_resource = "rlbench"
    _track_activity = False  # a panel that polls must not keep an idle server alive

    async def pass_on(self, name: str, path: str, body: dict[str, Any] | None = None) -> None:
        """Answer with what the session's monitor answers."""
        try:
            status, value = await monitors.ask(name, path, body)
        except Trouble as trouble:
            status, value = trouble.status, trouble.answer
        self.set_status(status)
        self.finish(value)

    def query(self, path: str, *names: str) -> str:
        """`path` with those of our own query's arguments."""
        given = {name: self.get_query_argument(name, None) for name in names}
        return url_concat(path, {name: value for name, value in given.items() if value is not None})

    def finish(self, *args: Any, **kwargs: Any) -> Any:
        """Nothing of this is to be kept by a cache."""
        self.set_header("Cache-Control", "no-store")
        return super().finish(*args, **kwargs)


class Sessions(Handler):
    """`GET sessions`: those of this machine, live or gone; beside that the memory of its devices."""

    @web.authenticated
    @authorized
    async def get(self) -> None:
        """List them."""
        listing = {"sessions": monitors.listed(), "memory": monitors.host_memory(), **await GPUS.memory()}
        self.finish({"schema": SCHEMA, "time": time.time(), **listing})


class State(Handler):
    """`GET sessions/NAME/state?history=N&since=T`."""

    @web.authenticated
    @authorized
    async def get(self, name: str) -> None:
        """The session's state."""
        await self.pass_on(name, self.query("/state", "history", "since"))


class Look(Handler):
    """`GET sessions/NAME/look?history=N&since=T`: the state, or why there is none, always with status 200.

    For pages that ask again and again: a browser writes every other status to its console.
    """

    @web.authenticated
    @authorized
    async def get(self, name: str) -> None:
        """The session's state, or `state` and `error`."""
        try:
            status, value = await monitors.ask(name, self.query("/state", "history", "since"))
        except Trouble as trouble:
            value = trouble.answer
        else:
            value = value if status == 200 else {**value, "state": "refused"}
        self.finish(value)


class Samples(Handler):
    """`GET sessions/NAME/samples?since=T`."""

    @web.authenticated
    @authorized
    async def get(self, name: str) -> None:
        """Memory samples."""
        await self.pass_on(name, self.query("/samples", "since"))


class Command(Handler):
    """`POST sessions/NAME/command` with `{"verb": …, "args": {…}}`."""

    @web.authenticated
    @authorized(action="execute")
    async def post(self, name: str) -> None:
        """Begin a control verb."""
        try:
            body = command_of(self.request.body)
        except Trouble as trouble:
            self.set_status(trouble.status)
            self.finish(trouble.answer)
            return
        await self.pass_on(name, "/command", body)


class CommandState(Handler):
    """`GET sessions/NAME/command/ID`."""

    @web.authenticated
    @authorized
    async def get(self, name: str, id_: str) -> None:
        """What became of a command."""
        await self.pass_on(name, f"/command/{id_}")


class Kill(Handler):
    """`POST sessions/NAME/kill`: ends it with its processes, also where its monitor does not answer."""

    @web.authenticated
    @authorized(action="execute")
    async def post(self, name: str) -> None:
        """End it, and say what was done."""
        try:
            self.finish({"schema": SCHEMA, "message": await monitors.kill(name)})
        except Trouble as trouble:
            self.set_status(trouble.status)
            self.finish(trouble.answer)


def command_of(body: bytes) -> dict[str, Any]:
    """The command in a request's body, and nothing else of it. Raises Trouble."""
    if len(body) > MAX_BODY:
        raise Trouble(413, "refused", f"the body has {len(body)} bytes, {MAX_BODY} are allowed")
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Trouble(400, "refused", f"the body is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise Trouble(400, "refused", f"the body must be a JSON object, got {type(value).__name__}")
    return {"verb": value.get("verb"), "args": value.get("args") or {}}


def routes(base_url: str) -> list[tuple[str, type[Handler]]]:
    """All handlers with their paths below the server's base url."""
    table: list[tuple[str, type[Handler]]] = [
        (r"sessions", Sessions),
        (rf"sessions/{SESSION}/state", State),
        (rf"sessions/{SESSION}/look", Look),
        (rf"sessions/{SESSION}/samples", Samples),
        (rf"sessions/{SESSION}/command", Command),
        (rf"sessions/{SESSION}/kill", Kill),
        (rf"sessions/{SESSION}/command/(?P<id_>[0-9a-f]{{1,32}})", CommandState),
    ]
    return [(url_path_join(base_url, "rlbench", "api", path), handler) for path, handler in table]
