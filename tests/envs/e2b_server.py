"""A service that speaks E2B's interface on this machine, for E2B's own package: its REST interface, and in each sandbox
that of `envd`, E2B's daemon there (files by HTTP, processes by the Connect protocol, in JSON).

Requests are read with the types that E2B generates into its package, and refused where they have what those do not
know; answers are those of the published source of E2B's service and of `envd` (github.com/e2b-dev/infra, 2026-08).
Programs run as processes of this machine, in a folder for each sandbox: nothing sets them apart here.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import signal
import socket
import sys
import threading
from collections import deque
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn
from connectrpc.code import Code
from connectrpc.errors import ConnectError
from connectrpc.request import RequestContext
from e2b.api.client.models import Error, NewSandboxV2
from e2b.api.client.models import Sandbox as Created
from e2b.envd.process.process_connect import Process, ProcessASGIApplication
from e2b.envd.process.process_pb import ProcessEvent, StartRequest, StartResponse
from protobuf import Oneof
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tests.clock import until

KEY = "e2b_0123456789abcdef"
TEMPLATES = ("base", "mine")
GONE = "The sandbox was not found"


@dataclass(eq=False)
class Box:
    """A sandbox."""

    id: str
    token: str
    folder: Path
    request: dict[str, Any]
    idempotency_key: str | None
    processes: list[asyncio.subprocess.Process] = field(default_factory=list)
    started: threading.Event = field(default_factory=threading.Event)
    gone: asyncio.Event = field(default_factory=asyncio.Event)

    def path(self, name: str) -> Path:
        """Where a path of the sandbox's lies on this machine."""
        return self.folder / name.lstrip("/")

    def kill(self) -> None:
        """End what runs there, and remove its files."""
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        shutil.rmtree(self.folder, ignore_errors=True)


