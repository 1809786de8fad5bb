"""The handlers below `/rlbench/api/`. Jupyter's own rules hold: login, XSRF token, no requests of other origins."""

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
SESSION = r"sessions/(?P<name>[^/]+)"
GPUS = monitors.Gpus()


class Handler(APIHandler):
    """Base: answers as JSON, also what goes wrong; nothing of it is to be kept by a cache."""

    auth_resource = "rlbench"
    _track_activity = False  # a panel that polls must not keep an idle server alive

    def write_error(self, status_code: int, **kwargs: Any) -> None:
        """Answer with what a Trouble has to say."""
        error = kwargs.get("exc_info", (None, None))[1]
        if isinstance(error, Trouble):
            self.finish(error.answer)
        else:
            super().write_error(status_code, **kwargs)

    def finish(self, *args: Any, **kwargs: Any) -> Any:
        """Send the answer."""
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


class Passed(Handler):
    """`GET` of what the session's monitor has at `path`, with those of our own query's arguments that it knows.

    `looks`: status 200 always, with `state` and `error` where there is no answer, for pages that ask again and again: a
    browser writes every other status to its console.
    """

    def initialize(self, path: str, query: tuple[str, ...] = (), looks: bool = False) -> None:
        """Take the route's own values."""
        self._path, self._query, self._looks = path, query, looks

    @web.authenticated
    @authorized
    async def get(self, name: str, id_: str = "") -> None:
        """Ask the monitor."""
        asked = {known: self.get_query_argument(known, None) for known in self._query}
        path = url_concat(self._path + id_, {known: value for known, value in asked.items() if value is not None})
        try:
            status, value = await monitors.ask(name, path)
        except Trouble as trouble:
            if not self._looks:
                raise
            status, value = 200, trouble.answer
        if self._looks and status != 200:
            status, value = 200, {**value, "state": "refused"}
        self.set_status(status)
        self.finish(value)


class Command(Handler):
    """`POST sessions/NAME/command` with `{"verb": …, "args": {…}}`."""

    @web.authenticated
    @authorized(action="execute")
    async def post(self, name: str) -> None:
        """Begin a control verb."""
        status, value = await monitors.ask(name, "/command", command_of(self.request.body))
        self.set_status(status)
        self.finish(value)


class Kill(Handler):
    """`POST sessions/NAME/kill`: ends it with its processes, also where its monitor does not answer."""

    @web.authenticated
    @authorized(action="execute")
    async def post(self, name: str) -> None:
        """End it, and say what was done."""
        self.finish({"schema": SCHEMA, "message": await monitors.kill(name)})


def command_of(body: bytes) -> dict[str, Any]:
    """The command in a request's body, and nothing else of it."""
    if len(body) > MAX_BODY:
        raise Trouble(413, "refused", f"the body has {len(body)} bytes, {MAX_BODY} are allowed")
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Trouble(400, "refused", f"the body is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise Trouble(400, "refused", f"the body must be a JSON object, got {type(value).__name__}")
    return {"verb": value.get("verb"), "args": value.get("args") or {}}


def routes(base_url: str) -> list[tuple[Any, ...]]:
    """All handlers with their paths below the server's base url."""
    state = {"path": "/state", "query": ("history", "since")}
    table: list[tuple[Any, ...]] = [
        (r"sessions", Sessions),
        (rf"{SESSION}/state", Passed, state),
        (rf"{SESSION}/look", Passed, state | {"looks": True}),
        (rf"{SESSION}/samples", Passed, {"path": "/samples", "query": ("since",)}),
        (rf"{SESSION}/command", Command),
        (rf"{SESSION}/kill", Kill),
        (rf"{SESSION}/command/(?P<id_>[0-9a-f]{{1,32}})", Passed, {"path": "/command/"}),
    ]
    return [(url_path_join(base_url, "rlbench", "api", path), *handler) for path, *handler in table]
