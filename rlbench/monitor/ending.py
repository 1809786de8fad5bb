"""Ending a session from outside: through its monitor, and where that is gone, by the processes its file records.

A process is ended by its number and start time, so that a later one with the same number is left alone; never by name.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlbench.errors import SessionError
from rlbench.monitor import client
from rlbench.runtime import cluster, processes, registry

CLOSE_LIMIT_S = 60.0
RESTART_LIMIT_S = 15.0
GRACE_S = 5.0


def end(name: str) -> str:
    """End session `name`, whatever state it is in; returns what was done. Raises SessionError where it stays."""
    record = client.find(name)
    if _closed(record):
        return "closed"
    if registry.monitor_lives(record):  # it does not answer: Ray starts another, which reads its journal
        _signal({record["pid"]: record["started"]}, signal.SIGKILL)
    successor = _successor(record)
    if successor is not None and _closed(successor):
        return "closed, after its monitor was started again"
    ended = _end_processes(registry.read_json(registry.session_file(name)) or record)
    _remove_traces(record)
    return f"its monitor was gone: {len(ended)} processes ended ({', '.join(map(str, ended)) or 'none was left'})"


def _closed(record: Mapping[str, Any]) -> bool:
    """Close through the monitor; False where nobody answers."""
    try:
        client.ask(record, "/command", {"verb": "close"})
    except client.MonitorGone:
        return False
    path = registry.session_file(record["name"])
    deadline = time.monotonic() + CLOSE_LIMIT_S
    while path.exists():
        if time.monotonic() > deadline:
            raise SessionError(f"session {record['name']!r} was told to close but has not in {CLOSE_LIMIT_S:g} s")
        time.sleep(0.05)
    return True


def _successor(record: Mapping[str, Any]) -> dict[str, Any] | None:
    """What a monitor that Ray started anew says of itself; None where none comes, or no cluster could start one."""
    ours = registry.read_cluster()
    if ours is None or ours.id != record.get("cluster") or not cluster.guard_alive(ours):
        return None
    deadline = time.monotonic() + RESTART_LIMIT_S
    while time.monotonic() < deadline:
        found = registry.read_json(registry.session_file(record["name"]))
        if found is not None and found.get("token") != record.get("token") and registry.monitor_lives(found):
            return found
        time.sleep(0.1)
    return None


def _end_processes(record: Mapping[str, Any]) -> list[int]:
    """End the workers and the monitor of a session's file; returns those that ran."""
    if record.get("boot") != processes.boot_id():
        return []
    known = {int(pid): started for pid, started in record.get("workers", {}).values()}
    known[int(record["pid"])] = record["started"]
    running = {pid: started for pid, started in known.items() if processes.is_same(pid, started)}
    _signal(running, signal.SIGTERM)
    deadline = time.monotonic() + GRACE_S
    while time.monotonic() < deadline and any(processes.is_same(*one) for one in running.items()):
        time.sleep(0.05)
    _signal(running, signal.SIGKILL)
    return sorted(running)


def _signal(known: Mapping[int, float], number: int) -> None:
    for pid, started in known.items():
        if processes.is_same(pid, started):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


def _remove_traces(record: Mapping[str, Any]) -> None:
    """Shared memory, snapshots and records of a session whose processes have ended."""
    name, prefix = record["name"], str(record.get("shm", ""))
    if prefix.startswith("rlb-") and prefix.endswith(f"-{name}:"):
        processes.sweep(Path("/dev/shm"), prefix)
    registry.forget_session(name)