class Service(Process):
    """E2B, in a thread. `refusals`: (status, message, headers) for the next calls that create a sandbox. `silent`:
    commands begin, and nothing more is heard of them. `lost`: sandboxes are gone as soon as a command began."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.boxes: dict[str, Box] = {}
        self.made: list[Box] = []
        self.killed: list[str] = []
        self.refusals: deque[tuple[int, str, dict[str, str]]] = deque()
        self.silent = self.lost = False
        self._rpc = ProcessASGIApplication(self)
        routes = [
            Route("/v2/sandboxes", self._create, methods=["POST"]),
            Route("/sandboxes/{id}", self._kill, methods=["DELETE"]),
            Route("/files", self._write, methods=["POST"]),
            Route("/health", self._health, methods=["GET"]),
        ]
        self._rest = Starlette(routes=routes)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a request, as ASGI has it."""
        called = self._rpc if scope["path"].startswith("/process.Process/") else self._rest
        await called(scope, receive, send)

    async def _create(self, request: Request) -> Response:
        if refused := _unauthorized(request):
            return refused
        if self.refusals:
            status, message, headers = self.refusals.popleft()
            return _error(status, message, headers)
        body = await request.json()
        wanted = NewSandboxV2.from_dict(body)
        typed = isinstance(wanted.timeout, int) and isinstance(wanted.allow_internet_access, bool)
        if wanted.additional_properties or not typed or request.headers["content-type"] != "application/json":
            return _error(400, f"not the published schema: {body}")
        if wanted.template_id not in TEMPLATES:
            return _error(404, f"template '{wanted.template_id}' not found")
        name = f"i{secrets.token_hex(10)}"
        box = Box(name, secrets.token_hex(16), self._folder / name, body, request.headers.get("idempotency-key"))
        box.folder.mkdir()
        box.path(".profile").write_text(f"PATH={Path(sys.executable).parent}:$PATH\n")  # the template has a python3
        self.boxes[box.id] = box
        self.made.append(box)
        created = Created(wanted.template_id, box.id, "client", "0.6.7", envd_access_token=box.token)
        return JSONResponse(created.to_dict(), 201)

    async def _kill(self, request: Request) -> Response:
        if refused := _unauthorized(request):
            return refused
        name = request.path_params["id"]
        if name not in self.boxes:
            return _error(404, f"sandbox {name} not found")
        self._end(self.boxes[name])
        self.killed.append(name)
        return Response(status_code=204)

    def _end(self, box: Box) -> None:
        self.boxes.pop(box.id, None)
        box.gone.set()
        box.kill()

    async def _write(self, request: Request) -> Response:
        box = self._box(request.headers)
        if isinstance(box, str):
            return _error(502, box)
        path = request.query_params["path"]
        form = await request.form()
        box.path(path).parent.mkdir(parents=True, exist_ok=True)
        box.path(path).write_bytes(await form["file"].read())  # type: ignore[union-attr]
        return JSONResponse([{"path": path, "name": Path(path).name, "type": "file"}])

    async def _health(self, request: Request) -> Response:
        box = self._box(request.headers)
        return _error(502, box) if isinstance(box, str) else Response(status_code=204)

    def _box(self, headers: Any) -> Box | str:
        """Return the sandbox that a request is for, or why there is none."""
        box = self.boxes.get(headers.get("e2b-sandbox-id", ""))
        if box is None or headers.get("e2b-sandbox-port") != "49983":
            return GONE
        return box if headers.get("x-access-token") == box.token else "unauthorized access"

    async def start(
        self, request: StartRequest, ctx: RequestContext[StartRequest, StartResponse], /
    ) -> AsyncIterator[StartResponse]:
        """Run a command, and tell what it prints and how it ends, as `envd` does: not before its pipes are closed."""
        box = self._box(ctx.request_headers)
        if isinstance(box, str):
            raise ConnectError(Code.UNAVAILABLE, box)
        assert request.process is not None and not request.stdin
        config = request.process
        process = await asyncio.create_subprocess_exec(
            config.cmd,
            *config.args,
            cwd=box.path(config.cwd),
            env={"PATH": os.defpath, "HOME": str(box.folder), **config.envs},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        box.processes.append(process)
        yield _told("start", ProcessEvent.StartEvent(pid=process.pid))
        box.started.set()
        if self.lost:
            self._end(box)
            raise ConnectError(Code.UNAVAILABLE, "the connection to the sandbox ended before the stream completed")
        if self.silent:
            await box.gone.wait()
            raise ConnectError(Code.UNAVAILABLE, GONE)
        async for stream, data in _printed(process):
            yield _told("data", ProcessEvent.DataEvent(output=Oneof(stream, data)))
        status = await process.wait()
        how = f"exit status {status}" if status >= 0 else f"signal: {-status}"
        yield _told("end", ProcessEvent.EndEvent(exit_code=max(status, -1), exited=status >= 0, status=how))


async def _printed(process: asyncio.subprocess.Process) -> AsyncIterator[tuple[Any, bytes]]:
    """Yield what a process prints, in parts, each with the name of its stream."""
    parts: asyncio.Queue[tuple[str, bytes]] = asyncio.Queue()

    async def read(name: str, stream: asyncio.StreamReader) -> None:
        while part := await stream.read(1 << 15):
            await parts.put((name, part))
        await parts.put((name, b""))

    assert process.stdout is not None and process.stderr is not None
    readers = [asyncio.ensure_future(read("stdout", process.stdout))]
    readers.append(asyncio.ensure_future(read("stderr", process.stderr)))
    ended = 0
    while ended < len(readers):
        name, part = await parts.get()
        if part:
            yield name, part
        else:
            ended += 1


def _told(what: Any, event: Any) -> StartResponse:
    return StartResponse(event=ProcessEvent(event=Oneof(what, event)))


def _unauthorized(request: Request) -> Response | None:
    given = request.headers.get("x-api-key")
    return None if given == KEY else _error(401, f"Invalid API key {given}")


def _error(status: int, message: str, headers: dict[str, str] | None = None) -> Response:
    return JSONResponse(Error(code=status, message=message).to_dict(), status, headers)


@contextlib.contextmanager
def served(folder: Path) -> Iterator[tuple[Service, str]]:
    """Serve E2B's interface on loopback; yield the service and its address."""
    service = Service(folder)
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        options = {"log_level": "critical", "lifespan": "off", "loop": "asyncio", "timeout_graceful_shutdown": 1}
        server = uvicorn.Server(uvicorn.Config(service, **options))  # type: ignore[arg-type]
        thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
        thread.start()
        until(lambda: server.started)
        try:
            yield service, f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            for box in list(service.boxes.values()):
                box.kill()
            server.should_exit = True
            thread.join()
