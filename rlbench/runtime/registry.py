"""The state folder: which cluster is ours, which sessions live on it, and the lock that serialises starting one.

Layout of `$XDG_STATE_HOME/rlbench` (folder 0700, files 0600):

    lock              held while a cluster is started, found or stopped
    cluster.json      address, guard pid, Ray's process session id, temp folder, token path, devices
    token             the cluster's secret
    guard.log         what the guard and `ray start` said
    starts.json       what starts took, by what was started and by part
    sessions/NAME.json      one per live session: where its monitor is, its endpoint's url and token, its processes
    sessions/NAME.journal   the monitor's journal
    snapshots/NAME/         its snapshots on disk, gone with the session

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


@dataclass(frozen=True)
class ClusterRecord:
    """The cluster we started. `ray_session` is the process session id under which all its processes run, `ray_start`
    the start time of its leader, `boot` the boot of the machine in which these numbers mean something.
    """

    id: str
    address: str
    guard_pid: int
    guard_start: float
    ray_session: int
    ray_start: float
    boot: str
    temp_dir: str
    token_path: str
    devices: int
    gpus: int

    @property
    def logs(self) -> Path:
        """Where Ray keeps the logs of its processes and of our workers."""
        return ray_folder(Path(self.temp_dir)) / "session_latest" / "logs"


def ray_folder(temp_dir: Path) -> Path:
    """Ray's folder in that of a cluster: Ray opens its own to everybody, so it lies in one that is its owner's."""
    return temp_dir / "ray"


def state_dir() -> Path:
    """Return our state folder, made 0700 if it was not there.

    Raises:
        ClusterError: another user may have put something into the one that is there.
    """
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
    """Hold the state folder's lock; raises ClusterError naming the holder when it cannot be had in time."""
    path = state_dir() / "lock"
    with open(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+") as file:
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    file.seek(0)
                    raise ClusterError(
                        f"another process (pid {file.read().strip() or '?'}) has held {path} for {timeout_s:g} s; "
                        "end it or wait for it, then call rb.init() again"
                    ) from None
                time.sleep(0.05)
        file.seek(0)
        file.truncate()
        file.write(str(os.getpid()))
        file.flush()
        yield


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write `value` so that a reader sees the old file or the new one, never half of it; mode 0600."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(3)}")
    with open(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        json.dump(value, file)
    aside.rename(path)


def read_json(path: Path) -> dict[str, Any] | None:
    """Read a JSON object; None where there is no such file or it holds something else."""
    try:
        value = json.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError):
        return None
    return value if isinstance(value, dict) else None


def read_cluster() -> ClusterRecord | None:
    """The cluster we started last, whether or not it still runs; None where there is none."""
    found = read_json(state_dir() / "cluster.json")
    try:
        return None if found is None else ClusterRecord(**found)
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
        found = read_json(path)
        if found is not None and found.get("cluster") == cluster_id:
            forget_session(path.stem)


def forget_session(name: str) -> None:
    """Remove what the state folder holds of a session that is no more."""
    session_file(name).unlink(missing_ok=True)
    journal_file(name).unlink(missing_ok=True)
    shutil.rmtree(snapshot_folder(name), ignore_errors=True)


def token_file() -> Path:
    """The cluster secret, made on first use."""
    path = state_dir() / "token"
    with contextlib.suppress(FileExistsError):
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_hex(32))
    return path


def session_files() -> list[Path]:
    """The files of the live sessions."""
    return sorted((state_dir() / "sessions").glob("*.json"))


def session_file(name: str) -> Path:
    """Where the session of this name describes itself."""
    return state_dir() / "sessions" / f"{name}.json"


def journal_file(name: str) -> Path:
    """Where the monitor of this session keeps its journal."""
    return state_dir() / "sessions" / f"{name}.journal"


def snapshot_folder(name: str) -> Path:
    """Where the snapshots of this session that were asked to be on disk lie."""
    return state_dir() / "snapshots" / name


def monitor_lives(record: Mapping[str, Any]) -> bool:
    """True while the monitor that wrote this session's file runs; a later process with its number is another one."""
    pid, started = record.get("pid"), record.get("started")
    if record.get("boot") != processes.boot_id() or not isinstance(pid, int) or started is None:
        return False
    return processes.is_same(pid, started)


def shown(record: Mapping[str, Any]) -> dict[str, Any]:
    """What of a session's file may stand on a screen: not the token of its endpoint."""
    return {key: record[key] for key in ("name", "cluster", "node", "pid", "epoch") if key in record}


def live_sessions(cluster_id: str | None = None) -> list[dict[str, Any]]:
    """What the live sessions say of themselves; `cluster_id` keeps those of one cluster."""
    found = [record for record in map(read_json, session_files()) if record is not None]
    return [r for r in found if cluster_id is None or r.get("cluster") == cluster_id]
