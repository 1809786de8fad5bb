"""What another user of this machine reaches of a running session: no file, no folder, no socket, no open port.

The places are those that the processes hold open, so that one which nobody thought of is found too.
"""

from __future__ import annotations

import json
import os
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from rlbench.runtime import processes, registry

pytestmark = pytest.mark.engine
NOBODY = 65534
SHARED_MEMORY = Path("/dev/shm")
INTRUDER = """
import json, os, socket, sys
asked = json.load(sys.stdin)
if asked["user"]:
    os.setgroups([]), os.setgid(asked["user"]), os.setuid(asked["user"])
done = []
def attempt(what, path, action):
    try:
        action(path)
    except OSError:
        return
    done.append([what, path])
def connect(path):
    with socket.socket(socket.AF_UNIX) as client:
        client.connect("\\0" + path[1:] if path[0] == "@" else path)
for path in asked["files"]:
    attempt("read", path, lambda p: os.close(os.open(p, os.O_RDONLY | os.O_NONBLOCK)))
    attempt("write", path, lambda p: os.close(os.open(p, os.O_WRONLY | os.O_NONBLOCK)))
for path in asked["libraries"]:
    attempt("write", path, lambda p: os.close(os.open(p, os.O_WRONLY | os.O_NONBLOCK)))
for path in asked["folders"]:
    attempt("list", path, os.listdir)
    attempt("plant", path, lambda p: os.symlink("/etc/passwd", p + "/planted"))
for path in asked["sockets"]:
    attempt("connect", path, connect)
print(json.dumps(done))
"""


def as_another_user(places: dict[str, list[str]], user: int = NOBODY) -> list[list[str]]:
    """What a process of `user` could do: pairs of what and where."""
    if os.geteuid() != 0:
        pytest.skip("only root can become a second user")
    found = subprocess.run(
        [sys.executable, "-c", INTRUDER],
        input=json.dumps({"user": user, **places}),
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return list(json.loads(found.stdout))


@pytest.fixture(scope="module")
def running(session: Any) -> Iterator[dict[psutil.Process, str]]:
    """The processes of a cluster on which a session has worked, its guard and this one, with their command lines."""
    record = registry.read_cluster()
    assert record is not None
    session.sync_weights()
    session.rollout(["1+1="], max_tokens=4)
    kept = [session.snapshot("for intruders"), session.snapshot("on disk", disk=True)]
    pids = [*processes.session_members(record.ray_session), record.guard_pid]
    members = [psutil.Process(pid) for pid in pids]
    yield {p: " ".join(p.cmdline()) for p in members}
    session.drop(*(snapshot.id for snapshot in kept))


def opened(process: psutil.Process) -> Iterator[tuple[Path, bool]]:
    """The files a process holds open or mapped, and whether it writes them."""
    for descriptor in Path(f"/proc/{process.pid}/fd").iterdir():
        flags = Path(f"/proc/{process.pid}/fdinfo/{descriptor.name}").read_text().split("flags:")[1].split()[0]
        yield descriptor.readlink(), int(flags, 8) & os.O_ACCMODE != os.O_RDONLY
    for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines():
        access, path = line.split()[1], line.split(maxsplit=5)[5:]
        if path:
            yield Path(path[0]), access.startswith("rw") and access.endswith("s")


def tree(*roots: Path) -> Iterator[Path]:
    for root in roots:
        yield root
        yield from root.rglob("*")


def test_another_user_reads_writes_plants_and_connects_nowhere(running: dict[psutil.Process, str]) -> None:
    record = registry.read_cluster()
    assert record is not None
    ours = set(tree(Path(record.temp_dir), registry.state_dir(), *SHARED_MEMORY.glob(f"rlb-{record.id}-*")))
    read = set()
    for process in running:
        for path, written in opened(process):
            if path.is_file() and path.is_absolute():
                (ours if written else read).add(path)
    sockets = {
        str(connection.laddr)
        for process in running
        for connection in process.net_connections("unix")
        if connection.laddr and connection.raddr in ("", None)
    }
    folders = {p for p in ours if p.is_dir()} | {p.parent for p in ours} - {Path("/tmp"), SHARED_MEMORY, Path("/dev")}
    places = {
        "files": sorted(str(p) for p in ours if p.is_file() and p != Path("/dev/null")),
        "libraries": sorted(map(str, read)),
        "folders": sorted(map(str, folders)),
        "sockets": sorted(sockets | {str(p) for p in ours if p.is_socket()}),
    }
    assert {"raylet", "plasma_store"} <= {Path(p).name for p in places["sockets"]}
    seen = "\n".join(places["files"])
    for name in ("debug_state.txt", "cluster.json", "token", "shared.json", "shared.journal", "snapshot-"):
        assert name in seen, name
    assert len(read) > 100
    assert as_another_user(places) == []


def test_the_intruder_would_say_what_it_can(tmp_path: Path) -> None:
    """The test above means something only if this one passes."""
    shared = Path("/tmp") / f"rlb-test-open-{os.getpid()}"
    shared.mkdir()
    shared.chmod(0o777)
    try:
        (shared / "file").write_text("")
        (shared / "file").chmod(0o666)
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(shared / "socket"))
            (shared / "socket").chmod(0o777)
            server.listen()
            places = {
                "files": [str(shared / "file")],
                "libraries": [str(shared / "file")],
                "folders": [str(shared)],
                "sockets": [str(shared / "socket")],
            }
            done = as_another_user(places)
        assert [what for what, _ in done] == ["read", "write", "write", "list", "plant", "connect"]
        assert (shared / "planted").is_symlink()
    finally:
        for path in shared.iterdir():
            path.unlink()
        shared.rmdir()


