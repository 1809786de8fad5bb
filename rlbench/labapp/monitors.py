"""Which sessions the state folder names, and asking their monitors, whose tokens stay here: no answer holds one."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from subprocess import DEVNULL, PIPE, STDOUT
from typing import Any

import psutil
from tornado import web

from rlbench.monitor import client
from rlbench.runtime import devices, registry

SCHEMA = 1
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
ANSWER_LIMIT_S = 5.0
KILL_LIMIT_S = 100.0
NVML_LIMIT_S = 1.0
_ASKING = ThreadPoolExecutor(32, thread_name_prefix="rlbench ask")  # a monitor that hangs holds one, for a while


class Trouble(web.HTTPError):
    """A question that has no good answer: the HTTP status, a state the panel can show, and a sentence."""

    def __init__(self, status: int, state: str, message: str, **more: Any) -> None:
        super().__init__(status)
        self.answer = {"schema": SCHEMA, "state": state, "error": message, **more}


def listed() -> list[dict[str, Any]]:
    """Every session of the state folder: `live`, `gone` where its monitor ended and only its file is left, `parked`."""
    records = [(path.stem, registry.read_json(path)) for path in registry.session_files()]
    there = [
        registry.shown(record) | {"name": name, "state": "live" if registry.monitor_lives(record) else "gone"}
        for name, record in records
        if record is not None
    ]
    return [*there, *registry.parked_sessions()]


def host_memory() -> dict[str, int]:
    """`used` and `total` bytes of the machine's memory; used is what cannot be had without ending something."""
    memory = psutil.virtual_memory()
    return {"used": memory.total - memory.available, "total": memory.total}


class Gpus:
    """What NVML says of the machine's GPUs, asked in a thread: a driver that hangs holds nobody up."""

    def __init__(self) -> None:
        self._asked: asyncio.Future[list[dict[str, Any]]] | None = None

    async def memory(self) -> dict[str, Any]:
        """`gpus`, each with `name`, `used` and `total` bytes; where NVML fails none, and `gpus_error` says how."""
        if self._asked is None or self._asked.done():
            self._asked = asyncio.ensure_future(asyncio.to_thread(devices.gpu_memory))
        try:
            return {"gpus": await asyncio.wait_for(asyncio.shield(self._asked), NVML_LIMIT_S)}
        except TimeoutError:
            return {"gpus": [], "gpus_error": f"NVML did not answer within {NVML_LIMIT_S:g} s"}
        except Exception as error:  # whatever the driver raises: the sessions are listed all the same
            return {"gpus": [], "gpus_error": f"{type(error).__name__}: {error}"}


async def kill(name: str) -> str:
    """End session `name` as `rlbench kill` does, forget a parked one, in a process of its own; what it said."""
    parked = NAME.fullmatch(name) and registry.parked(name) is not None
    if not parked:
        _record(name)
    verb = ("park", "--yes", f"--drop={name}") if parked else ("kill", "--yes", "--", name)
    command = (sys.executable, "-m", "rlbench.cli", *verb)
    process = await asyncio.create_subprocess_exec(*command, stdin=DEVNULL, stdout=PIPE, stderr=STDOUT)
    try:
        said, _ = await asyncio.wait_for(process.communicate(), KILL_LIMIT_S)
    except TimeoutError as error:
        process.kill()
        await process.wait()
        raise Trouble(504, "silent", f"session {name!r} did not end in {KILL_LIMIT_S:g} s") from error
    lines = said.decode(errors="replace").strip().splitlines()
    if process.returncode:
        raise Trouble(500, "silent", lines[-1] if lines else f"rlbench kill ended with {process.returncode}")
    return lines[-1] if lines else ""


async def ask(name: str, path: str, body: Mapping[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
    """Ask the monitor of session `name`; its status and JSON. Trouble: 404 unknown, 503 gone or silent."""
    loop = asyncio.get_running_loop()
    for _ in range(2):  # a monitor that restarted has another url and token in the file by now
        record = _record(name)
        try:
            status, answer = await loop.run_in_executor(_ASKING, client.fetch, record, path, body, ANSWER_LIMIT_S)
        except client.MonitorGone as error:
            raise _silent(record, name, error) from error
        if status != 401:
            return status, answer
    raise _silent(record, name, f"the monitor of session {name!r} does not answer: its token changed")


def _record(name: str) -> dict[str, Any]:
    record = registry.read_json(registry.session_file(name)) if NAME.fullmatch(name) else None
    if record is None and NAME.fullmatch(name) and registry.parked(name) is not None:
        raise Trouble(404, "parked", f"session {name!r} is parked: rb.attach({name!r}) brings it back")
    if record is None:
        raise Trouble(404, "unknown", f"no session {name!r}", sessions=[row["name"] for row in listed()])
    return record


def _silent(record: Mapping[str, Any], name: str, error: object) -> Trouble:
    if registry.monitor_lives(record):
        return Trouble(503, "silent", str(error))
    said = f"session {name!r} is gone: its monitor ended. `rlbench kill {name}` removes what it left"
    return Trouble(503, "gone", said)
