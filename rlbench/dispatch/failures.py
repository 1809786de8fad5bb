"""What a driver raises for what failed on a worker: an exception there, or the end of its process."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import Any

from rlbench.dispatch.protocol import Failure
from rlbench.errors import ClusterEnded, RemoteError, RLBenchError, WorkerDied
from rlbench.runtime import cluster, processes, registry
from rlbench.traces import UserLine, joined, remember
from rlbench.units import format_bytes

LAST_LINES = 40
RECENT_SAMPLES = 10  # five seconds
FATE_LIMIT_S, FATE_POLL_S = 120.0, 5.0
NOISE = ("[Gloo]", "UserWarning", "warnings.warn", "it/s]", "s/it]")
"""What says nothing of an end: warnings, progress bars."""

EXIT = re.compile(r"^os\._exit\((?P<status>.*)\) was called(?: in (?P<function>.*) at (?P<file>.*):(?P<line>\d+))?$")
"""The last words of a worker whose own code ended it (`dispatch.host`)."""

CRASH = re.compile(r"^(terminate called|what\(\):|Fatal Python error: |\*\*\* SIG\w+ )")
"""How C++, Python and Ray begin what they write of a crash."""


def remote_error(failed: Sequence[tuple[str, Failure]]) -> BaseException:
    """Return the error of the first failure, our own as they are; `failed`: label (`rank 0`) and failure of each."""
    first, failure = failed[0]
    line = "" if failure.line is None else str(failure.line)
    error = failure.error
    if error is None:
        where = first + (f" (and {len(failed) - 1} more)" if len(failed) > 1 else "")
        own = f"\n  {line}" if line else ""
        error = RemoteError(
            f"{failure.kind}: {failure.message}{own}\n  raised on {where}; rb.last_traceback() has the rest"
        )
    whole = remember(joined((label, one.traceback) for label, one in failed))
    if isinstance(error, RLBenchError):
        error.user_line, error.full_traceback = line, whole
    return error


def obituary(
    label: str,
    engine: str,
    pid: int | None,
    error: BaseException,
    samples: list[dict[str, Any]],
    actor: str,
    in_session: bool,
) -> WorkerDied:
    """Tell which worker died, why, its memory by the monitor's `samples` (oldest first) under its name `actor`, and
    what to do."""
    words = _last_words(pid)
    exited = next((match for match in map(EXIT.match, reversed(words)) if match), None)
    crashed = [line.strip().split(" received")[0] for line in words if CRASH.match(line.strip())]
    if crashed:
        why = f"its process crashed: {'; '.join(dict.fromkeys(crashed))}"
    elif exited is None:
        why = _cause(error, samples)
    else:
        place = UserLine(exited["file"], int(exited["line"]), exited["function"], "") if exited["file"] else None
        why = f"its own code ended it: os._exit({exited['status']}) was called{f' in {place}' if place else ''}"
    lines = [f"{label} of {engine} died{f' (pid {pid})' if pid else ''}: {why}"]
    held = [s["resident"][actor] for s in samples if actor in s["resident"]]
    if held:
        seen, most = format_bytes(held[-1]), format_bytes(max(held))
        lines.append(f"  It held {seen} when last seen; the most lately was {most}.")
    if words and not exited:
        lines.append("  rb.last_traceback() has its last words.")
    lines.append(
        "  The engine is broken: session.heal() rebuilds it and goes on from the last snapshot."
        if in_session
        else f"  The engine is broken: {engine}.close(), then build it again."
    )
    died = WorkerDied("\n".join(lines))
    if words:
        died.full_traceback = remember("\n".join([f"last words of {label} of {engine}:", *words]))
    return died


def cluster_ended(session: str) -> ClusterEnded:
    """Make the error for a session whose cluster is gone."""
    return ClusterEnded(
        f"session {session!r} is gone: the cluster that it ran on has ended (`rlbench stop`, or Ray broke). "
        "rb.Session(…) starts another; rb.Session.load(folder) goes on from what was saved"
    )


def final_fate(worker: Any, error: BaseException) -> BaseException | None:
    """Return why a worker that Ray could not reach died in the end (a lost node takes a while), None where it
    answers."""
    import ray

    if not isinstance(error, ray.exceptions.ActorUnavailableError):
        return error
    deadline = time.monotonic() + FATE_LIMIT_S
    while time.monotonic() < deadline and not cluster.has_ended():
        try:
            ray.get(worker.pid.remote(), timeout=FATE_POLL_S)
            return None
        except (ray.exceptions.ActorUnavailableError, ray.exceptions.GetTimeoutError):
            time.sleep(FATE_POLL_S / 10)
        except ray.exceptions.RayActorError as final:
            return final
    return error


def _cause(error: BaseException, samples: list[dict[str, Any]]) -> str:
    text = str(error)
    kills = [s["oom_kills"] for s in samples if s.get("oom_kills") is not None]
    now = processes.oom_kills()
    if kills and now is not None and now > kills[-RECENT_SAMPLES:][0]:
        return "memory ran out, and the system just killed a process for it (signal 9)"
    if "OutOfMemory" in type(error).__name__ or "memory monitor" in text:
        return "the host was nearly out of memory, and Ray killed it"
    if "actor's node" in text.lower() and ("died" in text or "dead" in text):
        return "its node left the cluster"
    if "connection error code 2" in text or "SYSTEM_ERROR" in text:
        return "its process ended without a word: killed from outside (signal 9), or crashed"
    stated = [line.strip() for line in text.splitlines() if "cause" in line.lower() or "exit" in line.lower()]
    return (stated or text.strip().splitlines() or [type(error).__name__])[0]


def _last_words(pid: int | None) -> list[str]:
    """The end of what the process wrote; empty where its log is not on this host."""
    record = registry.read_cluster()
    if pid is None or record is None:
        return []
    logs = [path for kind in ("out", "err") for path in sorted(record.logs.glob(f"worker-*-{pid}.{kind}"))]
    lines = [
        line.rstrip()
        for path in logs
        for line in path.read_text(errors="replace")[-20_000:].splitlines()
        if line.strip() and not line.startswith(":") and not any(mark in line for mark in NOISE)
    ]
    crash = next((number for number, line in enumerate(lines) if CRASH.match(line.strip())), len(lines))
    return lines[crash : crash + LAST_LINES] or lines[-LAST_LINES:]  # of a crash the first lines say most
