"""The guard: a small process of its own that starts Ray, watches it, and leaves nothing behind.

It starts Ray in a process session of its own, which a kernel's end leaves alone, and ends all of it (not by `ray stop`,
which ends every Ray of the machine) on SIGTERM, when Ray breaks, or when no session lived on it for ten minutes.
"""

from __future__ import annotations

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
    """Run one cluster (its id, device slots and GPUs) from start to end; return the exit status."""
    cluster_id, devices, gpus = argv[0], int(argv[1]), int(argv[2])
    wanted_end: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: wanted_end.append(number))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for attempt in range(1, ATTEMPTS + 1):
        temp_dir = head.new_folder()
        port = free_port()
        said = Path(temp_dir) / "start.log"
        command, environment = head.command(port, Path(temp_dir), devices, gpus), head.environment(Path(temp_dir))
        with said.open("w") as out:
            ray = subprocess.Popen(
                command, env=environment, start_new_session=True, stdin=subprocess.DEVNULL, stdout=out, stderr=out
            )
        try:
            if _wait_for_ray(said, ray, wanted_end):
                _publish(cluster_id, port, ray.pid, temp_dir, devices, gpus)
                print(f"guard: ending cluster {cluster_id}: {_watch(cluster_id, ray, wanted_end)}", flush=True)
                return 0
            print(f"guard: start {attempt} of {ATTEMPTS} failed; Ray said:\n{said.read_text()[-2000:]}", flush=True)
        finally:
            clean_up(cluster_id, ray.pid, temp_dir)
        if wanted_end:
            break
    return 1


def _publish(cluster_id: str, port: int, ray_session: int, temp_dir: str, devices: int, gpus: int) -> None:
    registry.write_cluster(
        registry.ClusterRecord(
            id=cluster_id,
            address=f"127.0.0.1:{port}",
            guard_pid=os.getpid(),
            guard_start=processes.start_time(os.getpid()) or 0.0,
            ray_session=ray_session,
            ray_start=processes.start_time(ray_session) or 0.0,  # ended just now: the watch sees that next
            boot=processes.boot_id(),
            temp_dir=temp_dir,
            token_path=str(registry.token_file()),
            devices=devices,
            gpus=gpus,
        )
    )


def free_port() -> int:
    """Return a TCP port free on loopback now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def answers(address: str, timeout_s: float = 0.2) -> bool:
    """Whether something accepts connections at `host:port`; attaching to a dead Ray address would hang."""
    host, _, port = address.rpartition(":")
    try:
        if not 0 < int(port) < 1 << 16:  # the library would connect to what is left of it
            return False
        socket.create_connection((host, int(port)), timeout_s).close()
    except (OSError, ValueError):  # nobody there, or no address
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
    """Whether `ray start` says in time that the node is registered; its port answers some time before that."""
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
        time.sleep(0.2)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
