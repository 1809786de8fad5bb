"""The state folder `$XDG_STATE_HOME/rlbench`: which cluster is ours, which sessions live on it, and the lock for both.

    lock, cluster.json, token, guard.log    of the cluster: ClusterRecord, its secret, what guard and `ray start` said
    sessions/NAME.json, NAME.journal        of a live session: its monitor, endpoint and processes; the journal
    snapshots/NAME/                         its snapshots on disk, gone with the session
    parked/NAME/                            a session that was parked, see `rlbench.session.state.parking`
    starts.json                             what starts took

Standard library alone: the Jupyter server extension reads this folder too.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlbench.errors import ClusterError
from rlbench.private import others_access
from rlbench.runtime import processes

ABOUT = "about.json"
"""What a list says of a parked session."""


@dataclass(frozen=True)
class ClusterRecord:
    """The cluster we started."""

    id: str
    address: str
    guard_pid: int
    guard_start: float
    ray_session: int  # the process session under which all its processes run
    ray_start: float  # of that session's leader
    boot: str  # of the machine, in which these numbers mean something
    temp_dir: str
    token_path: str
    devices: int
    gpus: int

    @property
    def logs(self) -> Path:
        """Where Ray keeps the logs of its processes and of our workers."""
        return Path(self.temp_dir) / "ray" / "session_latest" / "logs"


def state_dir() -> Path:
    """Return our state folder, 0700; ClusterError where another user may have put something into it."""
    base = os.environ.get("XDG_STATE_HOME") or os.path.join(os.path.expanduser("~"), ".local", "state")
    folder = Path(base) / "rlbench"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    others = others_access(folder.stat())
    if others is not None:
        raise ClusterError(
            f"the state folder {folder} is not used, since another user may have put something into it: it is "
            f"{others}. Look at what it holds and `chmod 700` it, or set XDG_STATE_HOME to a folder of your own"
        )
    folder.chmod(0o700)
    (folder / "sessions").mkdir(exist_ok=True, mode=0o700)
    return folder


@contextlib.contextmanager
def locked(timeout_s: float = 120.0) -> Iterator[None]:
    """Hold the state folder's lock; ClusterError naming the holder where it cannot be had in time."""
    path = state_dir() / "lock"
    with open(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+") as file:
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ClusterError(
                        f"another process (pid {file.read().strip() or '?'}) has held {path} for {timeout_s:g} s; "
                        "end it or wait for it, then call rb.init() again"
                    ) from None
                time.sleep(0.05)
        os.pwrite(file.fileno(), f"{os.getpid():<10}".encode(), 0)
        yield


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write `value` so that a reader sees the old file or the new one, never half of it; mode 0600."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(3)}")
    with open(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(
            json.dumps(value)
        )  # json.dump leaves cycles for the collector: 5 KiB each time, several times a step
    aside.rename(path)


def read_json(path: Path) -> dict[str, Any] | None:
    """Read a JSON object; None where there is no such file or it holds something else."""
    try:
        value = json.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError):
        return None
    return value if isinstance(value, dict) else None


def read_cluster() -> ClusterRecord | None:
    """Return the cluster we started last, whether or not it still runs; None where there is none."""
    fields = read_json(state_dir() / "cluster.json")
    try:
        return None if fields is None else ClusterRecord(**fields)
    except TypeError:  # written by another version of rlbench: its fields are not ours
        return None


def write_cluster(record: ClusterRecord) -> None:
    """Publish the cluster (the guard, once Ray answers)."""
    write_json(state_dir() / "cluster.json", asdict(record))


def forget_cluster(cluster_id: str) -> None:
    """Remove the record of the cluster with this id, and of the sessions that lived on it."""
    record = read_cluster()
    if record is None or record.id == cluster_id:
        (state_dir() / "cluster.json").unlink(missing_ok=True)
    for path in session_files():
        if (read_json(path) or {}).get("cluster") == cluster_id:
            forget_session(path.stem)


def forget_session(name: str) -> None:
    """Remove what the state folder holds of a session that is no more."""
    shutil.rmtree(snapshot_folder(name), ignore_errors=True)
    journal_file(name).unlink(missing_ok=True)
    session_file(name).unlink(missing_ok=True)  # the last: who was interrupted can name the session again


def token_file() -> Path:
    """Return the cluster's secret, made on first use."""
    path = state_dir() / "token"
    with contextlib.suppress(FileExistsError):
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_hex(32))
    return path


def session_files() -> list[Path]:
    """Return the files of the sessions, those whose monitor is gone included."""
    return sorted((state_dir() / "sessions").glob("*.json"))


def session_file(name: str) -> Path:
    """Return where the session of this name describes itself."""
    return state_dir() / "sessions" / f"{name}.json"


def journal_file(name: str) -> Path:
    """Return where the monitor of this session keeps its journal."""
    return state_dir() / "sessions" / f"{name}.journal"


def snapshot_folder(name: str) -> Path:
    """Return where the snapshots of this session lie that were asked to be on disk."""
    return state_dir() / "snapshots" / name


def parked_root(name: str) -> Path:
    """Return the folder in which the parked session of this name lies, or would."""
    return state_dir() / "parked" / name


def parked_folder(name: str) -> Path:
    """Return where all that was kept of the parked session of this name lies."""
    return parked_root(name) / "session"


def parked(name: str) -> dict[str, Any] | None:
    """Return what is said of a parked session; None where none of this name is. One that runs again is not parked."""
    folder = parked_folder(name)
    if session_file(name).exists() or not folder.is_dir():
        return None
    about = read_json(folder / ABOUT) or {}
    return {**about, "name": name, "state": "parked", "path": str(folder)}


def parked_sessions() -> list[dict[str, Any]]:
    """Return what is said of the parked sessions, by name."""
    there = [parked(path.name) for path in sorted((state_dir() / "parked").glob("[!.]*"))]
    return [record for record in there if record is not None]


def forget_parked(name: str) -> None:
    """Remove a parked session; one that is removed half-way is not listed."""
    root = parked_root(name)
    doomed = root.with_name(f".{name}.{secrets.token_hex(3)}.dropped")
    with contextlib.suppress(FileNotFoundError):
        root.rename(doomed)
    for left in root.parent.glob(".*.dropped"):
        shutil.rmtree(left, ignore_errors=True)


def monitor_lives(record: Mapping[str, Any]) -> bool:
    """Whether the monitor that wrote this session's file runs."""
    pid, started = record.get("pid"), record.get("started")
    if record.get("boot") != processes.boot_id() or not isinstance(pid, int) or started is None:
        return False
    return processes.is_same(pid, started)


def shown(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return what of a session's file may stand on a screen: not the token of its endpoint."""
    return {key: record[key] for key in ("name", "cluster", "node", "pid", "epoch") if key in record}


def live_sessions(cluster_id: str | None = None) -> list[dict[str, Any]]:
    """Return what the sessions (of one cluster, or all) say of themselves, those whose monitor is gone included."""
    records = [record for record in map(read_json, session_files()) if record is not None]
    return [record for record in records if cluster_id in (None, record.get("cluster"))]
