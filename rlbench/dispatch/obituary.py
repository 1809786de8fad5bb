"""What is told when a worker process has died: which one, why, its last words, its memory then, and what to do."""

from __future__ import annotations

import re
import time
from typing import Any

from rlbench.errors import WorkerDied
from rlbench.runtime import processes, registry
from rlbench.traces import UserLine, remember
from rlbench.units import format_bytes

LAST_LINES = 40
RECENT_SAMPLES = 10  # five seconds
FATE_LIMIT_S, FATE_POLL_S = 120.0, 5.0
NOISE = ("[Gloo]", "UserWarning", "warnings.warn", "it/s]", "s/it]")
"""What says nothing of an end: warnings, progress bars."""

EXIT = re.compile(r"^os\._exit\((?P<status>.*)\) was called(?: in (?P<function>.*) at (?P<file>.*):(?P<line>\d+))?$")
"""The last words of a worker whose own code ended it (`dispatch.host`)."""


def obituary(
    label: str,
    engine: str,
    pid: int | None,
    error: BaseException,
    samples: list[dict[str, Any]],
    actor: str,
    in_session: bool,
) -> WorkerDied:
    """What to raise; its last words are what `rb.last_traceback()` gives.

    Args:
        label, engine: what the worker is called, and its engine.
        pid: of the process; None where it is not known.
        error: what Ray said of the call.
        samples: the monitor's, oldest first.
        actor: the worker's name in the samples.
        in_session: it belongs to a session that can heal it.
    """
    said = last_words(pid)
    itself = next((found for found in map(EXIT.match, reversed(said)) if found), None)
    why = _called(itself) if itself else cause(error, samples)
    lines = [f"{label} of {engine} died{f' (pid {pid})' if pid else ''}: {why}"]
    held = [s["resident"][actor] for s in samples if actor in s["resident"]]
    if held:
        seen, most = format_bytes(held[-1]), format_bytes(max(held))
        lines.append(f"  It held {seen} when last seen; the most lately was {most}.")
    if said and not itself:
        lines.append("  rb.last_traceback() has its last words.")
    lines.append(
        "  The engine is broken: session.heal() rebuilds it and goes on from the last snapshot."
        if in_session
        else f"  The engine is broken: {engine}.close(), then build it again."
    )
    died = WorkerDied("\n".join(lines))
    if said:
        died.full_traceback = remember("\n".join([f"last words of {label} of {engine}:", *said]))
    return died


def _called(said: re.Match[str]) -> str:
    """Which line ended the process, as a reader here knows it."""
    place = f" in {UserLine(said['file'], int(said['line']), said['function'], '')}" if said["file"] else ""
    return f"its own code ended it: os._exit({said['status']}) was called{place}"


def final_fate(worker: Any, error: BaseException) -> BaseException | None:
    """What Ray says in the end of a worker that it could not reach: why it died, or None where it answers again.

    A node that went away shows first as a lost connection; that it is gone takes the cluster some seconds to see.
    """
    import ray

    if not isinstance(error, ray.exceptions.ActorUnavailableError):
        return error
    deadline = time.monotonic() + FATE_LIMIT_S
    while time.monotonic() < deadline:
        try:
            ray.get(worker.pid.remote(), timeout=FATE_POLL_S)
            return None
        except (ray.exceptions.ActorUnavailableError, ray.exceptions.GetTimeoutError):
            time.sleep(FATE_POLL_S / 10)
        except ray.exceptions.RayActorError as final:
            return final
    return error


def cause(error: BaseException, samples: list[dict[str, Any]]) -> str:
    """Why it ended, as far as the system tells."""
    text = str(error)
    kills = [s["oom_kills"] for s in samples if s.get("oom_kills") is not None]
    now = processes.oom_kills()
    if kills and now is not None and now > kills[-RECENT_SAMPLES:][0]:
        return "memory ran out, and the system just killed a process for it (signal 9)"
    if "OutOfMemory" in type(error).__name__ or "memory monitor" in text:
        return "the host was nearly out of memory, and Ray killed it"
    if "node" in text.lower() and ("died" in text or "dead" in text) and "actor's node" in text.lower():
        return "its node left the cluster"
    if "connection error code 2" in text or "SYSTEM_ERROR" in text:
        return "its process ended without a word: killed from outside (signal 9), or crashed"
    stated = [line.strip() for line in text.splitlines() if "cause" in line.lower() or "exit" in line.lower()]
    return (stated or text.strip().splitlines() or [type(error).__name__])[0]


def last_words(pid: int | None) -> list[str]:
    """The end of what the process wrote; empty where its log is not on this host."""
    record = registry.read_cluster()
    if pid is None or record is None:
        return []
    found = [path for kind in ("out", "err") for path in sorted(record.logs.glob(f"worker-*-{pid}.{kind}"))]
    lines = [
        line.rstrip()
        for path in found
        for line in path.read_text(errors="replace")[-20_000:].splitlines()
        if line.strip() and not line.startswith(":") and not any(mark in line for mark in NOISE)
    ]
    return lines[-LAST_LINES:]