def test_every_port_is_on_loopback_alone(running: dict[psutil.Process, str]) -> None:
    """Without an exception: also gloo, the ranks' store, vLLM, the monitor, and this process, which is a driver."""
    listening = [
        (process.pid, connection.laddr.ip.removeprefix("::ffff:"))
        for process in [*running, psutil.Process()]
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert len(listening) > 10
    assert [found for found in listening if found[1] not in ("127.0.0.1", "::1")] == []


def test_of_ray_only_what_sessions_use_runs(running: dict[psutil.Process, str]) -> None:
    commands = "\n".join(running.values())
    assert "gcs_server" in commands and "RuntimeEnvAgent" in commands
    for unused in ("ray.util.client", "dashboard.py", "monitor.py", "log_monitor.py"):
        assert unused not in commands, unused


def test_workers_keep_their_temporary_files_with_the_cluster(running: dict[psutil.Process, str]) -> None:
    record = registry.read_cluster()
    assert record is not None
    folder = Path(record.temp_dir)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    workers = [p for p, command in running.items() if command.startswith("ray::Host")]
    assert len(workers) >= 3
    for worker in workers:
        assert Path(worker.environ()["TMPDIR"]).parent == folder


def test_without_the_token_no_port_of_ray_does_anything(running: dict[psutil.Process, str]) -> None:
    """A worker that took a task from anybody would run anybody's code."""
    services = {
        "gcs_server": ["ray.rpc.InternalKVGcsService/InternalKVGet", "ray.rpc.JobInfoGcsService/GetAllJobInfo"],
        "raylet": ["ray.rpc.NodeManagerService/RequestWorkerLease", "ray.rpc.ObjectManagerService/Push"],
        "ray::Host": ["ray.rpc.CoreWorkerService/PushTask"],
        "ray::Monitor": ["ray.rpc.CoreWorkerService/PushTask"],
    }
    asked = 0
    for process, command in running.items():
        methods = next((m for name, m in services.items() if name in command.split(" ")[0]), [])
        ports = [
            c.laddr.port
            for c in process.net_connections("inet")
            if c.status == psutil.CONN_LISTEN and c.laddr.ip.startswith("::")
        ]
        codes = {(port, method): _unauthenticated(port, method) for port in ports for method in methods}
        assert all(code in ("UNAUTHENTICATED", "UNIMPLEMENTED") for code in codes.values()), (command, codes)
        for port in ports if methods else ():
            assert "UNAUTHENTICATED" in [code for (at, _), code in codes.items() if at == port], (command, codes)
            asked += 1
    assert asked >= 7


def _unauthenticated(port: int, method: str) -> str:
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        try:
            channel.unary_unary(f"/{method}")(b"", timeout=20)
        except grpc.RpcError as error:
            return str(error.code().name)
    return "OK"
