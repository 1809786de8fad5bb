"""The guard: a small process of its own that starts Ray, watches it, and leaves nothing behind.

`ray.init()` clusters die with the kernel and a plain `ray start` with the kernel's process group; this process is in
neither. It starts `ray start --head --block` in a process session of its own, publishes `cluster.json` when Ray
answers, and ends the whole session (by session id: never `ray stop`, which ends every Ray of the machine) when it is
told to (SIGTERM), when Ray breaks, or when no session has lived on the cluster for ten minutes.

    python -m rlbench.runtime.guard CLUSTER_ID DEVICES GPUS
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from rlbench.runtime import head, processes, registry

IDLE_LIMIT_S = 600.0
START_LIMIT_S = 90.0
ATTEMPTS = 3  # Ray gives its node 30 s to register, which a busy machine may exceed once
STARTED = "Ray runtime started"


def main(argv: list[str]) -> int:
    """Run one cluster from start to end; returns the exit status."""
    cluster_id, devices, gpus = argv[0], int(argv[1]), int(argv[2])
    wanted_end: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: wanted_end.append(number))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for attempt in range(1, ATTEMPTS + 1):
        temp_dir = head.new_folder()
        port = free_port()
        said = Path(temp_dir) / "start.log"
        with said.open("w") as out:
            ray = subprocess.Popen(
                head.command(port, Path(temp_dir), devices, gpus),
                env=head.environment(Path(temp_dir)),
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
            )
        try:
            if _wait_for_ray(said, ray, wanted_end):
                _publish(cluster_id, port, ray.pid, temp_dir, devices, gpus)
                print(f"guard: ending cluster {cluster_id}: {_watch(cluster_id, ray, wanted_end)}", flush=True)
                return 0
            print(
                f"guard: start {attempt} of {ATTEMPTS} failed; Ray said:\n{said.read_text()[-2000:]}",
                flush=True,
            )
        finally:
            clean_up(cluster_id, ray.pid, temp_dir)
        if wanted_end:
            break
    return 1


def _publish(cluster_id: str, port: int, ray_session: int, temp_dir: str, devices: int, gpus: int) -> None:
    started, ray_start = processes.start_time(os.getpid()), processes.start_time(ray_session)
    assert started is not None
    if ray_start is None:
        return  # it ended just now: the watch sees that next
    registry.write_cluster(
        registry.ClusterRecord(
            id=cluster_id,
            address=f"127.0.0.1:{port}",
            guard_pid=os.getpid(),
            guard_start=started,
            ray_session=ray_session,
            ray_start=ray_start,
            boot=processes.boot_id(),
            temp_dir=temp_dir,
            token_path=str(registry.token_file()),
            devices=devices,
            gpus=gpus,
        )
    )


def free_port() -> int:
    """A TCP port free on loopback now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def answers(address: str, timeout_s: float = 0.2) -> bool:
    """True when something accepts connections at `host:port`; attaching to a dead Ray address would hang."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout_s).close()
    except (OSError, ValueError, OverflowError):  # nobody there, or no address
        return False
    return True


def clean_up(cluster_id: str, ray_session: int | None, temp_dir: str) -> None:
    """End all of a cluster and remove what it left: processes, temp folder, our shared memory files, records."""
    if ray_session is not None:
        processes.end_session(ray_session)
    shutil.rmtree(temp_dir, ignore_errors=True)
    processes.sweep(Path("/dev/shm"), f"rlb-{cluster_id}-")
    registry.forget_cluster(cluster_id)


def _wait_for_ray(said: Path, ray: subprocess.Popen[bytes], wanted_end: list[int]) -> bool:
    """True once `ray start` says that the node is registered; its port answers some time before that."""
    deadline = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline and not wanted_end:
        if STARTED in said.read_text(errors="replace"):
            return True
        if ray.poll() is not None:
            return False
        time.sleep(0.05)
    return False


def _watch(cluster_id: str, ray: subprocess.Popen[bytes], wanted_end: list[int]) -> str:
    idle_since = time.monotonic()
    while True:
        if wanted_end:
            return "asked to"
        if ray.poll() is not None:
            return f"Ray ended with status {ray.returncode}"
        if registry.live_sessions(cluster_id):
            idle_since = time.monotonic()
        if time.monotonic() - idle_since > IDLE_LIMIT_S:
            return "no session for ten minutes"
        with contextlib.suppress(InterruptedError):
            time.sleep(0.2)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
