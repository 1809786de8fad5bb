"""Processes by identity (never by command line: some of Ray's agents hide theirs), and the end of a process session."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from pathlib import Path


def start_time(pid: int) -> float | None:
    """Return the clock tick after boot at which `pid` started; None where it is gone, or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] == "Z" else float(fields[19])


def boot_id() -> str:
    """Return the identity of this boot of the machine: pids and start times of another one mean nothing."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def is_same(pid: int, started: float) -> bool:
    """Whether the process that had `pid` at `started` lives; a later process with its number is another one."""
    return start_time(pid) == started


def session_members(session_id: int) -> list[int]:
    """Return the pids of the live processes whose process session is `session_id`."""
    pids = []
    for pid in (int(entry) for entry in os.listdir("/proc") if entry.isdigit()):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if start_time(pid) is not None and os.getsid(pid) == session_id:
                pids.append(pid)
    return pids


def end_session(session_id: int, grace_s: float = 1.0) -> None:
    """End every process of one process session: SIGTERM, then SIGKILL to what is left after `grace_s`."""
    if session_id <= 1 or session_id == os.getsid(0):
        raise ValueError(f"refusing to end process session {session_id}: it is not one we started")
    _signal_all(session_id, signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while session_members(session_id) and time.monotonic() < deadline:
        time.sleep(0.05)
    while members := session_members(session_id):
        _signal_all(session_id, signal.SIGKILL)
        time.sleep(0.05)
        if time.monotonic() > deadline + 10.0:
            raise RuntimeError(f"processes {members} of session {session_id} do not end on SIGKILL")


def oom_kills() -> int | None:
    """Return how often the kernel killed a process of our memory group; None where it does not say."""
    for path in (Path("/sys/fs/cgroup/memory.events"), Path("/sys/fs/cgroup/memory/memory.oom_control")):
        with contextlib.suppress(OSError, ValueError, IndexError):
            words = path.read_text().split()
            return int(words[words.index("oom_kill") + 1])
    return None


def sweep(folder: Path, prefix: str) -> None:
    """Remove this user's files and folders in `folder` whose names start with `prefix`; those of others stay."""
    for entry in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):  # whose it was removed it
            if not entry.name.startswith(prefix) or entry.lstat().st_uid != os.geteuid():
                continue
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry, ignore_errors=True)
            else:
                entry.unlink()


def _signal_all(session_id: int, number: int) -> None:
    for pid in session_members(session_id):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def memory_bytes(pid: int) -> tuple[int, int] | None:
    """Return resident memory of `pid`, and how much of it others may map too, in bytes; None where it is gone, or a
    zombie, which holds nothing any more."""
    try:
        fields = Path(f"/proc/{pid}/statm").read_text().split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    page = os.sysconf("SC_PAGE_SIZE")
    return (int(fields[1]) * page, int(fields[2]) * page) if int(fields[1]) else None
